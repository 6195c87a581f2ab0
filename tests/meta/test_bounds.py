"""Every number of a configuration states beside its type what it can be."""

import ast
import importlib
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from rlframe.algorithms.correction import MaskConfig
from rlframe.data.curriculum import CurriculumConfig
from rlframe.environments.endpoint import EndpointConfig
from rlframe.rewards.judge.chat import ChatEndpointConfig
from rlframe.utils.bounds import PathText, Range, bounds
from tests.meta.checkout import ROOT


def classes() -> Iterator[type]:
    """Yields the dataclasses that a configuration is made of: those with a name like theirs, or beside such."""
    for path in sorted((ROOT / "rlframe").rglob("*.py")):
        names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        wanted = [name for name in names if name.endswith("Config") or name in ("RewardTerm", "Parallel")]
        if wanted:
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            yield from (kind for name in wanted if is_dataclass(kind := getattr(module, name)))


def numeric(hint: Any) -> bool:
    return hint in (int, float) or any(numeric(option) for option in get_args(hint))


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__qualname__)
def test_every_number_has_both_ends(kind: type) -> None:
    stated, names = bounds(kind), {field.name for field in fields(kind)}
    without = [
        name
        for name, hint in get_type_hints(kind).items()
        if name in names and numeric(hint) and not any(isinstance(bound, Range) for bound in stated.get(name, ()))
    ]
    assert without == [], "state Annotated[..., Range(...)], see rlframe.utils.bounds"


@pytest.mark.parametrize(
    "kind",
    [kind for kind in classes() if bounds(kind) and kind not in (MaskConfig, CurriculumConfig)],
    ids=lambda kind: kind.__qualname__,
)
def test_what_is_stated_is_checked(kind: type) -> None:
    """`__post_init__` calls check_bounds, or that of its base which does. (A MaskConfig or CurriculumConfig of its
    required fields alone is refused for another reason.)"""
    hints = get_type_hints(kind)
    given = {"path": "a.py:b", "name": "a", "function": "a:b", "output": "a", "algorithm": None, "target_nats": 1.0}
    given |= {"max_tokens": 9, "cache_tokens": 3, "corpus": "a", "id": "a", "url": "http://a"}
    given |= {"base_url": "http://a", "model": "a", "endpoint": ChatEndpointConfig(base_url="http://a", model="a")}
    required = [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]
    required += ["function"] if kind is EndpointConfig else []
    for name, stated in bounds(kind).items():
        config = kind(**{field: given[field] for field in required})
        wrong: Any = "x" * 5000 if any(isinstance(bound, PathText) for bound in stated) else 10**300
        if "float" not in str(hints[name]) and wrong != "x" * 5000:
            wrong = 10**30
        member = get_origin(hints[name])
        wrong = {list: [wrong], dict: {"x": wrong}}.get(member, wrong)
        object.__setattr__(config, name, wrong)
        with pytest.raises(ValueError, match=f"^{name} must be"):
            config.__post_init__()
