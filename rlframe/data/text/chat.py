"""Renders conversations for the model: the chat template, then the tokenizer."""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from jinja2 import TemplateError

from rlframe.data.config import DataConfig
from rlframe.data.text.special_tokens import Rendering, encode_renderings, marked, marks_for, special_tokens
from rlframe.data.text.template import kwargs_faults, kwargs_of
from rlframe.data.text.tool_calls import Tool, names_in, with_arguments_as_text
from rlframe.models.chat_template import Exported, proposal, text_of
from rlframe.types.messages import Message
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import ConfigError, DataError

encode = encode_renderings
SENTINEL = "Sentinel0x"
"""Text of a turn whose end is looked for."""
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    MemoryError,
)
"""Errors that a template raises: its own refusals, and those of the values it computes with."""


class Overdue(BaseException):
    """A template has not ended in time. It is not an error that a template could catch."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    config: DataConfig,
    generation_prompt: bool,
    where: str,
    tools: Sequence[Tool] = (),
) -> Rendering:
    """Returns the conversation as text, special tokens included; `generation_prompt` opens an assistant turn at its
    end.

    Raises:
        ConfigError: the template does not read one of `data.chat_template_kwargs`, or `data.chat_template_date`.
        DataError: the tokenizer has no chat template, or the template refuses the conversation, does not end, writes
            nothing, or leaves out a tool, a call of one, or a system message.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template, as those of base models; use a model that "
            f"has one, or set data.chat_template={proposal(tokenizer)}, which rlframe ships, or to a Jinja file"
        )
    template = f"the chat template of {tokenizer.name_or_path!r}"
    marks = {} if config.special_tokens_in_text else marks_for([list(messages), list(tools)], tokenizer)
    given: list[Any] = [list(messages), list(tools)]
    if marks:
        given = [marked(part, marks) for part in given]
    if unread := list(kwargs_faults(tokenizer, config)):
        raise ConfigError(unread)
    apply = partial(
        tokenizer.apply_chat_template,
        tools=given[1] or None,
        tokenize=False,
        add_generation_prompt=generation_prompt,
        **kwargs_of(config),
    )
    try:
        with _limited(config.template_limit_s):
            text = _written(apply, given[0])
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"{where}: {template} refuses turns of {roles:.200}: {_named(error)}") from error
    except Overdue as error:
        raise DataError(
            f"{where}: {template} does not end within data.template_limit_s={config.template_limit_s:g}"
        ) from error
    if not isinstance(text, str) or not text:
        raise DataError(f"{where}: {template} writes nothing")
    rendering = Rendering(marked=text, where=where, marks={mark: token for token, mark in marks.items()})
    _check_tools(rendering, messages, tools)
    _check_system(rendering, messages)
    return rendering


def end_token(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str:
    """Returns the special token with which the template ends a turn of the assistant. Empty if it is none."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}]
    text = render(tokenizer, turns, config=config, generation_prompt=False, where="a turn").text
    rest = text.rpartition(SENTINEL)[2].lstrip()
    return next((token for token in special_tokens(tokenizer) if rest.startswith(token)), "")


def exported(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Exported | None:
    """Returns the chat template that exported models get, or None if they keep their own.

    Args:
        tokenizer: with that template.
    """
    if config.chat_template is None:
        return None
    end = special_tokens(tokenizer).get(end_token(tokenizer, config))
    return Exported(text=text_of(config.chat_template), end_token_id=end)


def end_by_next_turn(tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, role: str) -> str:
    """Returns the special token with which the next turn begins, and white space before it, where the template ends a
    turn of the assistant with no token of its own, as GLM's, whose models sample that of the next turn. Else empty.

    Args:
        role: of the next turn, user or tool.
    """
    said: Message = {"role": "assistant", "content": SENTINEL}
    if role == "tool":
        function = {"name": "x", "arguments": {"x": SENTINEL}}
        said = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    turns = [{"role": "user", "content": "x"}, said]
    written = partial(render, tokenizer, config=config, generation_prompt=False, where="a turn")
    _, found, closure = written(turns).text.rpartition(SENTINEL)
    rest = written([*turns, {"role": role, "content": "x"}]).text.rpartition(SENTINEL)[2]
    if not found or not rest.startswith(closure):
        return ""
    rest = rest.removeprefix(closure)
    begun = rest.lstrip()
    end = next((token for token in special_tokens(tokenizer) if begun.startswith(token)), "")
    return rest[: len(rest) - len(begun)] + end if end else ""


def _written(apply: Callable[[list[Message]], Any], messages: list[Message]) -> Any:
    """Returns what the template writes. One that takes the arguments of calls as JSON text only, as DeepSeek's do, gets
    them so."""
    try:
        return apply(messages)
    except TypeError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        return apply([with_arguments_as_text(message) for message in messages])


def _check_tools(rendering: Rendering, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Raises an error if the template silently drops tools, as templates without support for them do."""
    text = rendering.text
    for name, count in Counter(names_in(tools, messages)).items():
        if text.count(name) < count:
            raise DataError(
                f"{rendering.where}: the chat template leaves out the tool {name!r:.60} or a call of it: written "
                f"{text.count(name)} times, expected {count}; use a model whose template has tools and tool_calls"
            )


def _check_system(rendering: Rendering, messages: Sequence[Message]) -> None:
    """Raises an error if the template silently drops a system message, as some do with all but the first or last."""
    text = rendering.text
    for index, message in enumerate(messages):
        content = message.get("content")
        # Some templates write white space anew.
        if message["role"] == "system" and isinstance(content, str) and content.strip() not in text:
            if all(word in text for word in content.split()):
                continue
            raise DataError(
                f"{rendering.where}: the chat template leaves out message {index + 1}, of role system, "
                f"{content.strip()!r:.60}; give its words to the first system message or to the user's"
            )


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Interrupts the block in the main thread by SIGALRM, because Jinja's sandbox has no time limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: Any) -> None:
        raise Overdue

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _named(error: Exception) -> str:
    return str(error)[:300] if isinstance(error, TemplateError) else f"{type(error).__name__}: {error!s:.300}"
