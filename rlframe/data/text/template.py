"""Names that a chat template reads, told from its text: the keyword arguments of `data.chat_template_kwargs`."""

import inspect
import re
from collections.abc import Iterator
from functools import cache

import jinja2
import jinja2.ext
from jinja2 import meta

from rlframe.data.config import DataConfig
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.faults import Fault

GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags that transformers adds to Jinja."""


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


def kwargs_faults(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Iterator[Fault]:
    """Yields a fault for each of `data.chat_template_kwargs` that the template never reads, or does not get from it."""
    if not config.chat_template_kwargs:
        return
    read = names_read(text_of_template(tokenizer))
    # What rlframe and transformers give to templates themselves.
    taken = {*inspect.signature(type(tokenizer).apply_chat_template).parameters, "messages"}
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
