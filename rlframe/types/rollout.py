"""Rollouts: finished sequences, their groups, and the requests and completions they consist of."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import chain, repeat
from operator import attrgetter, is_

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import ArrayLike

from rlframe.types.compare import ByValue
from rlframe.types.input import ModelInput
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.types.turn import TurnRecord
from rlframe.utils.errors import SettingError

OFFLINE_VERSION = -1
"""Version of a token that no policy sampled: of a prompt, of an observation, or of a response from the data."""
NOBODY = OFFLINE_VERSION - 1
"""Version that marks tokens which are not part of a response."""
SEQUENCE, TURN_PARTS, TOKEN_REWARDS = map(attrgetter, ("sequence", "turn_parts", "token_rewards"))
"""Fields of a rollout, for looks at all rollouts of a step."""


class FinishReason(StrEnum):
    """Reasons why an attempt ended."""

    STOP = "stop"
    """A stop token or stop string, which stays part of the tokens."""
    LENGTH = "length"
    """A limit of tokens or turns was reached."""
    ABORT = "abort"
    """The request was aborted. The tokens sampled so far are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Parameters with which an engine samples tokens from logits. `temperature=0` is greedy."""

    temperature: float = 1.0
    """Divisor of the logits. 0 means greedy."""
    top_p: float = 1.0
    """Probability of the smallest set of most likely tokens that sampling is restricted to. 1 keeps all tokens."""
    top_k: int = 0
    """Number of most likely tokens that sampling is restricted to. 0 keeps all tokens."""
    max_tokens: int = 256
    """Greatest number of tokens generated, the stop token included."""
    min_tokens: int = 0
    """Number of tokens before which no stop token is sampled. Equal to `max_tokens` it fixes the response length."""
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
class GenerationRequest(ByValue):
    """One continuation to sample."""

    input: ModelInput
    """The sequence to continue; requests with equal inputs may share one prefill."""
    sampling: SamplingParams
    seed: int
    """Seed that decides every sampled token of this request, independent of the batch. It is derived from run seed,
    prompt id, sample index and step, so that a run repeats exactly."""
    name: str = ""
    """The caller's name for the request, by which it can be aborted. Unique among the running requests of an engine.
    Empty means unnamed."""
    first_position: int = 0
    """Number of tokens of this response that an earlier, aborted request has sampled. They are the last tokens of
    `input`. The engine continues as if it had sampled them itself: `seed`, `max_tokens`, `min_tokens` and `stop` are
    those of the whole response."""

    def __post_init__(self) -> None:
        limit = min(len(self.input), self.sampling.max_tokens)
        if self.first_position and not 0 < self.first_position < limit:
            raise ValueError(
                "first_position must be at least 0 and below the tokens of the input and max_tokens, "
                f"{len(self.input)} and {self.sampling.max_tokens}, got {self.first_position}"
            )

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the input that precede the response."""
        return len(self.input) - self.first_position

    @property
    def begun(self) -> list[int]:
        """The tokens of the response that were sampled before."""
        return self.input.token_ids[self.prompt_tokens :].tolist()


@dataclass(kw_only=True, slots=True, eq=False)
class Completion(ByValue):
    """An engine's response to one request."""

    token_ids: Int[np.ndarray, " L"]
    """[L_response] int32 sampled tokens, the stop token included. Those of an earlier request (`first_position`) are
    not among them."""
    logprobs: Float[np.ndarray, " L"]
    """[L_response] float32 nats, of the sampled tokens under log_softmax(logits / temperature), before top-p and top-k;
    for greedy under log_softmax(logits)."""
    versions: Int[np.ndarray, " L"]
    """[L_response] int32 policy version that sampled each token. It increases if a weight sync fell into the
    response."""
    finish_reason: FinishReason
    routes: Shaped[np.ndarray, "rows layers k"] | None = None
    """[P + L_response - 1, layers, k] experts chosen per token of input and response and per MoE layer, unordered;
    uint8, above 256 experts int16. The last token has none, because it was never fed back. Present if the engine was
    started to return them; an aborted response may have none. If weights changed during the response, earlier tokens
    hold either the original or the recomputed routing, depending on the engine."""

    def __post_init__(self) -> None:
        self.token_ids = np.asarray(self.token_ids, dtype=np.int32)
        self.logprobs = np.asarray(self.logprobs, dtype=np.float32)
        self.versions = np.asarray(self.versions, dtype=np.int32)
        assert len(self.token_ids) == len(self.logprobs) == len(self.versions), (
            "each token has an id, a logprob and a version"
        )

    @property
    def spans(self) -> list[Span]:
        """The response in spans of one version each."""
        return spans_of(self.versions)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scored(ByValue):
    """An engine's answer about one given sequence."""

    logprobs: list[float]
    """Nats of each token but the first, given the tokens before it, under log_softmax(logits)."""
    routes: Shaped[np.ndarray, "rows layers k"] | None = None
    """[L - 1, layers, k] experts chosen in the same pass, as in `Completion.routes`. None if the engine does not return
    those of given tokens, or was not started to."""


