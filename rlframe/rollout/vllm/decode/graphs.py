"""CUDA graphs of a few kernels each, which are launched at once.

Around the model vLLM (0.26) launches a dozen kernels in a step, each from Python: one of an H200's hosts took 1.6 ms
for a step that computes 1.4 (2026-11-29, by hand). While the requests of a step stay the same, so do the arguments of
the kernels.
"""

from collections.abc import Callable
from typing import Any

import torch


class Graphs:
    """Captures functions. All graphs have one pool of memory, and run one after the other."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None
        """Kept until there is another one: a pool without any graph ends."""

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that launches the kernels that `run` launches, and returns what `run` returned, the same
        tensors each time. `run` may not wait for the device."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Another thread waits for events meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        self._last = graph

        def replay() -> Any:
            graph.replay()
            return result

        return replay
