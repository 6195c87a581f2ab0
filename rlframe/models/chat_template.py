"""Chat templates in the place of the model's own: a Jinja file, or one that rlframe ships."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframe.models.hub import read_json
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.files.whole import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = Path(__file__).parent / "chat_templates"
SUFFIX = ".jinja"
MORE = "additional_chat_templates"
"""Folder in which transformers keeps further templates of a model, such as one for tools."""
KEY = "data.chat_template"
CHATML, PLAIN = "chatml", "plain"
TOKENS = {CHATML: ("<|im_start|>", "<|im_end|>")}
"""Special tokens that a shipped template writes, besides the end-of-text token."""


def names() -> list[str]:
    """Returns the names of the shipped templates."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def text_of(chat_template: str) -> str:
    """Returns the text of a template.

    Args:
        chat_template: the name of a shipped template, or the path of a file.

    Raises:
        ConfigError: it is neither, or not Jinja in UTF-8.
    """
    shipped = chat_template in names()
    path = FOLDER / f"{chat_template}{SUFFIX}" if shipped else Path(chat_template).expanduser()
    if not path.is_file():
        rule = f"must be a file, or one of {', '.join(names())}"
        raise ConfigError([Fault(KEY, rule, got=repr(chat_template), why="there is no such file")])
    try:
        text = path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise ConfigError([Fault(KEY, "must be text in UTF-8", got=chat_template, why=f"{error!s:.200}")]) from error
    if not text.strip():
        raise ConfigError([Fault(KEY, "must be a Jinja template", got=chat_template, why="the file is empty")])
    return text


def give(tokenizer: "PreTrainedTokenizerBase", chat_template: str) -> None:
    """Gives a tokenizer the template in the place of its own.

    Raises:
        ConfigError: as `text_of`, or the tokenizer lacks a token that a shipped template writes.
    """
    text = text_of(chat_template)
    special = set(tokenizer.all_special_tokens)
    special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    missing = [token for token in TOKENS.get(chat_template, ()) if token not in special]
    if missing or (chat_template == PLAIN and tokenizer.eos_token is None):
        what = " and ".join(missing) or "end-of-text token"
        raise ConfigError(
            [
                Fault(
                    KEY,
                    f"cannot be {chat_template} with the tokenizer {tokenizer.name_or_path!r}, which has no special "
                    f"{what}",
                    hint=f"use {PLAIN}, which needs an end-of-text token only, or a Jinja file",
                )
            ]
        )
    tokenizer.chat_template = text


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A chat template that exported models get in the place of their own."""

    text: str
    end_token_id: int | None
    """The token that ends a turn. None if it is no special token."""

    def write(self, folder: Path) -> None:
        """Writes the template to an exported model, whose text then ends at the end of a turn too."""
        write_whole(folder / "chat_template.jinja", self.text.encode())
        if (folder / MORE).is_dir():
            shutil.rmtree(folder / MORE)
        tokenizer, generation = folder / "tokenizer_config.json", folder / "generation_config.json"
        if tokenizer.is_file() and "chat_template" in (settings := read_json(tokenizer)):
            _write_json(tokenizer, {key: value for key, value in settings.items() if key != "chat_template"})
        settings = read_json(generation)
        ends = settings.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends] * (ends is not None)
        if self.end_token_id is not None and self.end_token_id not in ends:
            _write_json(generation, {**settings, "eos_token_id": [*ends, self.end_token_id]})


def _write_json(file: Path, settings: dict[str, Any]) -> None:
    write_whole(file, (json.dumps(settings, indent=2) + "\n").encode())


def proposal(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns the shipped template that fits a tokenizer best."""
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return CHATML if known.issuperset(TOKENS[CHATML]) else PLAIN