@dataclass(kw_only=True, slots=True, eq=False)
class Rollout(ByValue):
    """One finished sequence to train on. Multi-turn attempts are one Rollout too: observation tokens have mask False.

    Example: prompt tokens 7 8, response 5 2 (2 ends it), sampled by version 3:
        token_ids [7, 8, 5, 2], loss_mask [F, F, T, T], rollout_logprobs [0.0, 0.0, -0.1, -0.3], versions [-1, -1, 3, 3]
    """

    prompt: Prompt
    sample_index: int
    """Index 0..G-1 of the attempt within the prompt's group."""
    input: ModelInput
    """The prompt and everything after it, of L tokens."""
    loss_mask: Bool[np.ndarray, " L"]
    """[L] True where the policy sampled the token."""
    rollout_logprobs: Float[np.ndarray, " L"]
    """[L] float32 nats of the engine that sampled. 0.0 where loss_mask is False."""
    versions: Int[np.ndarray, " L"]
    """[L] int32 policy version that sampled each token. OFFLINE_VERSION if no policy sampled it."""
    finish_reason: FinishReason
    routes: Shaped[np.ndarray, "rows layers k"] | None = None
    """[L - 1, layers, k] experts of each token but the last; see `Completion.routes`. None if engines do not return
    them."""
    text: str = ""
    """The policy's last response, decoded, special tokens left out."""
    messages: list[Message] = field(default_factory=list)
    """The conversation with the environment, from its beginning: its messages, and the policy's as they were read from
    the tokens. Empty without an environment that answers."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the environment about this attempt, by name."""
    sequence: int = 0
    """Index among the sequences of one attempt. There are several if its history was rendered anew; the last one has
    the whole conversation, and each has the attempt's reward."""
    records: Sequence[TurnRecord] = ()
    """A record of each turn of the attempt so far, from its first one, those of earlier sequences included. Empty if
    nobody attempted it."""
    first_turn: int = 0
    """Index in the attempt of this sequence's first turn: the number of turns of the earlier sequences."""
    first_sampled: int = 0
    """Number of tokens that the policy sampled in the earlier sequences of the attempt."""
    ending: str = ""
    """The reason why the attempt ended: `done`, a limit of the environment, or its trouble. Empty if unknown."""
    token_rewards: Float[np.ndarray, " L"] | None = None
    """[L] float32 rewards that the environment gave at single tokens, such as at the end of each turn, in addition to
    `reward`. 0.0 elsewhere. None if it gave none."""
    turn_parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Unweighted values of reward functions that gave one for each turn of the attempt, by name. None stands for a turn
    to which the function does not apply. They are not in `reward`: each counts at the last token of its turn."""
    reward: float = 0.0
    """Weighted sum of the parts, without those of `turn_parts`, set by the reward phase. NaN if no part scored the
    rollout: it is then left out of its group's baseline and has advantage 0."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function that scored the rollout, by its name in the config. Of `turn_parts` the
    sum over the turns."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each reward function in the sum, including those that did not score the rollout."""
    reward_failed: bool = False
    """True if a reward function raised or timed out on this rollout. Its part counts as 0."""
    reward_troubles: Mapping[str, str] = field(default_factory=dict)
    """A word for what went wrong in reward functions that gave no score of their own, by name: `failed`, or a judge's
    (`unparsable`, ...). It is counted, whether the part counts as 0, as another value or not at all."""

    def __post_init__(self) -> None:
        self.loss_mask = np.asarray(self.loss_mask, dtype=bool)
        self.rollout_logprobs = np.asarray(self.rollout_logprobs, dtype=np.float32)
        self.versions = np.asarray(self.versions, dtype=np.int32)
        lengths = {len(self.token_ids), len(self.loss_mask), len(self.rollout_logprobs), len(self.versions)}
        assert len(lengths) == 1, "each token has an id, a flag, a logprob and a version"

    @classmethod
    def begin(cls, prompt: Prompt, sample_index: int) -> "Rollout":
        """Returns an attempt at `prompt` without any response."""
        return next(cls.begin_each(prompt, [sample_index]))

    @classmethod
    def begin_each(cls, prompt: Prompt, sample_indices: Iterable[int]) -> Iterator["Rollout"]:
        """Yields attempts at `prompt` without any response.

        They share their arrays, which a message to another process then holds once. Nothing writes into them: what is
        appended makes new ones.
        """
        length = len(prompt.input)
        arrays = {
            "loss_mask": np.zeros(length, dtype=bool),
            "rollout_logprobs": np.zeros(length, dtype=np.float32),
            "versions": np.full(length, OFFLINE_VERSION, dtype=np.int32),
        }
        for array in arrays.values():
            array.flags.writeable = False
        for index in sample_indices:
            yield cls(prompt=prompt, sample_index=index, input=prompt.input, finish_reason=FinishReason.ABORT, **arrays)

    @property
    def token_ids(self) -> Int[np.ndarray, " L"]:
        """[L] int32 tokens of the prompt and everything after it."""
        return self.input.token_ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens L."""
        return len(self.token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_sampled_by_attempt(self) -> int:
        """Number of tokens that the policy sampled in the attempt until the end of this sequence."""
        return self.first_sampled + self.num_sampled_tokens

    @property
    def total_reward(self) -> float:
        """The sum of `reward` and all rewards at tokens."""
        at_tokens = self.rewards_at_tokens
        return self.reward if at_tokens is None else self.reward + float(at_tokens.sum())

    @property
    def num_turns(self) -> int:
        """Number of turns of the attempt until the end of this sequence."""
        return self.first_turn + len(self.turns)

    @property
    def rewards_at_tokens(self) -> Float[np.ndarray, " L"] | None:
        """[L] float32 rewards at single tokens: the environment's, and each weighted value of `turn_parts` at the last
        token of its turn. None if there are none."""
        if not self.turn_parts:
            return self.token_rewards
        found = np.zeros(self.num_tokens, np.float32) if self.token_rewards is None else self.token_rewards.copy()
        for name, values in self.turn_parts.items():
            own = values[self.first_turn : self.num_turns]
            for (_, end), value in zip(self.turns, own, strict=True):
                found[end - 1] += self.reward_weights[name] * (value or 0.0)
        return found

    @property
    def turns(self) -> list[tuple[int, int]]:
        """The first token of each response of the policy, and the one after its last."""
        edges = edges_of(self.loss_mask, outside=False)
        return list(zip(edges[::2], edges[1::2], strict=True))

    @property
    def spans(self) -> list[Span]:
        """The sampled spans in order: the turns, split where the version changes."""
        return spans_of(np.where(self.loss_mask, self.versions, NOBODY))

    def restart(self, input: ModelInput) -> None:
        """Forgets everything after the prompt, and begins with `input`."""
        fresh = Rollout.begin(replace(self.prompt, input=input), self.sample_index)
        for each in fields(self):
            if each.name != "prompt":
                setattr(self, each.name, getattr(fresh, each.name))

    def take_rewards(self, other: "Rollout") -> None:
        """Takes over what reward functions have given to `other`: a copy, or a later sequence of the same attempt."""
        for each in fields(self):
            if each.name.startswith("reward") or each.name == "turn_parts":
                setattr(self, each.name, getattr(other, each.name))

    def append(self, completion: Completion) -> None:
        """Appends a response of the policy."""
        if completion.routes is not None:
            # Of later turns only the new tokens: those of earlier turns keep the routes of the pass that sampled them.
            known = self.routes if self.routes is not None else completion.routes[:0]
            self.routes = np.concatenate([known, completion.routes[len(known) :]])
        self._extend(completion.token_ids, sampled=True, logprobs=completion.logprobs, versions=completion.versions)
        self.finish_reason = completion.finish_reason

    def cut(self, length: int) -> None:
        """Forgets the tokens from the one with index `length` on."""
        self.input = ModelInput(self.token_ids[:length])
        for name in ("loss_mask", "rollout_logprobs", "versions"):
            setattr(self, name, getattr(self, name)[:length])
        if self.token_rewards is not None:
            self.token_rewards = self.token_rewards[:length]
        if self.routes is not None:
            self.routes = self.routes[: length - 1]

    def credit(self, reward: float) -> None:
        """Adds a reward to the last token that the policy sampled: the reward of the turn that it ends."""
        (sampled,) = np.nonzero(self.loss_mask)
        assert len(sampled), "a turn was sampled before"
        # A new array: one that came from another process cannot be written.
        rewards = (
            np.zeros(self.num_tokens, dtype=np.float32) if self.token_rewards is None else self.token_rewards.copy()
        )
        rewards[sampled[-1]] += reward
        self.token_rewards = rewards

    def observe(self, token_ids: Sequence[int]) -> None:
        """Appends the environment's answer, which is not part of the loss."""
        length = len(token_ids)
        self._extend(token_ids, sampled=False, logprobs=np.zeros(length), versions=np.full(length, OFFLINE_VERSION))

    def _extend(self, token_ids: ArrayLike, *, sampled: bool, logprobs: np.ndarray, versions: np.ndarray) -> None:
        self.input = self.input.then(token_ids)
        self.loss_mask = np.concatenate([self.loss_mask, np.full(len(logprobs), sampled)])
        self.rollout_logprobs = np.concatenate([self.rollout_logprobs, logprobs], dtype=np.float32, casting="same_kind")
        self.versions = np.concatenate([self.versions, versions], dtype=np.int32, casting="same_kind")
        if self.token_rewards is not None:
            self.token_rewards = np.concatenate([self.token_rewards, np.zeros(len(logprobs), dtype=np.float32)])


