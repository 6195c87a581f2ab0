"""Alerts: all alerts of a run."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlframe.loops.alerts.base import Alert
from rlframe.loops.alerts.config import CLASSES, AlertsConfig, OwnAlertConfig
from rlframe.utils.build import build
from rlframe.utils.outside import load_class, settings_of

BASE = "rlframe.loops.alerts.base:Alert"


def own_alert(config: OwnAlertConfig, *, key: str) -> Alert[Any]:
    """Returns an alert from outside the package.

    Args:
        key: dotted key of its settings.

    Raises:
        ConfigError: there is no such class, or its options are wrong.
    """
    kind = load_class(config.name, base=BASE, key=f"{key}.name")
    settings = settings_of(kind, key=f"{key}.name")
    return kind(build(settings, config.options, key=f"{key}.options"))


def alerts_of(config: AlertsConfig) -> Iterator[tuple[str, Alert[Any]]]:
    """Yields each alert that is on, with its name."""
    yield from ((name, CLASSES[type(settings)](settings)) for name, settings in config.given())
    yield from ((name, own_alert(own, key=f"alerts.own.{name}")) for name, own in config.own.items())


class Alerts:
    """Looks at each step and says what is wrong, each thing once."""

    def __init__(self, config: AlertsConfig, say: Callable[[str], None]):
        """
        Args:
            say: shows a sentence.
        """
        self._config, self._say = config, say
        self._all = dict(alerts_of(config))
        self._said: set[str] = set()
        self.stop: Callable[[str], None] = lambda _: None
        """Ends the run after the step, for the reason it is given."""

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Looks at the metrics of a step that is done. An alert that has been said ends the run all the same, such as
        one that goes on after a resume."""
        for name, sentence in self._found(step, metrics):
            if name not in self._said:
                self._said.add(name)
                self._say(f"warning: alert {name} at step {step}: {sentence} ({self._all[name].page})")
            if name in self._config.stop:
                self.stop(f"alert {name}: {sentence}")

    def _found(self, step: int, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yields each alert that speaks, and its sentence."""
        for name, alert in self._all.items():
            if sentence := alert.look(step, metrics):
                yield name, sentence

    def rewind(self, file: Path) -> None:
        """Looks again at the steps that a run keeps, and says nothing: they have been said.

        Args:
            file: the metrics of these steps, as lines of JSON.
        """
        self._all = dict(alerts_of(self._config))
        for line in file.read_bytes().splitlines() if file.exists() else ():
            record = json.loads(line)
            # Not an evaluation, nor a probe.
            if "time/step_s" in record:
                self._said |= {name for name, _ in self._found(record["step"], record)}
