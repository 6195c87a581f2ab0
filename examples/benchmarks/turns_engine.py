"""vLLM for turns.py: responses of drawn lengths that end by themselves, and an account of what runs and what is
prefilled."""

import json
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest


@dataclass(kw_only=True, slots=True)
class TurnsConfig(VllmConfig):
    """Settings of vLLM, and the distribution of lengths."""

    mean_tokens: float = 32.0
    """Mean of the lognormal distribution of response lengths."""
    sigma: float = 0.5
    """Standard deviation of the logarithm of the lengths."""
    account: str = ""
    """Folder for the account."""


class Counted:
    """vLLM's engine, whose requests are counted."""

    def __init__(self, engine: Any, note: Any):
        self._counted, self._note = engine, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._counted, name)

    async def generate(self, prompt: Any, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        """Yields what vLLM does."""
        length, cached, tokens, begun = len(prompt["prompt_token_ids"]), None, 0, time.time()
        try:
            async for output in self._counted.generate(prompt, *arguments, **named):
                cached = output.num_cached_tokens if cached is None else cached
                tokens += len(output.outputs[0].token_ids)
                yield output
        finally:
            self._note(begun=begun, ended=time.time(), prompt=length, cached=cached or 0, tokens=tokens)


class TurnsVllm(VllmEngine):
    """Draws the length of every response, and says that it ended by itself."""

    config: TurnsConfig

    def __init__(self, config: TurnsConfig, **others: Any):
        super().__init__(config, **others)
        self._file = (Path(config.account) / f"{os.getpid()}.jsonl").open("a")
        self._lock = threading.Lock()
        self._engine: Any = Counted(self._engine, self._write)

    def _write(self, **numbers: float) -> None:
        with self._lock:
            self._file.write(json.dumps(numbers) + "\n")
            self._file.flush()

    def generate_each(self, requests: list[GenerationRequest]) -> Iterator[list[tuple[int, Completion]]]:
        """See RolloutEngine. `generate` calls it too."""
        for ended in super().generate_each([self._with_length(request) for request in requests]):
            yield [(index, replace(each, finish_reason=FinishReason.STOP)) for index, each in ended]

    def _with_length(self, request: GenerationRequest) -> GenerationRequest:
        generator = np.random.default_rng(request.seed)
        mean, sigma = self.config.mean_tokens, self.config.sigma
        drawn = round(generator.lognormal(math.log(mean) - sigma**2 / 2, sigma))
        length = int(np.clip(drawn, 1, request.sampling.max_tokens))
        return replace(request, sampling=replace(request.sampling, max_tokens=length, min_tokens=length))
