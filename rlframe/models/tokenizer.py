"""Loads the tokenizer of a model folder, and turns its errors into sentences."""

import copy
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframe.models import chat_template as chat_templates
from rlframe.models import remote_code
from rlframe.models.hub import EMBEDDED, read_config, read_json
from rlframe.utils.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
WHOLE = JSON_FILES[0]
"""The file that says all of a tokenizer, so that no code is needed."""
TEMPLATE = "chat_template.jinja"
PROBES = ("What is 37 + 48?", "a b c", "0")
"""Texts of which every vocabulary has some tokens."""


def load(folder: Path, *, chat_template: str | None = None) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer in `folder`. No code of the folder is run, unless it is trusted (`remote_code`).

    Args:
        chat_template: the template that it gets in the place of its own; see `chat_template.text_of`.

    Raises:
        CheckpointError: there is no tokenizer, or one of its files is garbled.
        ConfigError: there is no such template, or it does not fit the tokenizer.
    """
    for file in JSON_FILES:
        if (folder / file).is_file():
            read_json(folder / file)
    if (folder / TEMPLATE).is_file():
        _read_text(folder / TEMPLATE)
    if not (folder / WHOLE).is_file():
        # transformers may have a class for the model_type that would make other tokens of the same files.
        refuse_code(folder)
    try:
        # A copy, which may get a template of its own. What turns text to tokens is the same object in all of them.
        tokenizer = copy.copy(_loaded(folder, _state(folder), trusted=remote_code.is_trusted(folder)))
    # The package tokenizers raises plain Exception for every fault of a file.
    except Exception as error:
        refuse_code(folder, cause=error)
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be loaded, from {_present(folder)}: {type(error).__name__}: {error!s:.300}"
        ) from error
    # Llama 3's folder, for one, asks to drop spaces before punctuation: another text than was sampled.
    tokenizer.clean_up_tokenization_spaces = False
    if chat_template is not None:
        chat_templates.give(tokenizer, chat_template)
    return tokenizer


@lru_cache(maxsize=2)
def _loaded(folder: Path, state: object, *, trusted: bool) -> "PreTrainedTokenizerBase":
    """Returns what AutoTokenizer makes of the folder, once for each state of its files: of 150,000 tokens that takes
    over a second, and a run's checks, its data and its loop ask for the same."""
    if folder.parent == EMBEDDED:
        # Its class is known. AutoTokenizer imports what models need to find it, which takes a second.
        from transformers import TokenizersBackend  # noqa: PLC0415 - as below

        return TokenizersBackend.from_pretrained(folder)
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and configurations are read without it

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Returns name, time and size of every file of a folder that may say something of its tokenizer."""
    return tuple(
        (file.name, found.st_mtime_ns, found.st_size)
        for file in sorted(folder.iterdir())
        if file.is_file() and file.suffix != ".safetensors" and (found := file.stat())
    )


def refuse_code(folder: Path, *, cause: Exception | None = None) -> None:
    """Refuses a tokenizer that is code of its folder, unless the folder is trusted.

    Raises:
        CheckpointError: it is, and the folder is not.
    """
    own = remote_code.of_tokenizer(folder)
    if own and not remote_code.is_trusted(folder):
        raise CheckpointError(
            f"{folder}: its tokenizer is Python code of its own, {', '.join(own)}, which does not run unasked: read "
            f"it, and set {remote_code.KEY}=true, which is for the model that is trained"
        ) from cause


def pieces(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int]) -> list[str]:
    """Returns the text of each token by itself, its leading space included. A part of a character is U+FFFD."""
    from transformers import TokenizersBackend  # noqa: PLC0415 - see load

    names = tokenizer.convert_ids_to_tokens(list(tokens))
    if getattr(type(tokenizer), "_decode", None) is vars(TokenizersBackend)["_decode"]:
        # All at once takes a fifth of the time.
        backend: Any = tokenizer.backend_tokenizer
        texts = backend.decode_batch([[token] for token in tokens], skip_special_tokens=False)
    else:
        texts = [str(tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in tokens]
    spaced = (
        str(name).startswith("\u2581") and not text.startswith(" ") for name, text in zip(names, texts, strict=True)
    )
    return [f" {text}" if space else text for space, text in zip(spaced, texts, strict=True)]


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Returns 16 hex digits that another vocabulary, or other special tokens, would change."""
    named = [sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_tokens), tokenizer.eos_token]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]


def stop_token_ids(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns the end-of-sequence tokens of the model's config, of its generation config and of its tokenizer."""
    from transformers import GenerationConfig  # noqa: PLC0415 - see load

    stated = [end_token_of_config(folder), tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        stated.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    ids = chain.from_iterable(each if isinstance(each, list) else [each] for each in stated)
    return sorted({token for token in ids if token is not None})


def end_token_of_config(folder: Path) -> int | list[int] | None:
    """Returns the end-of-sequence token of the model's config, or of transformers' default for the model_type."""
    from transformers import CONFIG_MAPPING, AutoConfig  # noqa: PLC0415 - see load

    hf = read_config(folder)
    if hf["model_type"] not in CONFIG_MAPPING:
        return hf.get("eos_token_id")
    return AutoConfig.from_pretrained(folder, trust_remote_code=False).eos_token_id


def faults(folder: Path, *, vocab_size: int) -> list[str]:
    """Returns a fault for every reason why the tokenizer in `folder` cannot serve a model of `vocab_size` tokens.

    Raises:
        CheckpointError: as `load`.
    """
    tokenizer = load(folder)
    vocabulary = tokenizer.get_vocab()
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROBES]
    if not vocabulary or not any(encoded):
        return [f"{folder} has no tokenizer: {_present(folder)} make no token of {PROBES[0]!r}; add its tokenizer.json"]
    token, greatest = max(vocabulary.items(), key=lambda entry: entry[1])
    if greatest >= vocab_size:
        return [
            f"{folder}: its tokenizer has the token {token!r:.60} with id {greatest}, and its config.json has "
            f"vocab_size {vocab_size}: they belong to different models"
        ]
    for ids in encoded:
        tokenizer.decode(ids)
    return []


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error!s:.200}") from error


def _present(folder: Path) -> str:
    names = [*JSON_FILES, TEMPLATE, "merges.txt", "vocab.txt", "tokenizer.model"]
    return ", ".join(name for name in names if (folder / name).is_file()) or "no file of a tokenizer"
