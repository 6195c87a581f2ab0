"""Shared by the tests of this folder: records to streams, and tokens for people."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from rlframe.data.records import Record
from rlframe.data.text.turns import Tokens


def marked(tokens: Tokens, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text with each learnt token in brackets."""
    return "".join(
        f"[{tokenizer.decode([token])}]" if weight else str(tokenizer.decode([token]))
        for token, weight in zip(tokens.token_ids, tokens.weights, strict=True)
    )


def record(**fields: Any) -> Record:
    """The record on line 1 of the file s."""
    return Record(fields=fields, source="s", where="s:1")


def write(file: Path, rows: list[dict]) -> str:
    """The rows as a .jsonl file; its path."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)
