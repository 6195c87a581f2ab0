"""The draws of model runner V1, of all requests of a step at once; see `gumbel`."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

SEEDS = 2**63
"""Number of seeds that int64 tells apart."""


class Draws:
    """The seeds of the requests of a worker, and those of the rows that are being sampled."""

    def __init__(self, device: torch.device):
        self._device = device
        self._begun: dict[str, tuple[int, int]] = {}
        """Seed of each request, and how many of its input's last tokens belong to the response."""
        self._names: list[str] = []
        self._firsts = np.zeros(0, dtype=np.int64)
        self._seeds = torch.zeros(0, dtype=torch.int64)
        self._places: Tensor | None = None
        """[B] places of the tokens to be drawn in their responses. None outside of sampling."""

    def follow(self, output: Any, first: Callable[[Any], int]) -> None:
        """Takes the seeds of the requests that are new in vLLM's SchedulerOutput, before its runner reads it, so that
        it makes no generators for them.

        Args:
            first: how many of its input's last tokens belong to the response, by a request's SamplingParams.
        """
        for name in output.finished_req_ids:
            self._begun.pop(name, None)
        for new in output.scheduled_new_reqs:
            seed = getattr(new.sampling_params, "seed", None)
            # Ranks that sample the same rows must draw the same tokens, whether a request has a seed or not.
            own = zlib.crc32(new.req_id.encode()) if seed is None else seed
            self._begun[new.req_id] = own % SEEDS, first(new.sampling_params)
            if seed is not None:
                new.sampling_params.seed = None

    @contextmanager
    def of(self, names: Sequence[str], lengths: Int[np.ndarray, " B"]) -> Iterator[None]:
        """Marks inside the block which requests have the rows being sampled, and how many tokens each has sampled."""
        if names != self._names:
            self._names = list(names)
            begun = np.array([self._begun.get(name, (0, 0)) for name in names], dtype=np.int64).reshape(-1, 2)
            self._firsts, self._seeds = begun[:, 1], self._upload(begun[:, 0])
        self._places = self._upload(self._firsts + lengths)
        try:
            yield
        finally:
            self._places = None

    def _upload(self, values: Int[np.ndarray, " B"]) -> Tensor:
        found = torch.from_numpy(np.ascontiguousarray(values))
        return found.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else found

    def within(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the `forward` of vLLM's TopKTopPSampler that draws the rows of `of`, and calls its `own` for
        others, such as those of a warm-up."""
        from rlframe.rollout.vllm.sampling import gumbel

        def forward(
            logits: Float[Tensor, "B V"], generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            if self._places is None or len(self._places) != len(logits):
                return own(logits, generators, k, p)
            if k is not None or p is not None:
                from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

                logits = apply_top_k_top_p(logits, k, p)
            return gumbel.draw(logits, self._seeds, self._places), None

        return forward
