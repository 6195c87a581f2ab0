"""vLLM whose responses have lengths that async_rl.py chooses, and which writes down how many requests run.

The k-th response to a prompt has the same length in every run, whichever step or version samples it: lengths are drawn
from a generator seeded by the tokens of the prompt. `rollout.name=path/to/file.py:LengthsVllm` names the class.
"""

import json
import math
import os
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.rollout import Completion, GenerationRequest


@dataclass(kw_only=True, slots=True)
class LengthsConfig(VllmConfig):
    """Settings of vLLM, and the distribution of lengths."""

    mean_tokens: float = 400.0
    """Mean of the lognormal distribution of response lengths, before they are cut off at max_tokens."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of the lengths."""
    running_log: str = ""
    """Folder for a file per engine that gets a line whenever the number of its requests changes."""


def draw_length(generator: np.random.Generator, mean: float, sigma: float, longest: int) -> int:
    """Returns a response length in tokens, at least 1 and at most `longest`."""
    return int(np.clip(round(generator.lognormal(math.log(mean) - sigma**2 / 2, sigma)), 1, longest))


class LengthsVllm(VllmEngine):
    """Forces the length of every response."""

    config: LengthsConfig

    def __init__(self, config: LengthsConfig, **others: Any):
        self._draws: dict[int, np.random.Generator] = {}
        """The generator of each prompt's lengths, by the prompt's checksum."""
        self._requests = 0
        self._log_lock = threading.Lock()
        super().__init__(config, **others)

    def generate_each(self, requests: list[GenerationRequest]) -> Iterator[list[tuple[int, Completion]]]:
        """See RolloutEngine. `max_tokens` and `min_tokens` are the drawn length. `generate` calls it too."""
        running = len(requests)
        self._count(running)
        try:
            for ended in super().generate_each([self._with_length(request) for request in requests]):
                running -= len(ended)
                self._count(-len(ended))
                yield ended
        finally:
            self._count(-running)

    def _with_length(self, request: GenerationRequest) -> GenerationRequest:
        name = zlib.crc32(np.ascontiguousarray(request.input.token_ids).tobytes())
        with self._log_lock:
            generator = self._draws.setdefault(name, np.random.default_rng(name))
            longest = request.sampling.max_tokens
            length = draw_length(generator, self.config.mean_tokens, self.config.sigma, longest)
        return replace(request, sampling=replace(request.sampling, max_tokens=length, min_tokens=length))

    def _count(self, change: int) -> None:
        with self._log_lock:
            self._requests += change
            line = json.dumps({"at": time.time(), "running": self._requests})
            with (Path(self.config.running_log) / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(line + "\n")
