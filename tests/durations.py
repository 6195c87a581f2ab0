"""Measures what each test file costs: `python -m pytest -p tests.durations ...` writes it into tests/durations.json.

Seconds are CPU seconds of the tests and of every process under them; two cores have two of them a second. What a
process computes in its last half second is not seen. Files that were not run keep their numbers.

`make durations` measures all of them, on a machine that does nothing else: where cores are shared, the same work takes
up to twice as many. Only then does the record say `quiet`, and are the sums held against the minutes of the tiers.
"""

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
EVERY_S = 0.5
PROPERTY = "cpu_s"
QUIET = "RLFRAME_TESTS_QUIET"
"""Set to 1 by `make durations`."""


class Meter:
    """Adds up CPU seconds of this process and of all that were ever seen below it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], float] = {}
        self._own = 0.0
        """What the watching itself takes."""
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def read(self) -> float:
        """Returns the seconds so far."""
        with self._lock:
            me = psutil.Process()
            for process in (me, *me.children(recursive=True)):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    self._seen[process.pid, process.create_time()] = times.user + times.system
            return sum(self._seen.values()) - self._own

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(EVERY_S):
            self.read()
            self._own = time.thread_time()


def pytest_configure(config: pytest.Config) -> None:
    """Has the plugin in the workers too."""
    # Under xdist the tests run below workers, and the controller writes.
    if os.environ.get("PYTEST_XDIST_WORKER") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(_Measures(), "measures")
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        config.pluginmanager.register(_Writes(), "writes")


class _Measures:
    def __init__(self) -> None:
        self.meter = Meter()
        self.before = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
        """Notes what the phase cost on its report."""
        report = yield
        now = self.meter.read()
        report.user_properties.append((PROPERTY, now - self.before))
        self.before = now
        return report


class _Writes:
    def __init__(self) -> None:
        self.found: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the phase to its file."""
        seconds = [value for name, value in report.user_properties if name == PROPERTY]
        self.found[report.nodeid.partition("::")[0]] += seconds[-1] if seconds else 0.0

    def pytest_sessionfinish(self) -> None:
        """Writes the files that were run beside the others, such as those whose packages are not installed here."""
        quiet = os.environ.get(QUIET) == "1"
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {"quiet": quiet, "cpu_s": {}}
        known["quiet"] |= quiet
        seconds = known["cpu_s"] | {file: round(seconds, 1) for file, seconds in self.found.items()}
        known["cpu_s"] = {file: seconds[file] for file in sorted(seconds) if (ROOT / file).exists()}
        RECORD.write_text(json.dumps(known, indent=1) + "\n")
