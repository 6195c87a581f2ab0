"""Reads which number format config.json states, and removes the statement."""

from collections.abc import Mapping
from typing import Any

import torch

from rlframe.models.quantized.base import Quantization
from rlframe.models.quantized.fp8 import Fp8
from rlframe.models.quantized.int4 import PER_WORD, Int4
from rlframe.models.quantized.mxfp4 import Mxfp4

KEY = "quantization_config"
READ = "fp8 (weight_block_size), mxfp4 and compressed-tensors (pack-quantized with 4 bits in symmetric groups)"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def section(hf: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the quantization_config of config.json, or that of its text model. None if the weights are plain."""
    return hf.get(KEY) or (hf.get("text_config") or {}).get(KEY) or None


def quantization(hf: Mapping[str, Any]) -> Quantization | None:
    """Returns the number format of a checkpoint's weights. None if they are plain, or if `faults` has one."""
    stated = section(hf)
    if stated is None or faults(hf):
        return None
    match stated["quant_method"]:
        case "fp8":
            block = stated.get("weight_block_size")
            return Fp8(tuple(block) if block else None)
        case "mxfp4":
            return Mxfp4()
        case _:
            return Int4(_weights(stated)[0]["group_size"])


def dtype(hf: Mapping[str, Any]) -> torch.dtype:
    """Returns the number format in which config.json says that the model computes; dequantised weights have it."""
    return DTYPES[_dtype(hf)]


def faults(hf: Mapping[str, Any]) -> list[str]:
    """Returns a clause for every reason why the weights cannot be dequantised."""
    stated = section(hf)
    if stated is None:
        return []
    if not isinstance(stated, dict):
        return [f"{KEY} must be a section of named values, got {stated!r:.60}"]
    if _dtype(hf) not in DTYPES:
        return [f"dtype must be one of {', '.join(DTYPES)}, got {_dtype(hf)!r:.60}"]
    match stated.get("quant_method"):
        case "fp8":
            return _of_fp8(stated)
        case "mxfp4":
            return []
        case "compressed-tensors":
            return _of_packed(stated)
    return [f"{KEY}.quant_method must be one of {READ}, got {stated.get('quant_method')!r:.60}: {_WAY_OUT}"]


def without(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json without the statement."""
    kept = {key: value for key, value in hf.items() if key != KEY}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = {key: value for key, value in kept["text_config"].items() if key != KEY}
    return kept


_WAY_OUT = "use a checkpoint of it in bfloat16"


def _dtype(hf: Mapping[str, Any]) -> Any:
    inner = hf.get("text_config") or {}
    return next((each[key] for each in (hf, inner) for key in ("dtype", "torch_dtype") if each.get(key)), "bfloat16")


def _of_fp8(stated: Mapping[str, Any]) -> list[str]:
    found, block = [], stated.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        found.append(f"{KEY}.weight_block_size must be two whole numbers above 0, got {block!r:.60}")
    if (stated.get("fmt") or "e4m3") != "e4m3":
        found.append(f"{KEY}.fmt must be e4m3, got {stated['fmt']!r:.60}")
    return found


def _weights(stated: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rules for weights of the groups of layers that compressed-tensors has packed."""
    groups = stated.get("config_groups")
    found = (
        [each.get("weights") for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    )
    return [each for each in found if isinstance(each, dict)]


def _of_packed(stated: Mapping[str, Any]) -> list[str]:
    if stated.get("format") != "pack-quantized":
        return [f"{KEY}.format must be pack-quantized, got {stated.get('format')!r:.60}: {_WAY_OUT}"]
    rules = _weights(stated)
    needed = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    found = [
        f"{KEY}.config_groups: weights.{key} must be {value}, got {rule.get(key)!r:.60}: {_WAY_OUT}"
        for rule in rules
        for key, value in needed.items()
        if rule.get(key) != value
    ]
    found += [
        f"{KEY}.config_groups: weights.actorder must be null, got {rule['actorder']!r:.60}: {_WAY_OUT}"
        for rule in rules
        if rule.get("actorder")
    ]
    sizes = {str(rule.get("group_size")): rule.get("group_size") for rule in rules}
    size = next(iter(sizes.values()), None)
    if len(sizes) != 1 or type(size) is not int or size <= 0 or size % PER_WORD:
        got = ", ".join(sizes) or None
        found.append(f"{KEY}.config_groups: weights.group_size must be one multiple of {PER_WORD}, got {got}")
    return found
