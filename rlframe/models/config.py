"""Settings of the model a run starts from. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from rlframe.utils.bounds import PathText, check_bounds
from rlframe.utils.errors import SettingError

HEAD = "score.weight"
"""Name in a checkpoint of the layer that outputs C numbers per token, as in transformers' models for sequence
classification."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The model that is trained, and with which engines generate."""

    path: Annotated[str, PathText()] = "qwen3_moe_tiny"
    """Name of an embedded model, a local folder in Hugging Face format, or a hub id such as Qwen/Qwen3-0.6B."""
    revision: str | None = None
    """Branch, tag or commit of a hub id. null means the hub's default."""
    trust_remote_code: bool = False
    """Whether Python files of the model's folder may run, for a tokenizer or a configuration that transformers does not
    have. They have the rights of the run, on every node. A hub id then needs a commit as its revision."""
    random_init: bool = False
    """Whether to take only config and tokenizer and to draw the weights from the run's seed."""
    float32_logits: bool = False
    """Whether the output layer's logits stay in float32, in training and in engines, from states and weights in
    bfloat16: they are not rounded to bfloat16 before the softmax. In training they take two to three times the
    memory."""
    family: Annotated[str, PathText()] | None = None
    """Model family from outside the package, `path/to/file.py:Class` or `package.module:Class`. null means the family
    of config.json's model_type."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.path:
            raise SettingError("path", "must name a model", got="an empty string")
