"""One request inside an engine: its tokens so far, their versions, and where a stop string ends it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.cluster.watch.marks import mark
from rlframe.rollout.base.stop import completes, reach
from rlframe.types.batch import TopLogprobs
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, versions_by_token
from rlframe.utils.errors import RlframeError


class PendingRequest:
    """A request that an engine is working on."""

    def __init__(self, request: GenerationRequest, *, name: str, version: int):
        self.request = request
        self.name = name
        """The engine's request id."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.routes: np.ndarray | None = None
        """See Completion."""
        self.aborted = False
        """Whether the caller has aborted the request."""
        self.ended = False
        """Whether the engine has given its last answer. The call that has the request may still wait for others."""
        self.epoch = 0
        """Number of the weights that may have computed its keys and values. Requests of different ones share none.
        0 if all requests may share."""
        self._starts: list[tuple[int, int]] = [(version, 0)]
        """Start of each version: pairs of version and number of tokens that preceded it, in order."""

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Appends the tokens sampled since the last call.

        Args:
            logprobs: None if those of the whole response come when it has ended.
        """
        assert logprobs is None or len(token_ids) == len(logprobs), "every token has a logprob"
        mark(f"token {len(self.token_ids) + len(token_ids)} of request {self.name}")
        self.token_ids += token_ids
        self.logprobs += logprobs or ()

    def finish(self, reason: str) -> None:
        """Records that the request has ended.

        Raises:
            RlframeError: `reason` is not a FinishReason.
        """
        if reason not in set(FinishReason):
            raise RlframeError(f"the engine ended a request with {reason!r}")
        self.finish_reason, self.ended = FinishReason(reason), True

    def stop_at(self, count: int) -> None:
        """Ends the response after `count` tokens, because they spell a stop string."""
        del self.token_ids[count:], self.logprobs[count:]
        self.finish_reason, self.ended = FinishReason.STOP, True

    def mark(self, version: int, *, start: int | None = None) -> None:
        """Records that the tokens from here on, or from token number `start`, are sampled with weights of `version`."""
        self._starts.append((version, len(self.token_ids) if start is None else start))

    def completion(self) -> Completion:
        """Returns the finished response."""
        assert self.finish_reason is not None, "the request has ended"
        return Completion(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=versions_by_token(self._starts, len(self.token_ids)),
            finish_reason=self.finish_reason,
            routes=self.routes,
        )


def spelled(token_ids: list[int], *, first: int, request: GenerationRequest, tokenizer: Any) -> int | None:
    """Returns the smallest number of tokens, from `first` on, that end with a stop string. None if there is none.

    All engines stop at the same token, and not before min_tokens. A string may begin in the tokens of an earlier
    request.

    Args:
        token_ids: the tokens that this request has sampled.
    """
    sampling = request.sampling
    if not sampling.stop:
        return None
    token_ids, before = request.begun + token_ids, request.first_position
    most = reach(sampling.stop)
    for count in range(max(before + first, sampling.min_tokens), len(token_ids) + 1):
        if completes(token_ids[max(0, count - most) : count], sampling.stop, tokenizer):
            return count - before
    return None


def top_logprobs(ids: Tensor, nats: Tensor) -> TopLogprobs:
    """Returns the k most likely tokens of L - 1 places: their ids [L - 1, k], and nats [L - 1, k + 1] whose last column
    is the log-probability of all other tokens together.

    Args:
        ids, nats: [L - 1, k] the most likely tokens and their logprobs.
    """
    # Engines do not return the probability of the other tokens. It is known only up to the rounding of the k, and never
    # 0.
    rest = (1 - nats.double().exp().sum(1, keepdim=True)).clamp_min(torch.finfo(torch.float32).eps).log()
    return TopLogprobs(ids=ids.int(), logprobs=torch.cat([nats, rest], 1).float())
