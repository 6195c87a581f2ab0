"""PromptStream: the prompts of online RL, with a resumable cursor."""

import logging
from collections import Counter
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlframe.data.chat import encode, render
from rlframe.data.config import DataConfig
from rlframe.data.conversations import Conversation, understand
from rlframe.data.cursor import Walk, cursor_over
from rlframe.data.sources import load
from rlframe.types.prompt import Prompt
from rlframe.utils.errors import DataError

logger = logging.getLogger(__name__)


class PromptStream:
    """Prompts to train on, each exactly once per epoch, and those held out."""

    settings = frozenset({"prompt_key", "answer_key", "system_prompt", "template_limit_s", "max_prompt_tokens"})
    """The fields of DataConfig that online algorithms look at, of those that not every kind of data does."""

    def __init__(self, config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int):
        """Reads, renders and tokenises the whole dataset.

        Raises:
            DataError: a source that is missing, empty or malformed, or no prompt short enough.
        """
        found = load(config, seed=seed, understand=understand)
        self.dropped: Counter[str] = found.dropped
        """Records left out, by reason."""
        parts = [self._fitting(make_prompts(part, config, tokenizer=tokenizer), config) for part in found.train]
        held_out = make_prompts([one for part in found.held_out for one in part], config, tokenizer=tokenizer)
        self._held_out = [prompt for prompt in held_out if len(prompt.token_ids) <= config.max_prompt_tokens]
        if too_long := len(held_out) - len(self._held_out):
            self.dropped["held-out prompt is too long"] = too_long
        self._cursor: Walk[Prompt] = cursor_over(
            parts,
            ids=[[prompt.id for prompt in part] for part in parts],
            tokens=[[prompt.token_ids for prompt in part] for part in parts],
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
        """The next `count` prompts, going on into the following epochs where one ends."""
        return self._cursor.next(count)

    def first(self, count: int) -> list[Prompt]:
        """At most `count` prompts from the beginning of the dataset, the same ones every time; nothing is dealt."""
        return self._cursor.first(count)

    @property
    def epoch(self) -> int:
        """Epoch of the prompt dealt last, from 0."""
        return self._cursor.epoch

    def state(self) -> dict[str, Any]:
        """Where the walk stands, as plain JSON values."""
        return self._cursor.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken. Raises DataError if that was in other data or with another seed."""
        self._cursor.restore(state)

    def evaluation_prompts(self) -> list[Prompt]:
        """The held-out prompts, the same ones in the same order for every seed; never dealt by `next`."""
        return list(self._held_out)

    def _fitting(self, prompts: list[Prompt], config: DataConfig) -> list[Prompt]:
        """Those that are short enough; the others are counted."""
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= config.max_prompt_tokens]
        if too_long := len(prompts) - len(kept):
            self.dropped["prompt is too long"] += too_long
        if not kept:
            shortest = min(len(prompt.token_ids) for prompt in prompts)
            raise DataError(
                f"{config.what}: expected prompts of at most data.max_prompt_tokens={config.max_prompt_tokens} tokens, "
                f"found none; the shortest has {shortest}"
            )
        return kept


def make_prompts(
    conversations: list[Conversation], config: DataConfig, *, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """A Prompt for each conversation, whatever its length."""
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
        Prompt(
            id=conversation.id,
            text=text.text,
            token_ids=tuple(token_ids),
            answer=conversation.answer,
            source=conversation.record.source,
            fields=conversation.record.fields,
        )
        for conversation, text, token_ids in zip(conversations, texts, encode(tokenizer, texts), strict=True)
    ]
