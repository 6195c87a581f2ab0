"""Counts what planted faults and hostile input lead to, class by class, and how soon a sentence names them.

A campaign is a file of this folder. Run as a program (`python -m tests.campaigns.NAME`) it tries its whole class and
writes `examples/benchmarks/results/faults_NAME.json`; a pytest beside it tries a sample in seconds.
"""

import json
import platform
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "examples/benchmarks/results"


class Outcome(StrEnum):
    """Names what one trial came to."""

    REFUSED = "refused"
    """A sentence that names the cause, before any process started."""
    REPORTED = "reported"
    """A sentence that names the cause, from a run that had started."""
    SURVIVED = "survived"
    """The run went on or was resumed, and ended with the numbers of a run without the fault."""
    USED = "used"
    """No fault after all: the input is valid and changes what it should."""
    WRONG = "wrong"
    """Anything else: a traceback, a hang, a wrong number, a message that names something else, silence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """Holds one attempt to break something."""

    name: str
    """Tells it apart from the others of its campaign; enough to repeat it."""
    outcome: Outcome
    said: str = ""
    """First line of the message, or what went wrong."""
    seconds: float | None = None
    """From the fault, or from the start of the program, until the message; None where there is none to time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Holds a row of the table."""

    campaign: str
    tried: int
    outcomes: dict[str, int]
    median_s: float | None
    """Seconds to the sentence."""
    greatest_s: float | None

    def row(self) -> str:
        """Returns the Markdown row `| class | tried | by outcome | median s | greatest s |`."""
        by_outcome = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.items())
        seconds = [f"{value:.2f}" if value is not None else "-" for value in (self.median_s, self.greatest_s)]
        return f"| {self.campaign} | {self.tried} | {by_outcome} | {seconds[0]} | {seconds[1]} |"


def summarise(campaign: str, trials: Iterable[Trial]) -> Summary:
    """Returns the counts by outcome, and the median and greatest seconds of the timed trials."""
    trials = list(trials)
    seconds = [trial.seconds for trial in trials if trial.seconds is not None]
    counts = Counter(trial.outcome for trial in trials)
    return Summary(
        campaign=campaign,
        tried=len(trials),
        outcomes={str(outcome): counts[outcome] for outcome in Outcome if counts[outcome]},
        median_s=statistics.median(seconds) if seconds else None,
        greatest_s=max(seconds, default=None),
    )


def write(campaign: str, trials: Iterable[Trial], *, command: str, folder: Path = RESULTS) -> Summary:
    """Writes `faults_<campaign>.json` with every trial that went wrong, a sample of the rest, and the summary.

    Args:
        command: how to repeat it.
    """
    trials = list(trials)
    summary = summarise(campaign, trials)
    wrong = [trial for trial in trials if trial.outcome is Outcome.WRONG]
    rest = [trial for trial in trials if trial.outcome is not Outcome.WRONG]
    content = {
        "command": command,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "summary": asdict(summary),
        "wrong": [asdict(trial) for trial in wrong],
        "sample": [asdict(trial) for trial in rest[:: max(1, len(rest) // 40)]],
    }
    (folder / f"faults_{campaign}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return summary
