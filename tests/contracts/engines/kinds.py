"""What a test has to know of each engine beside the contract: how it starts fast, and where to look into it."""

import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.models.hub import load_family, read_config
from rlframe.rollout.base.engine import RolloutEngine
from rlframe.rollout.sglang.border import SchedulerRank
from rlframe.utils.registry import find, names

ENGINES = names("rlframe.rollout")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """An engine of rlframe/rollout."""

    name: str
    counts: Callable[[Any], list[int]]
    """The tokens that each running response has; SGLang must be paused."""
    title: str = ""
    """What its errors call it. Empty when it runs in the caller's process."""
    core: str = ""
    """In the title of the process that samples."""
    same_samples: bool = True
    """Whether it samples the tokens of the embedded engine, given a seed."""
    settings: dict[str, Any] = field(default_factory=dict)

    def start(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        float32_logits: bool = False,
        with_mtp: bool = False,
        **settings: Any,
    ) -> RolloutEngine:
        """The engine on the CPU, with routes where it and the model have them."""
        component, config = find("rlframe.rollout", self.name, key="rollout.name")
        chosen = config(name=self.name, **self.settings, **settings)
        has_experts = load_family(folder).architecture(read_config(folder)).num_experts > 0
        with_routes = has_experts and chosen.speculative is None and not list(chosen.route_faults(cuda=False))
        engine = component(
            chosen,
            folder=folder,
            dtype=dtype,
            device="cpu",
            with_routes=with_routes,
            float32_logits=float32_logits,
            with_mtp=with_mtp,
        )
        if not self.core:
            engine.passes = Passes(engine)
        return engine

    def wait_for_tokens(self, engine: RolloutEngine, count: int, *, every: bool = True) -> None:
        """Returns when every running response has so many, or one of them."""
        deadline = time.monotonic() + 60
        look = scheduled if self.name == "sglang" else self.counts
        which = min if every else max
        while not (found := look(engine)) or which(found) < count:
            assert time.monotonic() < deadline, "the engine samples"
            time.sleep(0.005)


class Passes:
    """Counts the forward passes of the embedded engine since its last prefill. Each gives a token to every row."""

    def __init__(self, engine: Any):
        self.counts: list[int] = []
        forward, generate = engine.model.forward, engine.generate

        def counted(tokens: torch.Tensor, **rest: Any) -> Any:
            before = self.counts[0] if self.counts and tokens.shape[1] == 1 else -1
            answer = forward(tokens, **rest)
            self.counts = [before + 1] * tokens.shape[0]
            return answer

        def generated(requests: Any) -> Any:
            try:
                return generate(requests)
            finally:
                # Nothing runs now, and whoever waits for tokens waits for those of the next call.
                self.counts = []

        engine.model.forward, engine.generate = counted, generated


def scheduled(engine: Any) -> list[int]:
    """Asks SGLang by way of a pause, which changes nothing."""
    engine.pause()
    counts = KINDS["sglang"].counts(engine)
    engine._all(SchedulerRank.proceed)
    return counts


KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="transformers", counts=lambda engine: engine.passes.counts),
        Kind(
            name="vllm",
            title="vLLM",
            core="EngineCore",
            counts=lambda engine: [engine._num_sampled(pending) for pending in engine._running()],
            same_samples=False,
            settings={"enforce_eager": True, "max_num_seqs": 32},
        ),
        Kind(
            name="sglang",
            title="SGLang",
            core="sglang::scheduler",
            counts=lambda engine: list(engine._all(SchedulerRank.counts)[0].values()),
            settings={"max_num_seqs": 32},
        ),
    )
}


def param(name: str) -> Any:
    """The engine as a parameter. One that has processes belongs to `make test-engines`; all its tests share one."""
    missing = name != "transformers" and importlib.util.find_spec(name) is None
    marks = [pytest.mark.xdist_group(name), pytest.mark.skipif(missing, reason=f"{name} is not installed")]
    return pytest.param(KINDS[name], id=name, marks=[*marks, pytest.mark.engine] if KINDS[name].core else marks)
