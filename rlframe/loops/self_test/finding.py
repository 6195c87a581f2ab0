"""The findings of checks, and the base of all checks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rlframe.loops.self_test.seen import Limit, Seen


class Verdict(StrEnum):
    """Outcomes of a check."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """It does not apply to this run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that a check has looked at."""

    what: str
    """Subject in a few words."""
    verdict: Verdict
    value: str
    """The result, in words for a person."""
    threshold: str = ""
    """The condition of a PASS, in words."""
    look: str = ""
    """Advice if it is no PASS."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The same in numbers, for programs."""


class Check(ABC):
    """Judges one topic. A file of `checks` ends `CHECK = TheCheck`; its name is the file's.

    Example:
        class Rewarded(Check):
            def findings(self, seen: Seen) -> Iterator[Finding]:
                mean = seen.steps[-1].metrics["reward/mean"]
                yield found("mean reward", f"{mean:.3f}", fail=mean == 0, threshold="above 0", look="your reward")
    """

    @abstractmethod
    def findings(self, seen: Seen) -> Iterator[Finding]:
        """Yields what it finds. At least one step was seen."""


def found(
    what: str,
    value: str,
    *,
    fail: bool,
    warn: bool = False,
    threshold: str,
    look: str,
    numbers: Mapping[str, float] | None = None,
) -> Finding:
    """Returns a finding that fails, warns or passes."""
    verdict = Verdict.FAIL if fail else Verdict.WARN if warn else Verdict.PASS
    return Finding(what=what, verdict=verdict, value=value, threshold=threshold, look=look, numbers=numbers or {})


def bounded(what: str, value: float, limit: Limit, *, unit: str = "nats", look: str, note: str = "") -> Finding:
    """Returns a finding about a number that fails and warns above a limit. NaN fails."""
    return found(
        what,
        f"{value:.3g} {unit}{note}",
        fail=not value <= limit.fails,
        warn=value > limit.warns,
        threshold=f"at most {limit.warns:.2g}; fails above {limit.fails:.2g}",
        look=look,
        numbers={"value": value, "limit": limit.fails},
    )


def skipped(what: str, why: str) -> Finding:
    """Returns a finding of a check that does not apply."""
    return Finding(what=what, verdict=Verdict.SKIP, value=why)
