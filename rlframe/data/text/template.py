"""Names that a chat template reads, told from its text: the keyword arguments of `data.chat_template_kwargs`."""

import inspect
import re
from collections.abc import Iterator
from datetime import date, datetime, time
from functools import cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import meta

from rlframe.data.config import DataConfig
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.faults import Fault

GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags that transformers adds to Jinja."""
STRFTIME_NOW = "strftime_now"
"""Function that transformers gives to templates: it writes the present day in a form."""


def text_of_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the chat template, or all of them if the tokenizer has several. Empty if it has none."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


@cache
def names_read(template: str) -> frozenset[str]:
    """Returns names of the variables that the template reads and does not set before. Empty if it is not Jinja."""
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(GENERATION.sub("", template))))
    except jinja2.TemplateError:
        return frozenset()


def reads_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the template writes the day."""
    return STRFTIME_NOW in text_of_template(tokenizer)


def day_read(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str | None:
    """Returns the day that the template writes: that of the settings, else today. None if it writes none."""
    return (config.chat_template_date or str(date.today())) if reads_date(tokenizer) else None


def kwargs_of(config: DataConfig) -> dict[str, Any]:
    """Returns the keyword arguments of the template, the day among them if it is fixed."""
    if config.chat_template_date is None:
        return dict(config.chat_template_kwargs or {})
    day = datetime.combine(date.fromisoformat(config.chat_template_date), time.min)
    # It hides the function of that name which transformers gives to templates.
    return {**(config.chat_template_kwargs or {}), STRFTIME_NOW: day.strftime}


def kwargs_faults(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Iterator[Fault]:
    """Yields a fault for each of `data.chat_template_kwargs` that the template never reads or does not get from it, and
    for a `data.chat_template_date` that it never reads."""
    if config.chat_template_date is not None and not reads_date(tokenizer):
        yield Fault(
            "data.chat_template_date",
            f"has no effect with the chat template of {tokenizer.name_or_path!r}, which never reads {STRFTIME_NOW}",
            got=config.chat_template_date,
            hint="remove it",
        )
    if not config.chat_template_kwargs:
        return
    read = names_read(text_of_template(tokenizer))
    # What rlframe and transformers give to templates themselves.
    taken = {*inspect.signature(type(tokenizer).apply_chat_template).parameters, "messages", STRFTIME_NOW}
    listed = ", ".join(sorted(read - taken - set(tokenizer.special_tokens_map))) or "none"
    for name in config.chat_template_kwargs:
        key = f"data.chat_template_kwargs.{name}"
        if name in taken:
            yield Fault(key, "is not for the configuration to set", hint="remove it: rlframe gives it to the template")
        elif name not in read:
            yield Fault(
                key,
                f"has no effect with the chat template of {tokenizer.name_or_path!r}, which never reads it",
                hint=f"remove it; the template reads: {listed}",
            )
