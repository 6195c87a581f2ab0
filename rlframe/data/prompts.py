"""PromptStream: the prompts of online RL, with a resumable cursor."""

import logging

from transformers import PreTrainedTokenizerBase

from rlframe.data.chat import encode, render
from rlframe.data.config import DataConfig
from rlframe.data.conversations import Conversation
from rlframe.data.cursor import Stream
from rlframe.data.sources import Conversations, load
from rlframe.types.prompt import Prompt
from rlframe.utils.errors import DataError

logger = logging.getLogger(__name__)


class PromptStream(Stream[Prompt]):
    """Prompts to train on, each exactly once per epoch, and those held out."""

    def __init__(self, config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int):
        """Reads, renders and tokenises the whole dataset.

        Raises:
            DataError: a source that is missing, empty or malformed, or no prompt short enough.
        """
        conversations = load(config, seed=seed)
        prompts = make_prompts(conversations.train, tokenizer=tokenizer)
        kept = [prompt for prompt in prompts if len(prompt.token_ids) <= config.max_prompt_tokens]
        if too_long := len(prompts) - len(kept):
            conversations.dropped["prompt is too long"] = too_long
        if not kept:
            shortest = min(len(prompt.token_ids) for prompt in prompts)
            raise DataError(
                f"{config.path}: expected prompts of at most data.max_prompt_tokens={config.max_prompt_tokens} tokens, "
                f"found none; the shortest has {shortest}"
            )
        super().__init__(
            kept,
            ids=[prompt.id for prompt in kept],
            tokens=[prompt.token_ids for prompt in kept],
            seed=seed,
            shuffle=config.shuffle,
        )
        self._held_out = held_out_prompts(conversations, config, tokenizer=tokenizer)
        self.dropped: dict[str, int] = dict(conversations.dropped)
        """Records left out, by reason."""
        logger.info(
            "%s: %d prompts to train on, %d held out, dropped: %s",
            config.path, len(kept), len(self._held_out), self.dropped or "none",
        )  # fmt: skip

    def evaluation_prompts(self) -> list[Prompt]:
        """The held-out prompts, the same ones in the same order for every seed; never dealt by `next`."""
        return list(self._held_out)


def held_out_prompts(
    conversations: Conversations, config: DataConfig, *, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """The held-out prompts that are short enough; the others are counted in `conversations.dropped`."""
    prompts = make_prompts(conversations.held_out, tokenizer=tokenizer)
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= config.max_prompt_tokens]
    if too_long := len(prompts) - len(kept):
        conversations.dropped["held-out prompt is too long"] = too_long
    return kept


def make_prompts(conversations: list[Conversation], *, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """A Prompt for each conversation, whatever its length."""
    texts = [
        render(tokenizer, conversation.prompt, generation_prompt=True, where=conversation.record.where)
        for conversation in conversations
    ]
    return [
        Prompt(
            id=conversation.id,
            text=text,
            token_ids=tuple(token_ids),
            answer=conversation.answer,
            source=conversation.record.source,
            fields=conversation.record.fields,
        )
        for conversation, text, token_ids in zip(conversations, texts, encode(tokenizer, texts), strict=True)
    ]
