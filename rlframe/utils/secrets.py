"""Removal of passwords, tokens and keys from files, logs and messages."""

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
NAME = re.compile(
    r"(?:\b|_)(?<!pad_)(?<!eos_)(?<!bos_)(?<!stop_)(?<!per_)(?:token|password|passwd|secret|api_?key|access_?key|private_?key|"
    r"credentials?)$",
    re.IGNORECASE,
)
"""Names of settings and of environment variables whose values are secret. `max_tokens`, `eos_token` and
`experts_per_token` are not."""
IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
"""Pattern of `user:password` before the host of an address."""
IN_QUERY = re.compile(r"(?<=[?&])((?:[\w-]*(?:token|key|secret|password|signature)))=[^&\s'\"]+", re.IGNORECASE)
SHAPES = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|xox[abprs]-[\w-]{10,}|AKIA\w{16})\b"
)
"""Patterns of tokens of Hugging Face, of model providers, of GitHub, Slack and AWS."""
ITEM = re.compile(
    r"(?P<name>[\w.-]+)(?P<between>['\"]?\s*:\s*)(?P<value>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^,{}\[\]]+)"
)
"""Pattern of `name: value` within braces."""
UNSET = ("", "null")
SHORTEST = 8
"""Least number of characters of a secret environment variable that is searched for. A shorter text may be a word."""


def hidden(text: str) -> str:
    """Returns a text with `***` in place of each password in an address, each known form of token, and each value of an
    environment variable with a name like API_KEY."""
    text = IN_QUERY.sub(rf"\1={HIDDEN}", IN_ADDRESS.sub(HIDDEN, text))
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and NAME.search(name):
            text = text.replace(value, HIDDEN)
    return SHAPES.sub(HIDDEN, text)


def without_secret(override: str) -> str:
    """Returns an override, `key=value` or `key={name: value}`, with `***` in place of each value whose name marks it as
    secret, and with secrets hidden in all other texts."""
    key, equals, value = override.partition("=")
    if equals and NAME.search(key) and value not in UNSET:
        return f"{key}={HIDDEN}"
    return hidden(key + equals + ITEM.sub(_without_value, value))


def _without_value(item: re.Match[str]) -> str:
    secret = NAME.search(item["name"]) and item["value"] not in UNSET
    return f"{item['name']}{item['between']}{HIDDEN}" if secret else item[0]


def without_secrets(values: Any, name: str = "") -> Any:
    """Returns nested mappings and lists with `***` in place of every text and number whose name marks it as secret, and
    with secrets hidden in all other texts and in names."""
    if isinstance(values, Mapping):
        return {hidden(str(key)): without_secrets(value, str(key)) for key, value in values.items()}
    if isinstance(values, list):
        return [without_secrets(value, name) for value in values]
    if values is None or isinstance(values, bool):
        return values
    if NAME.search(name):
        return HIDDEN
    return hidden(values) if isinstance(values, str) else values
