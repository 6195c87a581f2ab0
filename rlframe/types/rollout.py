"""Rollout: one finished attempt; and the request and completion it is made of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from jaxtyping import Shaped

from rlframe.types.prompt import Prompt


class FinishReason(StrEnum):
    """Why an attempt ended."""

    STOP = "stop"
    """A stop token or stop string, which stays part of the tokens."""
    LENGTH = "length"
    """The token budget ran out."""
    ABORT = "abort"
    """The engine was told to stop; what was generated so far is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How an engine turns logits into tokens. `temperature=0` is greedy."""

    temperature: float = 1.0
    """Logits are divided by it; 0 means greedy."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    max_tokens: int = 256
    """Tokens generated at most, the stop token included."""
    min_tokens: int = 0
    """Stop tokens are not sampled before this many tokens. Equal to `max_tokens` it forces a response length."""
    stop: tuple[str, ...] = ()
    """Strings that end the response when they appear in its text, besides the model's end-of-sequence tokens."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0 (0 is greedy), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (0 keeps all tokens), got {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must lie in [0, max_tokens={self.max_tokens}], got {self.min_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One continuation to sample."""

    token_ids: tuple[int, ...]
    """[L_prompt] tokens to continue; requests with equal prompts may share one prefill."""
    sampling: SamplingParams
    seed: int
    """Decides every sampled token of this request, whatever else is in the batch: made from run seed, prompt id,
    sample index and step, so that a run repeats exactly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Which policy version made tokens [start, end) of a rollout, or of a completion's response; `batch.GIVEN` where
    none did."""

    version: int
    start: int
    end: int


@dataclass(kw_only=True, slots=True)
class Completion:
    """What an engine made of one request."""

    token_ids: list[int]
    """[L_response] sampled tokens, the stop token included."""
    logprobs: list[float]
    """[L_response] nats, of the sampled tokens under log_softmax(logits / temperature), before top-p and top-k;
    for greedy under log_softmax(logits)."""
    finish_reason: FinishReason
    segments: list[Segment]
    """Which policy version sampled which tokens, counted within the response, in order and without a gap. One segment;
    more for a response that was under way during a weight sync. An aborted response without tokens has one of length 0.
    """
    routes: Shaped[np.ndarray, "rows layers k"] | None = None
    """[P + L_response - 1, layers, k] the experts that each token of prompt and response went to, in each layer that
    has experts, in no certain order; the last token has not been sent to any. uint8, above 256 experts int16. From an
    engine that was asked for them; None of an aborted response. Tokens before a weight sync that fell into the response
    have those of the pass that sampled them, or of one by the new weights: engines differ."""

    @property
    def version(self) -> int:
        """Policy version that sampled the last token."""
        return self.segments[-1].version


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One finished attempt at a prompt. Multi-turn attempts are one Rollout too: observation tokens have mask False.

    Example: prompt tokens 7 8, response 5 2 (2 ends it):
        token_ids [7, 8, 5, 2], loss_mask [F, F, T, T], rollout_logprobs [0.0, 0.0, -0.1, -0.3]
    """

    prompt: Prompt
    sample_index: int
    """0..G-1 within the prompt's group."""
    token_ids: list[int]
    """[L] prompt and everything after it."""
    loss_mask: list[bool]
    """[L] True where the policy sampled the token."""
    rollout_logprobs: list[float]
    """[L] nats, from the engine that sampled; 0.0 where loss_mask is False."""
    segments: list[Segment]
    """The sampled spans with the version that made each."""
    finish_reason: FinishReason
    routes: Shaped[np.ndarray, "rows layers k"] | None = None
    """[L - 1, layers, k] the experts that each token but the last went to when the one after it was sampled, or was
    part of a prompt: see `Completion.routes`. None where engines were not asked."""
    text: str = ""
    """The decoded response (all turns after the prompt), special tokens left out."""
    reward: float = 0.0
    """Weighted sum of the parts; filled by the reward phase. NaN where no part had a say: the rollout is then left out
    of its group's baseline and has advantage 0."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function that had a say, by its name in the config."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """What each reward function counts in the sum, those without a say included."""
    reward_failed: bool = False
    """True when a reward raised or ran out of time on this rollout; its part counts as 0."""


def weighted_sum(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Returns the sum of weight times value; NaN where none of the parts that count is among `parts`.

    Args:
        parts: values by name.
        weights: of every part there is; a part of weight 0 does not count.
    """
    if any(weights.values()) and not any(weights[name] for name in parts):
        return math.nan
    return sum(weights[name] * value for name, value in parts.items())
