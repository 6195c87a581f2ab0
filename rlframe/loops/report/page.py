"""The page: one HTML file with its styles, its scripts, the plotting library and the data of one run or of several.

Everything that comes from a run is in one block of base64, which no text of a model can leave. Scripts put it into the
page as text, never as HTML, and the page may load nothing (its Content-Security-Policy).
"""

import base64
import gzip
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlframe.loops.report.attempts import MOST_BYTES, MOST_OF_ONE, attempts
from rlframe.loops.report.curves import curves
from rlframe.loops.report.ended import ended
from rlframe.loops.report.files import json_lines, read_yaml, settings_of
from rlframe.loops.report.profiles import profiles
from rlframe.loops.report.times import times
from rlframe.loops.reporting.samples import sample_files
from rlframe.loops.reporting.warned import DRIVER, FAILURE, WARNINGS
from rlframe.utils.files.whole import write_whole
from rlframe.utils.nested import flat
from rlframe.utils.text import UNSAFE, printable

REPORT = "report.html"
SCRIPTS = ("base", "charts", "overview", "timeline", "tokens", "rollouts", "tables", "main")
"""Scripts of the page, in their order."""
WHOLE_NUMBERS = {int, bool, type(None)}
"""Types of numbers that are always finite."""
MOST_WARNINGS = 200
"""Greatest number of different warnings in the page."""


def write_page(outputs: Sequence[Path], to: Path) -> int:
    """Writes the page of one run, or of several to compare. Returns its size in bytes.

    Raises:
        OutputError: a folder is not that of a run, or the file cannot be written.
    """
    runs = [run_of(output, most_bytes=MOST_BYTES // len(outputs), page=to.parent) for output in outputs]
    page = render({"made_at": time.time(), "runs": runs}).encode()
    write_whole(to, page)
    return len(page)


def run_of(output: Path, *, most_bytes: int = MOST_BYTES, page: Path | None = None) -> dict[str, Any]:
    """Returns everything about a run that the page shows.

    Args:
        most_bytes: greatest size of its rollouts.
        page: folder of the page, to which links are relative; None means that of the run.
    """
    settings = settings_of(output)
    records = list(json_lines(output / "metrics.jsonl"))
    done = max((record["step"] for record in records if isinstance(record.get("step"), int)), default=0)
    return {
        "name": str(settings.get("name", output.name)),
        "output": str(output),
        "steps": settings["steps"],
        "done": done,
        "failure": failure(output, done),
        "settings": flat(settings),
        "overrides": read_yaml(output / "overrides.yaml") or [],
        "curves": curves(records),
        "times": times(json_lines(output / "timeline.jsonl")),
        "warnings": warnings(output),
        "profiles": profiles(output, page=page or output),
        "attempts": attempts(output, most_bytes=most_bytes),
        "most_attempts": MOST_OF_ONE,
        "sampled_steps": len({step for step, _, _ in sample_files(output)}),
        "ended": ended(output),
    }


def warnings(output: Path) -> list[dict[str, Any]]:
    """Returns the warnings of a run: each text once, with its first and last step, how often it came, and from which
    processes."""
    found: dict[str, dict[str, Any]] = {}
    for line in json_lines(output / WARNINGS):
        if line.get("of") == FAILURE:
            continue
        text = str(line.get("text", ""))
        known = found.setdefault(
            text, {"text": text, "of": line.get("of", ""), "roles": [], "first": line.get("step"), "count": 0}
        )
        known["last"] = line.get("step")
        known["count"] += 1
        role = str(line.get("role", DRIVER))
        if role not in known["roles"]:
            known["roles"].append(role)
    return list(found.values())[-MOST_WARNINGS:]


def failure(output: Path, done: int) -> dict[str, Any] | None:
    """Returns the last error that ended a run, and the step that was under way. None if there is none, or if the run
    went on after it."""
    found = [line for line in json_lines(output / WARNINGS) if line.get("of") == FAILURE]
    if not found or not isinstance(step := found[-1].get("step"), int) or step <= done:
        return None
    return {"step": step, "text": str(found[-1].get("text", ""))}


def render(content: Mapping[str, Any]) -> str:
    """Returns the page's text."""
    parts = {
        "styles": asset("page.css"),
        "scripts": "\n".join(asset(f"{name}.js") for name in SCRIPTS),
        "library": library(),
        "content": packed(json.dumps(shown(content), ensure_ascii=True, allow_nan=False).encode()),
    }
    page = asset("page.html")
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text, 1)
    return page


def shown(value: Any) -> Any:
    """Returns nested values whose texts control no terminal and reorder no line, and whose numbers JSON has."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list | tuple):
        return value if _is_plain(value) else [shown(inner) for inner in value]
    if isinstance(value, Mapping):
        return {printable(str(key)): shown(inner) for key, inner in value.items()}
    if isinstance(value, float) and value - value != 0:
        return None
    return value if value is None or isinstance(value, bool | int | float) else printable(str(value))


def _is_plain(values: Sequence[Any]) -> bool:
    """Returns whether nothing of a sequence of numbers, or of texts, needs a change: the columns of curves and of
    tokens, which are most of a page."""
    kinds = set(map(type, values))
    if kinds == {str}:
        return UNSAFE.search("".join(values)) is None
    return kinds <= WHOLE_NUMBERS or (kinds == {float} and all(map(math.isfinite, values)))


def asset(name: str) -> str:
    """Returns a file of the package."""
    return files("rlframe.loops.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def library() -> str:
    """Returns Plotly, compressed, in base64."""
    return packed(files("plotly").joinpath("package_data", "plotly.min.js").read_bytes())


def packed(content: bytes) -> str:
    """Returns bytes compressed, in base64."""
    return base64.b64encode(gzip.compress(content, 9 if len(content) < 1 << 20 else 6, mtime=0)).decode()
