"""Engines of quantised checkpoints. They hold what the weights stand for, in the trainer's dtype, because their own
number format would not take what training makes of the weights."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlframe.models.checkpoint import CheckpointReader
from rlframe.models.hub import load_family, read_config
from rlframe.models.quantized import stated


def is_quantized(folder: Path) -> bool:
    """Returns whether the checkpoint in `folder` stores weights as values and scales."""
    return stated.section(read_config(folder)) is not None


def dequantized_weights(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors of a quantised checkpoint as what they stand for, one by one."""
    reader = CheckpointReader(folder)
    for name in names:
        yield name, reader.tensor(name)


def dequantized_model(folder: Path, **options: Any) -> Any:
    """Returns transformers' model of a quantised checkpoint, which is in memory twice for a moment.

    Args:
        options: of `from_pretrained`, such as `dtype`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig  # noqa: PLC0415 - takes seconds

    hf = plain_config(AutoConfig.from_pretrained(folder, trust_remote_code=False), overrides={})
    family = load_family(folder)
    names = family.tensors(family.architecture(read_config(folder)))
    weights = dict(dequantized_weights(folder, names))
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)]
    return model.from_pretrained(None, config=hf, state_dict=weights, **options)


def plain_config(hf: Any, *, overrides: Mapping[str, Any]) -> Any:
    """Returns transformers' configuration of a model with plain weights. The attribute itself goes: some models of vLLM
    look whether it is there.

    Args:
        overrides: values that the user gives besides, sections of an inner configuration among them.
    """
    for each in (hf, getattr(hf, "text_config", None)):
        if hasattr(each, stated.KEY):
            delattr(each, stated.KEY)
    for key, value in overrides.items():
        inner = getattr(hf, key, None)
        if isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            inner.update(value)
        else:
            hf.update({key: value})
    return hf


def overrides_of(folder: Path) -> dict[str, Any]:
    """Returns the values of config.json that must change for a model with plain weights. Empty if they are plain."""
    hf, null = read_config(folder), {stated.KEY: None}
    found: dict[str, Any] = null if hf.get(stated.KEY) else {}
    return found | ({"text_config": null} if (hf.get("text_config") or {}).get(stated.KEY) else {})
