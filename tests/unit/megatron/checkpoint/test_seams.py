"""Checkpoints use what torch and Megatron make public; the few names of Megatron's inside that have no public
counterpart are in one file, and are what that file takes them for."""

import ast
import inspect
from pathlib import Path

import pytest

import rlframe.megatron.checkpoint

FILES = sorted(Path(rlframe.megatron.checkpoint.__file__).parent.glob("*.py"))
BORDER = "moments.py"
INSIDE = {
    "_get_model_param_range_map": ["self", "param"],
    "_get_main_param_and_optimizer_states": ["self", "model_param"],
    "_set_main_param_and_optimizer_states": ["self", "model_param", "tensors"],
    "_sync_hdo_state_to_sub_optimizers": ["self"],
}
"""What `moments.py` calls of Megatron's optimizers, with the parameters."""


def foreign_private_names(file: Path) -> set[str]:
    """Returns the names beginning with an underscore that a file takes from elsewhere."""
    tree = ast.parse(file.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found |= {name for name in names if name.startswith("_") and not name.startswith("__")}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                found.add(node.attr)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_only_one_file_knows_the_inside_of_megatron(file: Path) -> None:
    assert foreign_private_names(file) == (set(INSIDE) if file.name == BORDER else set())


def test_the_inside_of_megatron_is_as_it_was() -> None:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer  # noqa: PLC0415
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: PLC0415

    for name, parameters in INSIDE.items():
        owner = DistributedOptimizer if hasattr(DistributedOptimizer, name) else HybridDeviceOptimizer
        assert list(inspect.signature(getattr(owner, name)).parameters) == parameters, name
    body = inspect.getsource(DistributedOptimizer._get_main_param_and_optimizer_states)
    assert '{"param": main_param' in body and "optim_state" in body, "the tensors by their names, the optimizer's own"
    body = inspect.getsource(DistributedOptimizer._get_model_param_range_map)
    assert 'gbuf_range_map["param_map"][param]' in body, "ranges by name, of which `param` is that of the parameter"


def test_the_writer_of_torch_flushes_after_each_entry_and_names_files_after_ranks(tmp_path: Path) -> None:
    # What `files` builds on: the checksum of an entry is that at the flush behind it.
    from rlframe.megatron.checkpoint.files import write  # noqa: PLC0415
    from tests.unit.megatron.checkpoint.test_files import staged, tensors  # noqa: PLC0415

    job = staged(tmp_path, tensors())
    job.rank = 3
    entries = write(
        job,
    ).entries
    assert [entry.name.split()[0] for entry in entries] == list(tensors())
    assert {entry.file for entry in entries} == {"__3_0.distcp"}
    assert sum(entry.length for entry in entries) == (tmp_path / "__3_0.distcp").stat().st_size
