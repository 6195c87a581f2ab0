"""PromptSource: the prompts of online RL, with a resumable cursor."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Int32
from numpy.typing import ArrayLike

from rlframe.data.config import TEMPLATE_SETTINGS, DataConfig
from rlframe.data.curriculum import By
from rlframe.data.cursor import Cursor, Mixture, Walk, cursor_over
from rlframe.data.ordered import RatedCursor, Stages, numbers_of, places_by_stage
from rlframe.data.parallel import in_chunks, num_processes
from rlframe.data.records import Record
from rlframe.data.sources import REPEATED, at_most, from_evaluation_path, load
from rlframe.data.storage.sequences import Joined, Lazy
from rlframe.data.storage.tables import spilled
from rlframe.data.streaming import flow_over
from rlframe.data.text.chat import encode, render
from rlframe.data.text.conversations import Conversation, understand
from rlframe.data.text.reasoning import as_read, is_left_out
from rlframe.data.training import LEFT_OUT
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Rollout, by_attempt, reward_of
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError

logger = logging.getLogger(__name__)


class PromptSource:
    """Prompts to train on, each exactly once per epoch, and those held out."""

    settings = TEMPLATE_SETTINGS | {
        "prompt_key",
        "answer_key",
        "system_prompt",
        "max_prompt_tokens",
        "cache_folder",
        "cache_gb",
        "curriculum",
        "streaming",
        "shuffle_buffer",
    }
    """Fields of DataConfig that online algorithms use, among those that not every kind of data uses."""

    def __init__(self, config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int):
        """Reads, renders and tokenises the whole dataset, or of a streamed one the first window.

        Raises:
            DataError: a source is missing, empty or malformed, or no prompt is short enough.
        """
        self._config, self._tokenizer = config, tokenizer
        self._num_passed_over = 0
        self._told: set[str] = set()
        self._rated: list[RatedCursor[Prompt]] = []
        """The cursors of a curriculum by pass rate."""
        self.dropped: Counter[str] = Counter()
        """Records left out, by reason. Of a streamed dataset so far."""
        self.counted: Counter[str] = Counter()
        """Counts of what the chat template does to conversations, by metric."""
        self._cursor: Walk[Prompt]
        self._held_out: list[Prompt]
        if config.streaming:
            self._stream(seed)
        else:
            found = load(config, seed=seed, understand=understand)
            self.dropped = found.dropped
            whole = [prompts_of(part, config, tokenizer=tokenizer) for part in found.train]
            if left_out := sum(part.reasoning_left_out for part in whole):
                self._count_left_out(left_out)
            parts = [self._fitting(part, config) for part in whole]
            self._hold_out(found.held_out)
            self._cursor = self._walk(parts, config, seed=seed)
        among = " in the first window" if config.streaming else ""
        logger.info(
            "%s: %d prompts to train on%s, %d held out, dropped: %s",
            config.what, len(self), among, len(self._held_out), dict(self.dropped) or "none",
        )  # fmt: skip

    def _hold_out(self, held_out: Sequence[Sequence[Conversation]]) -> None:
        """Makes the prompts that are held out."""
        config = self._config
        made = make_prompts([one for part in held_out for one in part], config, tokenizer=self._tokenizer)
        self._held_out = [prompt for prompt in made if len(prompt.input) <= config.max_prompt_tokens]
        if too_long := len(made) - len(self._held_out):
            self.dropped["held-out prompt is too long"] = too_long

    def _stream(self, seed: int) -> None:
        """Reads what is held out, and the beginning of the rest."""
        held_out = at_most(self._config.evaluation_count, from_evaluation_path(self._config, understand, self.dropped))
        self._hold_out(held_out)
        self._held_out_texts = {one.prompt_text for part in held_out for one in part}
        self._cursor = flow_over(
            self._config, make=self._window, tokens=lambda prompt: prompt.input.token_ids, seed=seed
        )

    def _window(self, records: Sequence[Record], channel: int) -> list[Prompt]:  # noqa: ARG002 - prompts have no channel
        """Returns the prompts of streamed records, each record once."""
        kept: dict[str, Conversation] = {}
        for record in records:
            conversation = understand(record, self._config)
            before = kept.get(conversation.id)
            if before and before.record.fields != record.fields:
                conversation = understand(replace(record, shares_id=True), self._config)
            if conversation.prompt_text in self._held_out_texts:
                self.dropped["prompt is held out"] += 1
            elif conversation.id in kept:
                self.dropped[REPEATED] += 1
            else:
                kept[conversation.id] = conversation
        made = prompts_of(list(kept.values()), self._config, tokenizer=self._tokenizer)
        fitting = [prompt for prompt in made.prompts if len(prompt.input) <= self._config.max_prompt_tokens]
        if count := len(made.prompts) - len(fitting):
            self.dropped["prompt is too long"] += count
        if new := {reason: count for reason, count in self.dropped.items() if reason not in self._told}:
            self._told |= set(new)
            logger.warning("%s: left out so far: %s", self._config.what, new)
        if made.reasoning_left_out:
            self._count_left_out(made.reasoning_left_out)
        return fitting

    def _count_left_out(self, count: int) -> None:
        """Counts turns whose reasoning the chat template leaves out. Warns of the first ones."""
        if not self.counted[LEFT_OUT]:
            logger.warning(
                "%s: the chat template leaves out the reasoning of %d earlier turns%s, as when it serves the model",
                self._config.what, count, " so far" if self._config.streaming else "",
            )  # fmt: skip
        self.counted[LEFT_OUT] += count

    def __len__(self) -> int:
        return len(self._cursor)

    def next(self, count: int) -> list[Prompt]:
        """Deals the next `count` prompts, continuing in the following epochs if one ends."""
        return self._cursor.next(count)

    def first(self, count: int) -> list[Prompt]:
        """Returns at most `count` prompts from the beginning of the dataset, always the same ones. Deals nothing."""
        return self._cursor.first(count)

    @property
    def epoch(self) -> int:
        """Number of times that every prompt has been dealt."""
        return self._cursor.epoch

    @property
    def last_epoch(self) -> int:
        """The epoch of the prompt dealt last within its own dataset, from 0."""
        return self._cursor.last_epoch

    def state(self) -> dict[str, Any]:
        """Returns the position as plain JSON values."""
        counts = {"dropped": dict(self.dropped), "counted": dict(self.counted)} if self._config.streaming else {}
        return self._cursor.state() | counts

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of `state`. Raises DataError if it belongs to other data or another seed."""
        self._cursor.restore(state)
        if self._config.streaming:
            # Older checkpoints do not say.
            self.dropped, self.counted = Counter(state.get("dropped", {})), Counter(state.get("counted", {}))
        # What was passed over since the last look is passed over again.
        self._num_passed_over = 0

    def reach(self, step: int) -> None:
        """Moves to the stage of a step, if the curriculum has stages. What is dealt next is for that step."""
        if isinstance(self._cursor, Stages):
            self._cursor.reach(step)

    def passes_over(self, prompt: Prompt) -> bool:
        """Returns whether the curriculum passes a prompt over, which has just been dealt."""
        passed = any(cursor.passes_over(prompt.id) for cursor in self._rated)
        self._num_passed_over += passed
        if passed and isinstance(self._cursor, Mixture):
            self._cursor.pass_over()
        return passed

    def measure(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Notes what the attempts at a prompt were worth, for a curriculum by pass rate."""
        if self._rated:
            assert self._config.curriculum is not None
            rate = pass_rate(rollouts, self._config.curriculum.reward_part)
            if rate is not None:
                for cursor in self._rated:
                    cursor.measure(prompt.id, rate)

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the curriculum's metrics: the stage of a step, or what was passed over since the last call."""
        count, self._num_passed_over = self._num_passed_over, 0
        if isinstance(self._cursor, Stages):
            return {"data/stage": float(self._cursor.index_at(step))}
        return {"data/passed_over_prompts": float(count)} if self._rated else {}

    def _walk(self, parts: list["Part"], config: DataConfig, *, seed: int) -> Walk[Prompt]:
        """Returns the walk over all prompts, in the order of the curriculum, if there is one."""
        curriculum = config.curriculum
        if curriculum is None:
            return cursor_over(
                [part.prompts for part in parts],
                ids=[part.ids for part in parts],
                tokens=[part.token_ids for part in parts],
                seed=seed,
                shuffle=config.shuffle,
                weights=config.weights,
            )
        if config.weights is None:
            parts = [joined(parts)]
        common = {"seed": seed, "shuffle": config.shuffle}
        if curriculum.by is By.STAGE:
            (part,) = parts
            places = places_by_stage([prompt.fields for prompt in part.prompts], curriculum, what=config.what)
            assert curriculum.stages is not None
            streams = {name: part.pick(own).cursor(**common) for name, own in places.items()}
            return Stages(streams, firsts=curriculum.stages)
        cursors: list[Cursor[Prompt]] = []
        for part in parts:
            if curriculum.by is By.FIELD:
                numbers = numbers_of([prompt.fields for prompt in part.prompts], curriculum, what=config.what)
                cursors.append(part.cursor(**common, numbers=numbers))
            else:
                rated = RatedCursor(part.prompts, ids=part.ids, tokens=part.token_ids, **common, curriculum=curriculum)
                self._rated.append(rated)
                cursors.append(rated)
        return cursors[0] if config.weights is None else Mixture(cursors, weights=config.weights)

    def evaluation_prompts(self) -> list[Prompt]:
        """Returns the held-out prompts, which `next` never deals: the same ones in the same order for every seed."""
        return list(self._held_out)

    def _fitting(self, made: "Part", config: DataConfig) -> "Part":
        """Returns the prompts that are short enough, and counts the others."""
        lengths = made.lengths
        kept = [place for place, length in enumerate(lengths) if length <= config.max_prompt_tokens]
        if too_long := len(lengths) - len(kept):
            self.dropped["prompt is too long"] += too_long
        if not kept:
            raise DataError(
                f"{config.what}: expected prompts of at most data.max_prompt_tokens={config.max_prompt_tokens} tokens, "
                f"found none; the shortest has {min(lengths)}"
            )
        return made.pick(kept)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The prompts of one dataset, as objects, or made from stored data when they are requested."""

    prompts: Sequence[Prompt]
    ids: list[str]
    token_ids: Sequence[ArrayLike]
    lengths: list[int]
    """Number of tokens of each prompt."""
    reasoning_left_out: int = 0
    """Number of turns whose reasoning the chat template leaves out."""

    def cursor(self, *, seed: int, shuffle: bool, numbers: Sequence[float] | None = None) -> Cursor[Prompt]:
        """Returns a walk over the prompts; see Cursor."""
        return Cursor(self.prompts, ids=self.ids, tokens=self.token_ids, seed=seed, shuffle=shuffle, numbers=numbers)

    def pick(self, places: Sequence[int]) -> "Part":
        """Returns the prompts at `places`, in that order."""
        few = isinstance(self.prompts, list)
        return Part(
            prompts=[self.prompts[place] for place in places] if few else Lazy(self.prompts.__getitem__, places),
            ids=[self.ids[place] for place in places],
            token_ids=Lazy(self.token_ids.__getitem__, places),
            lengths=[self.lengths[place] for place in places],
        )


def joined(parts: Sequence[Part]) -> Part:
    """Returns the prompts of several datasets as those of one."""
    if len(parts) == 1:
        return parts[0]
    return Part(
        prompts=Joined([part.prompts for part in parts]),
        ids=[identity for part in parts for identity in part.ids],
        token_ids=Joined([part.token_ids for part in parts]),
        lengths=[length for part in parts for length in part.lengths],
    )


def pass_rate(rollouts: Sequence[Rollout], reward_part: str | None) -> float | None:
    """Returns the mean reward of a prompt's attempts, each taken as between 0 and 1. None if none was scored.

    Args:
        reward_part: name of the reward; None stands for their weighted sum.
    """
    rewards = [
        reward_of(sequences) if reward_part is None else sequences[-1].reward_parts.get(reward_part, math.nan)
        for sequences in by_attempt(rollouts)
    ]
    bounded = [min(max(reward, 0.0), 1.0) for reward in rewards if not math.isnan(reward)]
    return sum(bounded) / len(bounded) if bounded else None


def prompts_of(
    conversations: Sequence[Conversation], config: DataConfig, *, tokenizer: PreTrainedTokenizerBase
) -> Part:
    """Returns the prompts of conversations, of any length, as objects if the conversations are."""
    work = partial(rendered, config=config, tokenizer=tokenizer)
    processes = num_processes(config.num_processes, len(conversations))
    found = chain.from_iterable(in_chunks(work, conversations, processes=processes))
    if isinstance(conversations, list):
        texts = list(found)
        made = [
            _prompt(conversation, text=one.text, token_ids=one.token_ids)
            for conversation, one in zip(conversations, texts, strict=True)
        ]
        return Part(
            prompts=made,
            ids=[prompt.id for prompt in made],
            token_ids=[prompt.input.token_ids for prompt in made],
            lengths=[len(prompt.input) for prompt in made],
            reasoning_left_out=sum(one.reasoning_left_out for one in texts),
        )
    ids: list[str] = []
    lengths: list[int] = []
    left_out = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal left_out
        for one in found:
            ids.append(one.id)
            lengths.append(len(one.token_ids))
            left_out += one.reasoning_left_out
            yield {"text": one.text, "token_ids": one.token_ids}

    table = spilled(rows(), {"text": "large_string", "token_ids": "list of int32"})

    def prompt_at(place: int) -> Prompt:
        row = table[place]
        return _prompt(conversations[place], text=row["text"], token_ids=row["token_ids"])

    places = range(len(ids))
    return Part(
        prompts=Lazy(prompt_at, places),
        ids=ids,
        token_ids=Lazy(lambda place: table[place]["token_ids"], places),
        lengths=lengths,
        reasoning_left_out=left_out,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A prompt as text and tokens."""

    id: str
    text: str
    token_ids: Int32[np.ndarray, " L"]
    reasoning_left_out: int
    """Number of earlier turns whose reasoning the template leaves out."""


def rendered(
    conversations: Sequence[Conversation], config: DataConfig, *, tokenizer: PreTrainedTokenizerBase
) -> list[Rendered]:
    """Returns text and tokens of each conversation's prompt, of any length."""
    texts = [
        render(
            tokenizer,
            as_read(conversation.prompt, tokenizer, where=conversation.record.where),
            config=config,
            generation_prompt=True,
            where=conversation.record.where,
            tools=conversation.tools,
        )
        for conversation in conversations
    ]
    return [
        Rendered(
            id=conversation.id,
            text=text.text,
            token_ids=np.array(token_ids, dtype=np.int32),
            reasoning_left_out=sum(is_left_out(message, text.text) for message in conversation.prompt),
        )
        for conversation, text, token_ids in zip(conversations, texts, encode(tokenizer, texts), strict=True)
    ]


def make_prompts(
    conversations: Sequence[Conversation], config: DataConfig, *, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Returns a Prompt for each conversation, of any length."""
    return [
        _prompt(conversation, text=one.text, token_ids=one.token_ids)
        for conversation, one in zip(conversations, rendered(conversations, config, tokenizer=tokenizer), strict=True)
    ]


def _prompt(conversation: Conversation, *, text: str, token_ids: ArrayLike) -> Prompt:
    return Prompt(
        id=conversation.id,
        messages=tuple(conversation.prompt),
        tools=conversation.tools,
        text=text,
        input=ModelInput(np.asarray(token_ids)),
        answer=conversation.answer,
        source=conversation.record.source,
        dataset=conversation.record.namespace,
        fields=conversation.record.fields,
    )
