"""Makes text from models, data and user code safe for terminals, logs and files."""

import json
import logging
import re
import sys
from collections.abc import Mapping
from typing import Any

from rlframe.utils.secrets import hidden

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal or reorder a line, and halves of surrogate pairs, which cannot be encoded. Line
feeds and tabs are not among them."""


def printable(text: str) -> str:
    r"""Returns `text` with every character of UNSAFE written as `\u001b`: safe for a terminal, and always encodable."""
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class PrintableFormatter(logging.Formatter):
    """Formats log records, tracebacks included, so that they are safe for a terminal and contain no secret."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, or the lines, of a record."""
        return printable(hidden(super().format(record)))


def json_line(record: Mapping[str, Any]) -> str:
    """Returns `record` as one line of JSON that reads back exactly, with the characters of UNSAFE escaped."""
    return printable(json.dumps(record, ensure_ascii=False)) + "\n"


def print_line(text: str) -> None:
    """Writes lines of text to the terminal."""
    sys.stdout.write(f"{printable(text)}\n")
