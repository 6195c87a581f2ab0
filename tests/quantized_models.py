"""Small models as the hub stores them, quantised here by formulas of one line each."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK, GROUP = 32, 32
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    },
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
                    "actorder": None, "dynamic": False,
                },
            }
        },
        "ignore": ["lm_head"],
    },
}  # fmt: skip
"""The quantization_config of each format, as the hub has it."""
QUANTIZED = {"fp8": r"_proj\.weight$", "mxfp4": r"experts\.\w+_proj$", "int4": r"\.experts\.\d"}
"""Pattern of the names of weights that are quantised."""


def fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the tensors of a weight by their suffixes, and what they stand for."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.nn.functional.pad(weight, (0, columns * BLOCK - weight.shape[1], 0, rows * BLOCK - weight.shape[0]))
    scales = padded.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3)) / 448
    each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    values = (weight / each).to(torch.float8_e4m3fn)
    return {"": values, "_scale_inv": scales}, (values.float() * each).bfloat16()


def mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """See fp8."""
    blocks = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    scaled = blocks / 2 ** exponents.unsqueeze(-1)
    indices = (scaled.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    bits = indices + 8 * (scaled < 0)
    meant = E2M1[indices] * scaled.sign() * 2 ** exponents.unsqueeze(-1)
    packed = bits[..., 0::2] + 16 * bits[..., 1::2]
    stored = {"_blocks": packed.byte(), "_scales": (exponents + 127).byte()}
    return stored, meant.flatten(-2).transpose(1, 2).bfloat16().contiguous()


def int4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """See fp8."""
    groups = weight.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 7).bfloat16()
    values = (groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7).int()
    meant = (values.bfloat16() * scales.unsqueeze(-1)).flatten(1)
    words = ((values.flatten(1).long() + 8).unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(-1)
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    return {"_packed": packed, "_scale": scales, "_shape": torch.tensor(weight.shape)}, meant


def quantize(source: Path, form: str, *, plain: Path, quantized: Path) -> None:
    """Writes the model of `source` to two folders: quantised, with values and scales in different files, and in
    bfloat16 as what its tensors stand for."""
    values: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not re.search(QUANTIZED[form], name):
            values[name] = meant[name] = weight.bfloat16()
            continue
        parts, meant[name] = {"fp8": fp8, "mxfp4": mxfp4, "int4": int4}[form](weight.float())
        first, *rest = parts
        values[name + first] = parts[first]
        scales |= {name + suffix: parts[suffix] for suffix in rest}
    for folder in (plain, quantized):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    hf = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    (plain / "config.json").write_text(json.dumps(hf))
    (quantized / "config.json").write_text(json.dumps(hf | {"quantization_config": CONFIGS[form]}))
    save_file(meant, plain / "model.safetensors")
    files = {"model-00001-of-00002.safetensors": values, "model-00002-of-00002.safetensors": scales}
    for file, tensors in files.items():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, quantized / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
