"""Conversations as the model sees them: the chat template, then the tokenizer."""

from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlframe.data.conversations import Message
from rlframe.utils.errors import DataError


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, generation_prompt: bool, where: str
) -> str:
    """The conversation as text, special tokens included; `generation_prompt` opens an assistant turn at its end.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the conversation.
    """
    if tokenizer.chat_template is None:
        raise DataError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use a model that has one")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"{where}: the chat template refuses turns of {roles}: {error}") from error
    assert isinstance(text, str)
    return text


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text. The template has written the special tokens, so none are added."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
