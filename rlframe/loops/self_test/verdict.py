"""The verdict of a self test: a table for the terminal, and a file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rlframe.loops.evaluation.results import finite
from rlframe.loops.self_test.finding import Check, Finding, Verdict, found
from rlframe.loops.self_test.seen import Seen
from rlframe.utils.errors import RlframeError
from rlframe.utils.files.whole import write_whole

FILE = "self_test.json"
PAGE = "docs/self_test.md"
ENDED = "run"
"""Name of the first finding: whether the run did its steps."""


class SelfTestFailed(RlframeError, RuntimeError):
    """A self test that has found a fault. The message names the checks that failed."""


def judged(checks: Mapping[str, Check], seen: Seen) -> dict[str, list[Finding]]:
    """Returns the findings of each check."""
    done = len(seen.steps)
    findings = {
        ENDED: [
            found(
                "steps",
                seen.refusal or f"{done} steps at learning rate 0",
                fail=bool(seen.refusal),
                threshold=f"{seen.settings.steps} steps and all experiments without an error",
                look="the run itself ended with this error",
                numbers={"steps": done},
            )
        ]
    }
    return findings | ({name: list(check.findings(seen)) for name, check in checks.items()} if done else {})


def worst(findings: Mapping[str, Sequence[Finding]]) -> Verdict:
    """Returns the verdict of all findings together."""
    verdicts = {each.verdict for own in findings.values() for each in own}
    return next((each for each in (Verdict.FAIL, Verdict.WARN) if each in verdicts), Verdict.PASS)


def table(findings: Mapping[str, Sequence[Finding]]) -> str:
    """Returns a line for each finding, then what to look at for each that is no PASS."""
    rows = [["", "check", "what", "found", "a pass needs"]]
    rows += [
        [each.verdict.value, name, each.what, each.value, each.threshold]
        for name, own in findings.items()
        for each in own
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[3] = min(widths[3], 60)
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, own in findings.items():
        lines += [
            f"{each.verdict}: {name}, {each.what}: {each.look} ({PAGE}#{name})"
            for each in own
            if each.verdict in (Verdict.WARN, Verdict.FAIL)
        ]
    return "\n".join(lines)


def write(folder: Path, findings: Mapping[str, Sequence[Finding]]) -> None:
    """Writes `self_test.json`."""
    values = {
        "verdict": worst(findings).value,
        "findings": [{"check": name, **asdict(each)} for name, own in findings.items() for each in own],
    }
    # NaN is no JSON.
    write_whole(folder / FILE, f"{json.dumps(finite(values), indent=2, allow_nan=False)}\n".encode())


def require_no_fault(findings: Mapping[str, Sequence[Finding]]) -> None:
    """Ends the run with an error if a check has failed.

    Raises:
        SelfTestFailed: some have.
    """
    failed = [name for name, own in findings.items() if any(each.verdict is Verdict.FAIL for each in own)]
    if failed:
        raise SelfTestFailed(f"the self test failed: {', '.join(failed)}; {FILE} has the numbers, {PAGE} explains them")
