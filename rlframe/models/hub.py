"""From a name in the config to a folder in Hugging Face format, and from the folder to its family."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from rlframe.models.config import ModelConfig
from rlframe.models.families.base import Family
from rlframe.utils import registry
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.outside import load_class

EMBEDDED = Path(__file__).parent / "embedded"
"""Folder of the models that come with rlframe: config and tokenizer, weights from the seed."""
FAMILIES = "rlframe.models.families"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

OUTSIDE: dict[Path, Family] = {}
"""By folder of the model, families that live outside the package."""


def embedded_names() -> list[str]:
    """Returns the models that come with rlframe, sorted."""
    return sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))


def is_id(path: str) -> bool:
    """Returns whether a model of this name would come from the hub: it is neither embedded nor a folder."""
    return path not in embedded_names() and not Path(path).expanduser().is_dir()


def resolve(config: ModelConfig, *, key: str = "model.path") -> Path:
    """Returns the folder of the model: an embedded one, a local one, or a download from the hub. What `config.family`
    names is its family in this process from then on.

    Raises:
        ConfigError: none of these exists, or there is no such family; says what was tried.
    """
    folder = _folder(config, key=key)
    if config.family is not None:
        wish = load_class(config.family, base=registry.BASES[FAMILIES], key=f"{key.removesuffix('.path')}.family")
        OUTSIDE[folder] = wish()
    return folder


def _folder(config: ModelConfig, *, key: str) -> Path:
    if config.path in embedded_names():
        return EMBEDDED / config.path
    try:
        folder = Path(config.path).expanduser()
        if folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError) as error:
        # A name that is too long, has a null byte, or begins with the home of nobody.
        raise ConfigError([Fault(key, f"{config.path!r:.200} is no path", why=f"{error!s:.200}")]) from error
    tried = f"no folder {folder.absolute()}, no embedded model of that name (there are {', '.join(embedded_names())})"
    if not HUB_ID.fullmatch(config.path):
        raise ConfigError([Fault(key, f"{config.path!r:.200}", why=f"{tried:.500}")])
    try:
        weights = [] if config.random_init else ["*.safetensors"]
        files = ["*.json", "*.txt", "*.model", "*.jinja", *weights]
        return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = f"{tried}, and the hub answered: {error}"
        raise ConfigError([Fault(key, f"{config.path!r}", why=why)]) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of config.json.

    Raises:
        CheckpointError: it is missing, not JSON, or has no model_type.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist, so {folder} is no model in Hugging Face format")
    hf = read_json(path)
    if not isinstance(hf.get("model_type"), str):
        raise CheckpointError(f"{path} has no model_type, got {hf.get('model_type')!r:.60}")
    return hf


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of a model folder.

    Raises:
        CheckpointError: it cannot be read, or is no object in UTF-8.
    """
    try:
        values = json.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error!s:.200}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must be a JSON object, got {type(values).__name__} {values!r:.60}")
    return values


def load_family(folder: Path, *, key: str = "model.path") -> Family:
    """Returns the family of the model in `folder`.

    Raises:
        ConfigError: no file of `rlframe.models.families` has the name of its model_type.
    """
    model_type = read_config(folder)["model_type"]
    if folder in OUTSIDE:
        return OUTSIDE[folder]
    known = registry.names(FAMILIES)
    if model_type not in known:
        raise ConfigError(
            [
                Fault(
                    key, said=f"the model_type in config.json must be one of {', '.join(known)}, got {model_type!r:.60}"
                )
            ]
        )
    return importlib.import_module(f"{FAMILIES}.{model_type}").FAMILY