@dataclass(kw_only=True, slots=True, eq=False)
class Group(ByValue):
    """The rollouts of one prompt, compared with each other. Groups may differ in size."""

    id: str
    """Id that is unique among the groups of a step."""
    prompt: Prompt
    rollouts: list[Rollout]

    @classmethod
    def begin(cls, id: str, prompt: Prompt, size: int) -> "Group":
        """Returns `size` attempts at `prompt` without any response."""
        return cls(id=id, prompt=prompt, rollouts=list(Rollout.begin_each(prompt, range(size))))


def spans_of(makers: Int[np.ndarray, " L"]) -> list[Span]:
    """Returns the stretches of equal versions, without those of NOBODY."""
    edges = edges_of(makers, outside=NOBODY)
    pairs = zip(edges, edges[1:], strict=False)
    return [Span(version=int(makers[start]), start=start, end=end) for start, end in pairs if makers[start] != NOBODY]


def edges_of(values: Shaped[np.ndarray, " L"], *, outside: int) -> list[int]:
    """Returns each place before which another value begins than the one before it, of `outside` before the first value
    and after the last."""
    between = np.full(len(values) + 2, outside, dtype=values.dtype)
    between[1:-1] = values
    return np.flatnonzero(between[1:] != between[:-1]).tolist()


