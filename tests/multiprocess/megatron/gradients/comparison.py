"""Every number of ranks is started once and measures all its setups; how far off each cell is."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlframe.cluster.config import Device
from rlframe.megatron.config.train import Dtype
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.gradients.cells import Setup
from tests.multiprocess.megatron.gradients.ranks import on_rank
from tests.multiprocess.megatron.gradients.reference import Expected, Reference, expectation

LIMITS_S = {Device.CPU: 240.0, Device.CUDA: 540.0}
"""For all setups of a number of ranks."""


def run(
    setups: list[Setup], folders: dict[str, pathlib.Path], *, device: Device, dtype: Dtype, worlds: list[int]
) -> tuple[dict[str, Expected], dict[Setup, list[dict[str, Any]]]]:
    """What transformers has for each model, and what the ranks of each setup have to show."""
    expected = {name: expectation(name, folder, getattr(torch, dtype), device) for name, folder in folders.items()}
    paths = {name: str(folder) for name, folder in folders.items()}
    batches = {name: each.batch for name, each in expected.items()}
    measured = {}
    for world in worlds:
        chosen = [setup for setup in setups if setup.parallel.world == world]
        # Each shape's kernels are looked for once on a GPU.
        ranks = run_distributed(on_rank, world, chosen, paths, batches, device, dtype, timeout_s=LIMITS_S[device])
        measured |= {setup: [rank[index] for rank in ranks] for index, setup in enumerate(chosen)}
    return expected, measured


def assemble(results: list[dict[str, Any]], key: str, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks, every element covered."""
    whole = {}
    for name, shape in shapes.items():
        tensor = torch.full(shape, torch.nan)
        matrix = tensor.view(-1, shape[-1])
        for result in results:
            for (row, rows, col, cols), values in result[key].get(name, ()):
                matrix[row : row + rows, col : col + cols] = values
        assert not tensor.isnan().any(), f"{name} is not covered"
        whole[name] = tensor
    return whole


def greatest(error: Tensor) -> float:
    """The greatest element, whatever its sign."""
    return float(error.abs().max())


def deviations(
    results: list[dict[str, Any]],
    reference: Reference,
    size: Callable[[Tensor], float] = greatest,
    part_of: Callable[[str], str] = str,
) -> dict[str, float]:
    """How far the loss and each tensor's gradient are off, by name: the size of the error over that of the reference.

    Errors of the loss are measured by its `scale`. A tensor whose gradient is less than a thousandth of the greatest
    one's (an expert that few tokens reach has hardly any) is measured by that thousandth. Tensors for which `part_of`
    has the same name are measured as one.
    """
    gradients = reference.gradients
    summed = assemble(results, "gradients", {name: value.shape for name, value in gradients.items()})
    parts: dict[str, list[str]] = {}
    for name in gradients:
        parts.setdefault(part_of(name), []).append(name)
    wanted, errors = {}, {}
    for part, names in parts.items():
        wanted[part] = torch.cat([gradients[name].flatten() for name in names])
        errors[part] = torch.cat([summed[name].flatten() for name in names]) - wanted[part]
    floor = 1e-3 * max(size(value) for value in wanted.values())
    found = {part: size(error) / max(size(wanted[part]), floor) for part, error in errors.items()}
    return found | {"loss": abs(sum(result["loss"] for result in results) - reference.loss) / reference.scale}
