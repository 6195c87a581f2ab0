"""Finds the folder of a model from its name in the configuration, and the family of a folder."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

from rlframe.models import remote_code
from rlframe.models.config import ModelConfig
from rlframe.models.families._refused import NO_IMAGES, VISION
from rlframe.models.families.base import Family
from rlframe.utils import registry
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean
from rlframe.utils.outside import load_class

EMBEDDED = Path(__file__).parent / "embedded"
"""Folder of the models that come with rlframe: config and tokenizer; weights are drawn from the seed."""
EXPORT = "model"
"""Folder of a run with the model that it has trained."""
FAMILIES = "rlframe.models.families"
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A revision that nobody can move to other files."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

OUTSIDE: dict[Path, Family] = {}
"""Families from outside the package, by folder of the model."""


def embedded_names() -> list[str]:
    """Returns the models that come with rlframe, sorted."""
    return sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))


def is_id(path: str) -> bool:
    """Returns whether a model of this name would be downloaded from the hub: it is neither embedded nor a folder."""
    return path not in embedded_names() and not Path(path).expanduser().is_dir()


def resolve(config: ModelConfig, *, key: str = "model.path") -> Path:
    """Returns the folder of the model: an embedded one, a local one, or a download from the hub. A family named by
    `config.family` is used for that folder in this process from then on.

    Raises:
        ConfigError: none of these exists, or the family does not exist; the message lists what was tried. Code of the
            model may run, and nothing pins it.
        CheckpointError: as `remote_code.trust`.
    """
    folder = _folder(config, key=key)
    if config.family is not None:
        wish = load_class(config.family, base=registry.BASES[FAMILIES], key=f"{key.removesuffix('.path')}.family")
        OUTSIDE[folder] = wish()
    if config.trust_remote_code:
        remote_code.trust(folder)
    return folder


def _folder(config: ModelConfig, *, key: str) -> Path:
    if config.path in embedded_names():
        return EMBEDDED / config.path
    try:
        folder = Path(config.path).expanduser()
        if folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError) as error:
        # The name is too long, has a null byte, or begins with the home folder of an unknown user.
        raise ConfigError([Fault(key, f"{config.path!r:.200} is not a path", why=f"{error!s:.200}")]) from error
    tried = f"no folder {folder.absolute()}, no embedded model of that name (there are {', '.join(embedded_names())})"
    near = did_you_mean(config.path, embedded_names())
    if not HUB_ID.fullmatch(config.path):
        raise ConfigError([Fault(key, f"{config.path!r:.200}", why=f"{tried:.500}", hint=near)])
    if config.trust_remote_code and not COMMIT.fullmatch(config.revision or ""):
        raise ConfigError(
            [
                Fault(
                    f"{key.removesuffix('.path')}.revision",
                    f"must be a commit of 40 digits with {remote_code.KEY}=true",
                    got=config.revision,
                    why="a branch or a tag may have other code tomorrow",
                    hint=f"read the Python files of https://huggingface.co/{config.path} and name their commit",
                )
            ]
        )
    # Most of a tenth of a second, which a local model does without.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        weights = [] if config.random_init else ["*.safetensors"]
        code = ["*.py"] if config.trust_remote_code else []
        files = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", *code, *weights]
        # Folders hold the same weights in the formats of other programs, such as original/ and metal/ of GPT-OSS.
        return Path(
            snapshot_download(
                config.path, revision=config.revision, allow_patterns=files, ignore_patterns=["*/*.safetensors"]
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        why = f"{tried}, and the hub answered: {error}"
        raise ConfigError([Fault(key, f"{config.path!r}", why=why, hint=near)]) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of config.json.

    Raises:
        CheckpointError: it is missing, not JSON, or has no model_type.
    """
    path = folder / "config.json"
    if not path.is_file():
        near = f"; did you mean {folder / EXPORT}?" if (folder / EXPORT / "config.json").is_file() else ""
        if any((place / ".metadata").is_file() for place in (folder, folder / "training")):
            near = "; it is a checkpoint of training, which python -m rlframe.tools.convert makes a model of"
        if (folder / "adapter_config.json").is_file():
            near = "; it is an adapter: take the merged model beside it, or train on with train.lora.path"
        raise CheckpointError(f"{path} does not exist, so {folder} is not a model in Hugging Face format{near}")
    hf = read_json(path)
    if not isinstance(hf.get("model_type"), str):
        raise CheckpointError(f"{path} must have a model_type, got {hf.get('model_type')!r:.60}")
    return hf


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of a model folder.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object in UTF-8.
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
        ConfigError: `rlframe.models.families` has no file named after its model_type.
    """
    hf = read_config(folder)
    model_type = hf["model_type"]
    if folder in OUTSIDE:
        return OUTSIDE[folder]
    known = registry.names(FAMILIES)
    if model_type not in known:
        said = f"the model_type in config.json must be one of {', '.join(known)}, got {model_type!r:.60}"
        if "vision_config" in hf:
            inner = hf.get("text_config")
            language = inner.get("model_type") if isinstance(inner, dict) else None
            said += f": {VISION if language in known else NO_IMAGES}"
        raise ConfigError([Fault(key, said=said)])
    return importlib.import_module(f"{FAMILIES}.{model_type}").FAMILY
