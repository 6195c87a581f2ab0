"""Judges the facts of a machine. Each check is a function of facts, which may be those of any machine."""

from collections.abc import Iterator

from rlframe.tools.doctor.checks import gpus, machine, packages, services
from rlframe.tools.doctor.facts import Facts, Finding

CHECKS = (*packages.CHECKS, *gpus.CHECKS, *machine.CHECKS, *services.CHECKS)


def findings(facts: Facts) -> Iterator[Finding]:
    """Yields what there is to mend."""
    for check in CHECKS:
        yield from check(facts)
