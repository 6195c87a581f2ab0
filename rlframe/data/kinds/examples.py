"""ExampleStream: whole conversations for supervised training, with a resumable cursor."""

import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from rlframe.data.chat import encode, render
from rlframe.data.config import DataConfig
from rlframe.data.conversations import Conversation
from rlframe.data.cursor import TrainingStream
from rlframe.data.prompts import held_out_prompts
from rlframe.data.sources import load
from rlframe.types.batch import Sequences
from rlframe.types.prompt import Prompt
from rlframe.utils.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A conversation to imitate.

    Example: user says 7 8, assistant 5, with 1 and 3 opening their turns and 2 ending them:
        token_ids [1, 7, 8, 2, 3, 5, 2], loss_mask [F, F, F, F, F, T, T]
    """

    id: str
    token_ids: tuple[int, ...]
    """[L] up to the end of the last assistant turn."""
    loss_mask: tuple[bool, ...]
    """[L] True on what the assistant says and on the token that ends its turn."""


class ExampleStream(TrainingStream[Example]):
    """Examples to train on, each exactly once per epoch. Holds out the same records as `PromptStream`."""

    def __init__(self, config: DataConfig, *, tokenizer: PreTrainedTokenizerBase, seed: int, max_tokens: int):
        """Reads, renders and tokenises the whole dataset.

        Args:
            max_tokens: longer examples are dropped and counted.

        Raises:
            DataError: a source that is missing, empty or malformed, a conversation that does not end with the
                assistant, a chat template that rewrites earlier turns, or no example short enough.
        """
        conversations = load(config, seed=seed)
        examples = [make_example(conversation, tokenizer=tokenizer) for conversation in conversations.train]
        kept = [example for example in examples if len(example.token_ids) <= max_tokens]
        if too_long := len(examples) - len(kept):
            conversations.dropped["example is too long"] = too_long
        if not kept:
            shortest = min(len(example.token_ids) for example in examples)
            raise DataError(
                f"{config.path}: expected examples of at most {max_tokens} tokens (train.max_tokens_per_microbatch), "
                f"found none; the shortest has {shortest}"
            )
        super().__init__(
            kept,
            ids=[example.id for example in kept],
            tokens=[example.token_ids for example in kept],
            seed=seed,
            shuffle=config.shuffle,
        )
        self._held_out = held_out_prompts(conversations, config, tokenizer=tokenizer)
        self.dropped: dict[str, int] = dict(conversations.dropped)
        """Records left out, by reason."""
        logger.info(
            "%s: %d examples to train on, %d prompts held out, dropped: %s",
            config.path, len(kept), len(self._held_out), self.dropped or "none",
        )  # fmt: skip

    def batch(self, items: list[Example]) -> Sequences:
        """R examples packed to T tokens, in their order."""
        return pack_examples(items)

    def evaluation_prompts(self) -> list[Prompt]:
        """The held-out prompts, the same ones in the same order for every seed; never among the examples."""
        return list(self._held_out)


def make_example(conversation: Conversation, *, tokenizer: PreTrainedTokenizerBase) -> Example:
    """The conversation's tokens and which of them are the assistant's.

    An assistant turn is what the whole conversation has beyond the rendering of all turns before it with an opened
    assistant turn. That holds only for templates in which each rendering is a token prefix of the next: it is checked.
    """
    where, messages = conversation.record.where, conversation.messages
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{where}: expected the last message from the assistant, found {messages[-1]['role']!r}")
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    texts: list[str] = []
    for index in turns:
        texts.append(render(tokenizer, messages[:index], generation_prompt=True, where=where))
        texts.append(render(tokenizer, messages[: index + 1], generation_prompt=False, where=where))
    prefixes = encode(tokenizer, texts)
    for earlier, later in zip(prefixes, prefixes[1:], strict=False):
        if later[: len(earlier)] != earlier:
            raise DataError(f"{where}: {_first_difference(earlier, later, tokenizer)}")
    token_ids = prefixes[-1]
    loss_mask = [False] * len(token_ids)
    for opened, closed in zip(prefixes[0::2], prefixes[1::2], strict=True):
        end = _end_of_turn(closed, start=len(opened), tokenizer=tokenizer)
        loss_mask[len(opened) : end] = [True] * (end - len(opened))
    loss_mask[0] = False
    length = end
    return Example(id=conversation.id, token_ids=tuple(token_ids[:length]), loss_mask=tuple(loss_mask[:length]))


def pack_examples(examples: list[Example]) -> Sequences:
    """R examples packed to T tokens, in their order."""
    return Sequences(
        token_ids=torch.tensor([token for example in examples for token in example.token_ids], dtype=torch.int64),
        lengths=torch.tensor([len(example.token_ids) for example in examples], dtype=torch.int64),
        loss_mask=torch.tensor([flag for example in examples for flag in example.loss_mask], dtype=torch.bool),
    )


def _end_of_turn(token_ids: list[int], *, start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """One past the turn's last special token, if only white space follows it; else the end of the tokens.

    Templates such as Qwen's put a newline after the end-of-turn token. Generation stops before it, so it is not learnt.
    """
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    last = max((index for index in range(start, len(token_ids)) if token_ids[index] in special), default=None)
    if last is None or str(tokenizer.decode(token_ids[last + 1 :])).strip():
        return len(token_ids)
    return last + 1


def _first_difference(earlier: list[int], later: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    pairs = enumerate(zip(earlier, later, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(earlier), len(later)))
    window = slice(max(0, at - 4), at + 5)
    return (
        "the chat template is not prefix-preserving, so the assistant's tokens cannot be told apart: at token "
        f"{at} the conversation up to here reads {tokenizer.decode(earlier[window])!r} but with the next turn "
        f"{tokenizer.decode(later[window])!r}; use a template that renders every turn alone"
    )


STREAM = ExampleStream
