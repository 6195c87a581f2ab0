"""The engine of SGLang in front of a host that is a function: no SGLang is needed."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from rlframe.models.hub import EMBEDDED
from rlframe.rollout.sglang import engine as sglang_engine
from rlframe.rollout.sglang.border import Answer, EngineHost
from rlframe.rollout.sglang.config import SglangConfig
from rlframe.rollout.sglang.engine import SglangEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, SamplingParams


class AbortingHost:
    """Its scheduler has sampled all of `sampled` when it is told to abort, and has returned the first `returned`."""

    def __init__(self, sampled: list[int], returned: int):
        self.sampled, self.returned = sampled, returned
        self.asked = threading.Event()
        self.answer: Future[Answer] = Future()

    def call(self, method: Any, name: str, *rest: Any) -> Future[Any]:
        if method is EngineHost.generate:
            self.name = name
            self.asked.set()
            return self.answer
        told: Future[Any] = Future()
        told.set_result([({self.name: (self.sampled, [-1.0] * len(self.sampled))}, None, False)])
        if not self.answer.done():
            returned = self.sampled[: self.returned]
            self.answer.set_result(
                Answer(token_ids=returned, logprobs=[-1.0] * self.returned, finish_reason=FinishReason.ABORT)
            )
        return told


@pytest.mark.parametrize(
    ("stop", "kept", "reason"),
    [((), 6, FinishReason.ABORT), (("3",), 3, FinishReason.STOP), (("9",), 6, FinishReason.ABORT)],
)
def test_tokens_that_an_abort_brings_back_end_at_a_stop_string(
    monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], kept: int, reason: FinishReason
) -> None:
    monkeypatch.setattr(sglang_engine, "Host", lambda *args, **named: None)
    engine = SglangEngine(SglangConfig(), folder=EMBEDDED / "qwen3_moe_tiny", dtype=torch.float32, device="cpu")
    sampled = engine.tokenizer.encode("123456", add_special_tokens=False)
    assert len(sampled) == 6
    host = AbortingHost(sampled, returned=1)
    engine._host = host  # type: ignore[assignment]
    engine.gate.commit(0)
    request = GenerationRequest(
        input=ModelInput((5, 6)), sampling=SamplingParams(max_tokens=20, stop=stop), seed=0, name="a"
    )
    found: list[Completion] = []
    caller = threading.Thread(target=lambda: found.extend(engine.generate([request])))
    caller.start()
    host.asked.wait()
    engine.abort()
    caller.join()
    (completion,) = found
    assert completion.token_ids.tolist() == sampled[:kept] and completion.finish_reason is reason
