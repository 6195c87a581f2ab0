"""PromptSource: the prompts of online RL, with a resumable cursor."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerBase

from rlframe.data.config import DataConfig
from rlframe.data.cursor import Walk, cursor_over
from rlframe.data.sources import load
from rlframe.data.storage.sequences import Lazy
from rlframe.data.storage.tables import spilled
from rlframe.data.text.chat import encode, render
from rlframe.data.text.conversations import Conversation, understand
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.utils.errors import DataError

logger = logging.getLogger(__name__)
AT_ONCE = 4096
"""Number of conversations that are rendered and tokenised together, if they are not held as objects."""


class PromptSource:
    """Prompts to train on, each exactly once per epoch, and those held out."""

    settings = frozenset(
        {
            "prompt_key",
            "answer_key",
            "system_prompt",
            "chat_template_kwargs",
            "template_limit_s",
            "max_prompt_tokens",
            "cache_folder",
            "cache_gb",
        }
    )
    """Fields of DataConfig that online algorithms use, among those that not every kind of data uses."""

    def __init__(self, config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int):
        """Reads, renders and tokenises the whole dataset.

        Raises:
            DataError: a source is missing, empty or malformed, or no prompt is short enough.
        """
        found = load(config, seed=seed, understand=understand)
        self.dropped: Counter[str] = found.dropped
        """Records left out, by reason."""
        parts = [self._fitting(prompts_of(part, config, tokenizer=tokenizer), config) for part in found.train]
        held_out = make_prompts([one for part in found.held_out for one in part], config, tokenizer=tokenizer)
        self._held_out = [prompt for prompt in held_out if len(prompt.input) <= config.max_prompt_tokens]
        if too_long := len(held_out) - len(self._held_out):
            self.dropped["held-out prompt is too long"] = too_long
        self._cursor: Walk[Prompt] = cursor_over(
            [part.prompts for part in parts],
            ids=[part.ids for part in parts],
            tokens=[part.token_ids for part in parts],
            seed=seed,
            shuffle=config.shuffle,
            weights=config.weights,
        )
        logger.info(
            "%s: %d prompts to train on, %d held out, dropped: %s",
            config.what, len(self), len(self._held_out), dict(self.dropped) or "none",
        )  # fmt: skip

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
        return self._cursor.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of `state`. Raises DataError if it belongs to other data or another seed."""
        self._cursor.restore(state)

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

    def pick(self, places: Sequence[int]) -> "Part":
        """Returns the prompts at `places`, in that order."""
        few = isinstance(self.prompts, list)
        return Part(
            prompts=[self.prompts[place] for place in places] if few else Lazy(self.prompts.__getitem__, places),
            ids=[self.ids[place] for place in places],
            token_ids=Lazy(self.token_ids.__getitem__, places),
            lengths=[self.lengths[place] for place in places],
        )


def prompts_of(
    conversations: Sequence[Conversation], config: DataConfig, *, tokenizer: PreTrainedTokenizerBase
) -> Part:
    """Returns the prompts of conversations, of any length, as objects if the conversations are."""
    if isinstance(conversations, list):
        made = make_prompts(conversations, config, tokenizer=tokenizer)
        return Part(
            prompts=made,
            ids=[prompt.id for prompt in made],
            token_ids=[prompt.input.token_ids for prompt in made],
            lengths=[len(prompt.input) for prompt in made],
        )
    ids: list[str] = []
    lengths: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        left = iter(conversations)
        while few := list(islice(left, AT_ONCE)):
            for prompt in make_prompts(few, config, tokenizer=tokenizer):
                ids.append(prompt.id)
                lengths.append(len(prompt.input))
                yield {"text": prompt.text, "token_ids": prompt.input.token_ids}

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
    )


def make_prompts(
    conversations: Sequence[Conversation], config: DataConfig, *, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Returns a Prompt for each conversation, of any length."""
    texts = [
        render(
            tokenizer,
            conversation.prompt,
            config=config,
            generation_prompt=True,
            where=conversation.record.where,
            tools=conversation.tools,
        )
        for conversation in conversations
    ]
    return [
        _prompt(conversation, text=text.text, token_ids=token_ids)
        for conversation, text, token_ids in zip(conversations, texts, encode(tokenizer, texts), strict=True)
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
        fields=conversation.record.fields,
    )
