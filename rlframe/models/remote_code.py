"""Python files in a model's folder: which ones transformers would run, and whether it may.

transformers runs them for a tokenizer or a configuration that it does not have itself. They have the rights of the
process, so they run only for a folder that `trust` was called for, which `model.trust_remote_code=true` does. Code of
the model itself is never run: families, vLLM and SGLang have their own.
"""

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rlframe.utils.errors import CheckpointError

KEY = "model.trust_remote_code"
TOKENIZER, CONFIG = ("tokenizer_config.json", "AutoTokenizer"), ("config.json", "AutoConfig")
"""The file that names the code, and the class of transformers that runs it."""
PACKAGE = "transformers_modules"
"""Package into which transformers loads such files."""

_trusted: set[Path] = set()


def trust(folder: Path) -> None:
    """Lets the code of the model in `folder` run in this process.

    Raises:
        CheckpointError: the folder names code of another repository, which no revision of this one pins.
    """
    for name in named(folder):
        if "--" in name:
            raise CheckpointError(
                f"{folder} names code of another repository, {name}, which its revision does not pin: copy the file "
                "into the folder, and name it there without the repository"
            )
    _trusted.add(folder)


def is_trusted(folder: Path) -> bool:
    """Returns whether `trust` was called for the folder in this process."""
    return folder in _trusted


def named(folder: Path) -> list[str]:
    """Returns the classes of a folder's own code that a tokenizer or a configuration may be, such as
    `tokenization_kimi.TikTokenTokenizer`."""
    classes = (_classes(folder, *place) for place in (TOKENIZER, CONFIG))
    return list(dict.fromkeys(name for found in classes for name in found))


def of_tokenizer(folder: Path) -> list[str]:
    """Returns the classes of its own code that the folder names as its tokenizer."""
    return _classes(folder, *TOKENIZER)


def runs_config(folder: Path) -> bool:
    """Returns whether engines may run code for the configuration: the folder is trusted, and transformers does not know
    the model_type. The code of a type that it knows is often older than its own."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - takes seconds

    known = _json(folder / "config.json").get("model_type") in CONFIG_MAPPING
    return is_trusted(folder) and not known and bool(_classes(folder, *CONFIG))


def files(folder: Path) -> list[str]:
    """Returns the Python files of the folder, each with 12 digits of its SHA-256."""
    paths = sorted(folder.glob("*.py"))
    return [f"{path.name} (sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]})" for path in paths]


def modules() -> list[ModuleType]:
    """Returns the modules of such code that this process has loaded. Objects of their classes reach other processes
    only together with the modules."""
    return [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == PACKAGE]


def _classes(folder: Path, file: str, kind: str) -> list[str]:
    stated = _json(folder / file).get("auto_map")
    found: Any = stated.get(kind) if isinstance(stated, dict) else None
    return [each for each in (found if isinstance(found, list | tuple) else [found]) if isinstance(each, str)]


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes().decode())
    except (OSError, ValueError):
        # Who needs the file says what is wrong with it.
        return {}
    return values if isinstance(values, dict) else {}
