"""What differs between releases of Megatron-Core is in one file. Each entry names them, and says when it can go."""

import ast
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rlframe

PACKAGE = Path(rlframe.__file__).parent
COMPAT = PACKAGE / "megatron" / "compat.py"
ENTRIES = [
    each
    for each in ast.parse(COMPAT.read_text(encoding="utf-8")).body
    if isinstance(each, ast.FunctionDef | ast.ClassDef)
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_each_entry_names_the_releases_the_change_upstream_and_when_it_can_go(
    entry: ast.FunctionDef | ast.ClassDef,
) -> None:
    text = ast.get_docstring(entry) or ""
    assert "0.16" in text and "0.19" in text and "Can go " in text
    assert "https://github.com/NVIDIA/Megatron-LM/" in text


def test_no_other_file_asks_for_the_release() -> None:
    asking = [file for file in PACKAGE.rglob("*.py") if 'version("megatron-core")' in file.read_text(encoding="utf-8")]
    assert asking == [COMPAT]


def test_a_pickled_tensor_does_not_name_megatron() -> None:
    from rlframe.megatron import compat

    compat.name_after_torch()
    pickled = pickle.dumps(torch.ones(2))
    assert b"megatron" not in pickled
    assert torch.equal(pickle.loads(pickled), torch.ones(2))


def test_submodules_of_either_form_are_found() -> None:
    from rlframe.megatron import compat

    inner = object()
    assert compat.submodules(SimpleNamespace(submodules=inner)) is inner
    assert compat.submodules(partial(dict, submodules=inner)) is inner
