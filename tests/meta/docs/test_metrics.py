"""docs/metrics.md describes every metric that the code logs, and no other."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rlframe.algorithms.dynamic_sampling import Flat
from rlframe.attempts.sessions.calls import Trouble
from rlframe.attempts.turns import Event, WaitsFor
from tests.meta.checkout import ROOT

AREAS = "cluster|critic|data|environment|evaluation|memory|moe|profile|reward|rollout|throughput|time|train|weight_sync"
KEY = re.compile(rf"(?:{AREAS})/[A-Za-z0-9_*{{]+(?:/[A-Za-z0-9_*]+)?")
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
BY_PART = ("skipped_steps", "grad_norm_*", "update_ratio", "update_ratio_*")
CRITIC = "rlframe/algorithms/critic.py"
"""The loss whose metrics are logged under critic/ in the place of train/."""
ROLES = ("policy", "critic", "engine", "driver")
ENUMERATED = {
    "time/*_s",
    "critic/*",
    "environment/*",
    "rollout/attempts_at_*",
    "rollout/dropped_*_groups",
    "train/*_reward",
    "memory/*_current_bytes",
    "memory/*_peak_bytes",
}
"""Patterns of the code whose names are enumerated below."""


def patterns() -> set[str]:
    """Returns every text of the code that is a metric's key, with * for what is filled in."""
    return {key for file in sorted((ROOT / "rlframe").rglob("*.py")) for key in of_file(file)}


def of_file(file: Path) -> Iterator[str]:
    source = file.read_text(encoding="utf-8")
    if not KEY.search(source):
        return
    tree = ast.parse(source)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    own = file.relative_to(ROOT).as_posix() == CRITIC
    for node in ast.walk(tree):
        text = written(node) if id(node) not in inside else None
        if text and KEY.fullmatch(text):
            yield text.replace("train/", "critic/") if own else text


def written(node: ast.AST) -> str | None:
    """Returns the text of a string, with * for each part that is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)


def enumerated() -> set[str]:
    """Returns the keys that fill in the patterns whose names are known."""
    return {
        *(f"time/{phase}_s" for phase in (*phases(), "other", "step")),
        *(f"environment/{event}" for event in (*Event, *Trouble)),
        *(f"rollout/attempts_at_{side}" for side in WaitsFor),
        *(f"rollout/dropped_{reason}_groups" for reason in Flat),
        *(f"memory/{role}_{when}_bytes" for role in ROLES for when in ("current", "peak")),
        *(f"train/{name}_reward" for name in ("desirable", "undesirable")),
    }


def phases() -> set[str]:
    """Returns the names of all phases."""
    calls = re.compile(r"phase\(\"([a-z_]+)\"")
    return {name for file in (ROOT / "rlframe").rglob("*.py") for name in calls.findall(file.read_text())}


def documented() -> set[str]:
    """Returns the keys in the first column of the page's tables, with * for names in capitals."""
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    found = {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
    return {
        re.sub(r"\b[A-Z]+\b|(?<=_)[A-Z]+\b|\b[A-Z]+(?=_)|(?<=_)[A-Z]+(?=_)", "*", key) for key in found if "/" in key
    }


LOGGED = (patterns() - ENUMERATED) | enumerated()


def fits(key: str, pattern: str) -> bool:
    """Returns whether a key of the page is one of a pattern of the code."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[A-Za-z0-9_*]+"), key) is not None


def test_the_code_has_the_patterns_that_are_enumerated() -> None:
    assert patterns() >= ENUMERATED and len(phases()) > 15


def test_each_metric_of_the_code_is_on_the_page() -> None:
    keys = documented()
    assert [pattern for pattern in sorted(LOGGED) if not any(fits(key, pattern) for key in keys)] == []


def test_each_metric_of_the_page_is_logged() -> None:
    of_every_optimizer = {"critic/lr", "critic/grad_norm", *(f"critic/{name}" for name in BY_PART)}
    keys = documented() - of_every_optimizer
    assert [key for key in sorted(keys) if not any(fits(key, pattern) for pattern in LOGGED)] == []


def test_a_metric_that_the_page_lacks_is_seen() -> None:
    assert not any(fits(key, "reward/no_such_thing") for key in documented())
    assert written(ast.parse('f"reward/{name}_mean"', mode="eval").body) == "reward/*_mean"
