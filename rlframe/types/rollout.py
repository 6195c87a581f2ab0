"""Rollout: one finished sequence; the group it belongs to, and the request and completion it is made of."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import ArrayLike

from rlframe.types.prompt import Prompt
from rlframe.utils.errors import SettingError

GIVEN = -1
"""Version of a token that no policy sampled: of a prompt, of an observation, or of a response from the data."""
NOBODY = GIVEN - 1
"""Stands among versions for a token that is not part of a response."""


class _ByValue:
    """Compares its fields, arrays by their elements."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = [(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)]  # type: ignore[arg-type]
        return all(
            np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs for mine, theirs in pairs
        )


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
            raise SettingError("min_tokens", f"must lie in [0, max_tokens={self.max_tokens}]", got=self.min_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Tokens [start, end) of a rollout, sampled in one turn by one policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerationRequest(_ByValue):
    """One continuation to sample."""

    token_ids: Int[np.ndarray, " L"]
    """[L_prompt] int32 tokens to continue; requests with equal prompts may share one prefill."""
    sampling: SamplingParams
    seed: int
    """Decides every sampled token of this request, whatever else is in the batch: made from run seed, prompt id,
    sample index and step, so that a run repeats exactly."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, dtype=np.int32))


@dataclass(kw_only=True, slots=True, eq=False)
class Completion(_ByValue):
    """What an engine made of one request."""

    token_ids: Int[np.ndarray, " L"]
    """[L_response] int32 sampled tokens, the stop token included."""
    logprobs: Float[np.ndarray, " L"]
    """[L_response] float32 nats, of the sampled tokens under log_softmax(logits / temperature), before top-p and top-k;
    for greedy under log_softmax(logits)."""
    versions: Int[np.ndarray, " L"]
    """[L_response] int32 policy version that sampled each token. A weight sync while the response was under way makes
    later ones greater."""
    finish_reason: FinishReason
    routes: Shaped[np.ndarray, "rows layers k"] | None = None
    """[P + L_response - 1, layers, k] the experts that each token of prompt and response went to, in each layer that
    has experts, in no certain order; the last token has not been sent to any. uint8, above 256 experts int16. From an
    engine that was asked for them; None of an aborted response. Tokens before a weight sync that fell into the response
    have those of the pass that sampled them, or of one by the new weights: engines differ."""

    def __post_init__(self) -> None:
        self.token_ids = np.asarray(self.token_ids, dtype=np.int32)
        self.logprobs = np.asarray(self.logprobs, dtype=np.float32)
        self.versions = np.asarray(self.versions, dtype=np.int32)
        assert len(self.token_ids) == len(self.logprobs) == len(self.versions), (
            "each token has an id, a logprob and a version"
        )

    @property
    def spans(self) -> list[Span]:
        """The response in pieces of one version each."""
        return spans_of(self.versions)


@dataclass(kw_only=True, slots=True, eq=False)
class Rollout(_ByValue):
    """One finished sequence to train on. Multi-turn attempts are one Rollout too: observation tokens have mask False.

    Example: prompt tokens 7 8, response 5 2 (2 ends it), sampled by version 3:
        token_ids [7, 8, 5, 2], loss_mask [F, F, T, T], rollout_logprobs [0.0, 0.0, -0.1, -0.3], versions [-1, -1, 3, 3]
    """

    prompt: Prompt
    sample_index: int
    """0..G-1 within the prompt's group."""
    token_ids: Int[np.ndarray, " L"]
    """[L] int32, prompt and everything after it."""
    loss_mask: Bool[np.ndarray, " L"]
    """[L] True where the policy sampled the token."""
    rollout_logprobs: Float[np.ndarray, " L"]
    """[L] float32 nats, from the engine that sampled; 0.0 where loss_mask is False."""
    versions: Int[np.ndarray, " L"]
    """[L] int32 policy version that sampled each token; GIVEN where none did."""
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

    def __post_init__(self) -> None:
        self.token_ids = np.asarray(self.token_ids, dtype=np.int32)
        self.loss_mask = np.asarray(self.loss_mask, dtype=bool)
        self.rollout_logprobs = np.asarray(self.rollout_logprobs, dtype=np.float32)
        self.versions = np.asarray(self.versions, dtype=np.int32)
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.rollout_logprobs), len(self.versions)}
        assert len(lengths) == 1, "each token has an id, a flag, a logprob and a version"

    @classmethod
    def begin(cls, prompt: Prompt, sample_index: int) -> "Rollout":
        """Returns an attempt at `prompt` of which nothing is sampled yet."""
        length = len(prompt.token_ids)
        return cls(
            prompt=prompt,
            sample_index=sample_index,
            token_ids=np.asarray(prompt.token_ids),
            loss_mask=np.zeros(length),
            rollout_logprobs=np.zeros(length),
            versions=np.full(length, GIVEN),
            finish_reason=FinishReason.ABORT,
        )

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask.sum())

    @property
    def spans(self) -> list[Span]:
        """The sampled spans in order: the turns, cut where the version changes."""
        return spans_of(np.where(self.loss_mask, self.versions, NOBODY))

    def append(self, completion: Completion) -> None:
        """Appends a response of the policy."""
        if completion.routes is not None:
            # Of later turns only what is new: tokens of earlier ones keep those of the pass that sampled them.
            known = self.routes if self.routes is not None else completion.routes[:0]
            self.routes = np.concatenate([known, completion.routes[len(known) :]])
        self._extend(completion.token_ids, sampled=True, logprobs=completion.logprobs, versions=completion.versions)
        self.finish_reason = completion.finish_reason

    def observe(self, token_ids: Sequence[int]) -> None:
        """Appends what an environment answered, which the loss leaves out."""
        length = len(token_ids)
        self._extend(token_ids, sampled=False, logprobs=np.zeros(length), versions=np.full(length, GIVEN))

    def _extend(self, token_ids: ArrayLike, *, sampled: bool, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self.token_ids = np.append(self.token_ids, np.asarray(token_ids, dtype=np.int32))
        self.loss_mask = np.append(self.loss_mask, np.full(len(logprobs), sampled))
        self.rollout_logprobs = np.append(self.rollout_logprobs, logprobs.astype(np.float32))
        self.versions = np.append(self.versions, versions.astype(np.int32))


@dataclass(kw_only=True, slots=True, eq=False)
class Group(_ByValue):
    """The rollouts of one lease: attempts at one prompt, compared with each other. May be unequal in size."""

    id: str
    """Unique among the groups of a step."""
    prompt: Prompt
    rollouts: list[Rollout]

    @classmethod
    def begin(cls, id: str, prompt: Prompt, size: int) -> "Group":
        """Returns `size` attempts at `prompt` of which nothing is sampled yet."""
        return cls(id=id, prompt=prompt, rollouts=[Rollout.begin(prompt, index) for index in range(size)])


def spans_of(makers: Int[np.ndarray, " L"]) -> list[Span]:
    """Returns the stretches of equal numbers, those of NOBODY left out."""
    edges = np.flatnonzero(np.diff(makers, prepend=NOBODY, append=NOBODY)).tolist()
    pairs = zip(edges, edges[1:], strict=False)
    return [Span(version=int(makers[start]), start=start, end=end) for start, end in pairs if makers[start] != NOBODY]


def members(groups: Iterable[Group]) -> list[Rollout]:
    """Returns the rollouts of all groups, in order."""
    return [rollout for group in groups for rollout in group.rollouts]


def versions_by_token(starts: Sequence[tuple[int, int]], length: int) -> Int[np.ndarray, " L"]:
    """Returns [length] int32 the version that sampled each token.

    Args:
        starts: (version, tokens that were there when it began), in order; a later start beyond `length` sampled none.
    """
    bounds = np.minimum([*(start for _, start in starts), length], length)
    return np.repeat(np.array([version for version, _ in starts], dtype=np.int32), np.diff(bounds))


def weighted_sum(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Returns the sum of weight times value; NaN where none of the parts that count is among `parts`.

    Args:
        parts: values by name.
        weights: of every part there is; a part of weight 0 does not count.
    """
    if any(weights.values()) and not any(weights[name] for name in parts):
        return math.nan
    return sum(weights[name] * value for name, value in parts.items())
