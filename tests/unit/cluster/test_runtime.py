"""What starting Ray does to this process."""

import signal

import pytest
import ray
from ray._private import utils

from rlframe.cluster.config import ClusterConfig
from rlframe.cluster.runtime import running
from rlframe.utils.errors import ConfigError


def test_sigterm_is_handled_by_the_run_also_while_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, set_handler, found = signal.getsignal(signal.SIGTERM), utils.set_sigterm_handler, []

    def init(**_: object) -> None:
        # As Ray does first of all.
        utils.set_sigterm_handler(lambda *_: None)
        found.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    try:
        with running(ClusterConfig(), num_devices=1):
            found.append(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, ours)
    assert found == [ours, ours] and utils.set_sigterm_handler is set_handler


def test_a_process_that_uses_ray_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: left.append("shutdown"))
    with pytest.raises(ConfigError, match="connected to Ray already"), running(ClusterConfig(), num_devices=1):
        pass
    assert not left, "the other run goes on"


def test_of_two_runs_at_the_same_instant_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def init(**_: object) -> None:
        # Ray is not initialized while it starts.
        assert not ray.is_initialized()
        with pytest.raises(ConfigError) as error, running(ClusterConfig(), num_devices=1):
            pass
        refused.append(str(error.value))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    for _ in range(2):
        with running(ClusterConfig(), num_devices=1):
            pass
    assert len(refused) == 2 and all("by another run or by ray.init" in each for each in refused)
