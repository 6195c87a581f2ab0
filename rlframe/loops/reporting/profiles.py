"""The summary of a step's profiles, for people and as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rlframe.cluster.profiling.config import DRIVER, step_folder
from rlframe.cluster.profiling.trace import Row, Summary
from rlframe.utils.files.whole import write_whole

NAME = "summary"
"""Name of the summary's files, which end .json and .md."""


def write_summary(folder: Path, step: int, found: Mapping[str, Summary]) -> Path:
    """Writes summary.json and summary.md of a step. Returns the latter.

    Args:
        folder: of the run.
        found: what the profile of each process says, by its name.
    """
    own = folder / step_folder(step)
    own.mkdir(parents=True, exist_ok=True)
    records = {name: asdict(summary) for name, summary in found.items()}
    write_whole(own / f"{NAME}.json", json.dumps({"step": step, "processes": records}, indent=1).encode())
    file = own / f"{NAME}.md"
    write_whole(file, ("\n".join(page(step, found)) + "\n").encode())
    return file


def page(step: int, found: Mapping[str, Summary]) -> Iterator[str]:
    """Yields the lines of the summary for people."""
    yield f"# Profile of step {step}"
    yield ""
    yield "Open traces (.json.gz) at https://ui.perfetto.dev, stacks (.folded.txt) at https://speedscope.app and"
    yield "snapshots of memory (.pickle) at https://pytorch.org/memory_viz. Nothing is uploaded there."
    yield ""
    yield from table(
        ("process", "seconds", "in collectives", "GPU busy", "gaps between kernels", "longest gap", "files"),
        [
            (
                name,
                number(each.seconds),
                percent(each.collectives_fraction),
                percent(each.gpu_busy_fraction),
                "-" if each.gaps is None else str(each.gaps),
                "-" if each.longest_gap_s is None else f"{each.longest_gap_s * 1e3:.2f} ms",
                ", ".join(f"[{file}]({file})" for file in each.files) or each.note or "-",
            )
            for name, each in found.items()
        ],
    )
    for name, each in found.items():
        yield from _process(name, each)


def _process(name: str, summary: Summary) -> Iterator[str]:
    """Yields the tables of one process."""
    if summary.phases:
        yield f"## {name}: {'phases and waits for others' if name == DRIVER else 'phases'}"
        yield ""
        ordered = sorted(summary.phases.items(), key=lambda pair: -pair[1])
        yield from table(("phase", "seconds"), [(phase, number(seconds)) for phase, seconds in ordered])
    lists: Mapping[str, tuple[str, Sequence[Row]]] = {
        "operators by their own time": ("operator", summary.operators),
        "kernels": ("kernel", summary.kernels),
        "Python functions by their own samples": ("function", summary.functions),
    }
    for title, (kind, rows) in lists.items():
        if rows:
            yield f"## {name}: {title}"
            yield ""
            cells = [(f"`{each.name}`", number(each.seconds), str(each.count)) for each in rows]
            yield from table((kind, "seconds", "count"), cells)


def table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in cells:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""


def number(seconds: float | None) -> str:
    """Returns seconds as text."""
    return "-" if seconds is None else f"{seconds:.4f}"


def percent(fraction: float | None) -> str:
    """Returns a fraction as text."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"
