"""Conversations as the model sees them: the chat template, then the tokenizer."""

from collections import Counter
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlframe.data.conversations import Message
from rlframe.data.tool_calls import Tool, names_in
from rlframe.utils.errors import DataError


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    generation_prompt: bool,
    where: str,
    tools: Sequence[Tool] = (),
) -> str:
    """The conversation as text, special tokens included; `generation_prompt` opens an assistant turn at its end.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the conversation, or leaves out a tool or
            a call of one.
    """
    if tokenizer.chat_template is None:
        raise DataError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use a model that has one")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generation_prompt
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"{where}: the chat template refuses turns of {roles}: {error}") from error
    assert isinstance(text, str)
    # Templates that know nothing of tools pass over them without a word.
    for name, count in Counter(names_in(tools, messages)).items():
        if text.count(name) < count:
            raise DataError(
                f"{where}: the chat template leaves out the tool {name!r} or a call of it: written {text.count(name)} "
                f"times, expected {count}; use a model whose template has tools and tool_calls"
            )
    return text


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text. The template has written the special tokens, so none are added."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