def by_attempt(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """Returns the rollouts of one group, those of one attempt together, in the order of their sample indices and
    sequences."""
    found: dict[int, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda each: (each.sample_index, each.sequence)):
        found.setdefault(rollout.sample_index, []).append(rollout)
    return list(found.values())


def reward_of(sequences: Sequence[Rollout]) -> float:
    """Returns the total reward of one attempt: its reward, which all of its sequences have, and the rewards at all of
    their tokens. NaN if no reward function scored it."""
    at_tokens = 0
    for each in sequences:
        if (given := each.rewards_at_tokens) is not None:
            at_tokens += float(given.sum())
    return sequences[-1].reward + at_tokens


def rewards_of(attempts: Iterable[Sequence[Rollout]]) -> list[float]:
    """Returns the total reward of each attempt, as `reward_of`."""
    everything = list(attempts)
    sequences = list(chain.from_iterable(everything))
    if not any(map(TURN_PARTS, sequences)) and all(map(is_, map(TOKEN_REWARDS, sequences), repeat(None))):
        return [own[-1].reward for own in everything]
    return [reward_of(own) for own in everything]


def attempts_in(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """Returns the rollouts of several groups, as `members` gives them, those of one attempt together."""
    everything = list(rollouts)
    if not any(map(SEQUENCE, everything)):
        return [[rollout] for rollout in everything]
    found: list[list[Rollout]] = []
    for rollout in everything:
        if found and rollout.sequence > found[-1][-1].sequence:
            found[-1].append(rollout)
        else:
            found.append([rollout])
    return found


def members(groups: Iterable[Group]) -> list[Rollout]:
    """Returns the rollouts of all groups, in order."""
    return [rollout for group in groups for rollout in group.rollouts]


def versions_by_token(starts: Sequence[tuple[int, int]], length: int) -> Int[np.ndarray, " L"]:
    """Returns [length] int32 the version that sampled each token.

    Args:
        starts: pairs of a version and the number of tokens that preceded it, in order; a start beyond `length` sampled
            no token.
    """
    bounds = np.minimum([*(start for _, start in starts), length], length)
    return np.repeat(np.array([version for version, _ in starts], dtype=np.int32), np.diff(bounds))


def weighted_sum(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Returns the sum of weight times value, or NaN if none of the parts that count is among `parts`.

    Args:
        parts: values by name.
        weights: weights of all parts; a part of weight 0 does not count.
    """
    if any(weights.values()) and not any(weights[name] for name in parts):
        return math.nan
    return sum(weights[name] * value for name, value in parts.items())
