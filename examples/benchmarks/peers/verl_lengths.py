"""What verl is told beyond its settings: the length of each response, and a reward that costs next to nothing.

The folder of this file and the one above it are in PYTHONPATH, so that verl's workers find both.
"""

import json
import os
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from even_characters import score
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

LENGTHS = "STEP_VS_PEERS_LENGTHS"
"""Environment variable: the file of lengths by the checksum of a prompt's tokens."""


@cache
def lengths() -> dict[int, Iterator[int]]:
    """The lengths that are left for each prompt. All samples of a group are in one process."""
    with open(os.environ[LENGTHS], encoding="utf-8") as file:
        return {int(name): iter(values) for name, values in json.load(file).items()}


class ForcedLengths(SingleTurnAgentLoop):
    """One turn, whose length is known before it begins."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        tokens = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        name = zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes())
        forced = sampling_params | {"max_tokens": next(lengths()[name])}
        return await super().run(forced, priority, **kwargs)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The reward, as verl calls it."""
    return score(solution_str)
