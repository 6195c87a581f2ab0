"""What a failed call of vLLM means, without vLLM's processes."""

import importlib.util
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlframe.rollout.vllm import engine as vllm_engine
from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.utils.errors import EngineDied

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


class Dying:
    """An AsyncLLM that knows of its death after some looks."""

    def __init__(self, looks: int):
        self._looks = looks

    @property
    def errored(self) -> bool:
        self._looks -= 1
        return self._looks < 0


def result(core: Dying, error: BaseException) -> Any:
    engine = VllmEngine.__new__(VllmEngine)
    engine._engine, engine.config, engine.folder = core, VllmConfig(tp=2), Path("model")
    future: Future[Any] = Future()
    future.set_exception(error)
    return engine._result(future, doing="a call")


FAILED = Exception("Call to collective_rpc method failed: Executor failed.")
"""vLLM's answer to a call of workers of which one has died, which comes before it is dead by its own account."""


@pytest.mark.parametrize("error", [FAILED, BaseExceptionGroup("", [FAILED])])
def test_a_call_that_fails_because_a_worker_has_died_tells_of_the_death_of_the_engine(error: BaseException):
    with pytest.raises(EngineDied, match=r"\(model, 2 ranks\) died during a call"):
        result(Dying(looks=3), error)


@pytest.mark.parametrize("error", [FAILED, BaseExceptionGroup("", [FAILED])])
def test_a_call_that_fails_in_an_engine_that_lives_on_raises_its_error(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(vllm_engine, "DEATH_NOTICE_S", 0.0)
    with pytest.raises(Exception, match="Executor failed") as raised:
        result(Dying(looks=1000), error)
    assert raised.value is FAILED


def test_an_error_of_rlframe_is_raised_at_once():
    with pytest.raises(ValueError, match="of a request"):
        result(Dying(looks=1000), BaseExceptionGroup("", [ValueError("of a request")]))
