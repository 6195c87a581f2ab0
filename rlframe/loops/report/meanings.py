"""Meanings of metrics: those of the page docs/metrics.md, so that they are written down once."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FIRST = (
    "reward/mean",
    "evaluation/reward_mean",
    "train/loss",
    "evaluation/loss",
    "train/accuracy",
    "train/entropy_nats",
    "train/kl_nats",
    "rollout/logprob_gap_mean_nats",
    "rollout/response_tokens_mean",
    "rollout/truncated_fraction",
    "reward/flat_groups_fraction",
    "reward/std",
    "reward/failed_fraction",
    "train/grad_norm",
    "train/clip_fraction",
    "throughput/tokens_per_s",
    "time/step_s",
    "rollout/lag_mean",
    "time/engine_idle_fraction",
)
"""The metrics that matter most, in the order in which a person should look at them. Others follow by their names."""
WHATEVER = re.compile(r"NAME|TROUBLE|SOURCE|METRIC|ROLE|PART|PHASE|NN")
"""Words that stand for something of a run's own in the names of metrics."""
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


@cache
def meaning(name: str) -> str:
    """Returns what a metric means, and what is healthy. Empty if the page does not have it."""
    rows = _rows()
    return rows[name] if name in rows else next((text for known, text in rows.items() if _matches(known, name)), "")


def page() -> Path:
    """Returns the page: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    packaged = package / "docs" / "metrics.md"
    return packaged if packaged.is_file() else package.parent / "docs" / "metrics.md"


@cache
def _rows() -> dict[str, str]:
    """Returns the sentences of the tables that begin with `metric | meaning`, and what is healthy where they have it,
    by name of metric."""
    found: dict[str, str] = {}
    columns = 0
    for line in page().read_text(encoding="utf-8").splitlines() if page().is_file() else ():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells[:2] == ["metric", "meaning"] or not cells:
            columns = 3 if any(cell.startswith("healthy") for cell in cells) else len(cells[:2])
        elif columns and "`" in cells[0]:
            for name in re.findall(r"`([^`]+)`", cells[0]):
                found.setdefault(name, " ".join(_sentences(cells[1:columns])))
    return found


def _sentences(cells: list[str]) -> Iterator[str]:
    for before, cell in zip(("", "Healthy: "), cells, strict=False):
        text = LINK.sub(r"\1", cell.strip().rstrip("|").strip()).replace("`", "")
        if text and text != "-":
            whole = before + (text if before else text[0].upper() + text[1:])
            yield whole if whole.endswith(".") else f"{whole}."


def _matches(known: str, name: str) -> bool:
    return (pattern := _pattern(known)) is not None and pattern.fullmatch(name) is not None


@cache
def _pattern(known: str) -> re.Pattern[str] | None:
    """Returns the names that a name of the page stands for. None if it is one name."""
    return re.compile("[^/]+".join(map(re.escape, WHATEVER.split(known)))) if WHATEVER.search(known) else None
