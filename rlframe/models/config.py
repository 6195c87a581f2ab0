"""Which model a run starts from. Light: imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from rlframe.utils.bounds import PathText, check_bounds
from rlframe.utils.errors import SettingError

HEAD = "score.weight"
"""Name in a checkpoint of the layer that gives C numbers for a token, as in transformers' models for sequence
classification."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The model that is trained, and that engines generate with."""

    path: Annotated[str, PathText()] = "qwen3_moe_tiny"
    """An embedded model's name, a local folder in Hugging Face format, or a hub id such as Qwen/Qwen3-0.6B."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; the hub's default when null."""
    random_init: bool = False
    """Take config and tokenizer only and draw the weights from the run's seed."""
    family: Annotated[str, PathText()] | None = None
    """A model family of yours, `path/to/file.py:Class` or `package.module:Class`; that of config.json's model_type when
    null."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.path:
            raise SettingError("path", "must name a model", got="an empty string")
