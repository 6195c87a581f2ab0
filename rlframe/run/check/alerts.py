"""Rules about alerts. See the package."""

from collections.abc import Iterator

from rlframe.loops.alerts.config import ONLINE
from rlframe.loops.alerts.watch import own_alert
from rlframe.run.check.context import online
from rlframe.run.config import RunConfig
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault


def faults(run: RunConfig) -> Iterator[Fault]:
    """Yields a fault for each alert of one's own that cannot be built, and each that would stop the run but never
    comes."""
    for name, own in run.alerts.own.items():
        try:
            own_alert(own, key=f"alerts.own.{name}")
        except ConfigError as error:
            yield from error.faults
    for name in run.alerts.stop:
        if name in ONLINE and not online(run):
            rule = f"must not name {name}"
            why = f"algorithm.name={run.algorithm.name} samples nothing, so that it never comes"
            yield Fault("alerts.stop", rule, got=run.alerts.stop, why=why, hint="remove it")
