"""Shared by the tests of this folder: records to streams, and tokens for people."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from rlframe.data.records import Record
from rlframe.data.text.turns import Tokens

FORGETTING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Writes the reasoning of the last message only."""
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "x"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d", "reasoning_content": "y"},
]
"""A conversation with reasoning."""


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """The tokenizer with another chat template."""
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>")
    made.chat_template = template
    return made


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
