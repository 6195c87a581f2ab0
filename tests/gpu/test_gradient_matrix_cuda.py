"""The gradient matrix on GPUs: Transformer Engine's layers, against transformers in float32 on the CPU.

Runs the setups that as many ranks as there are GPUs can hold, of 1, 2 and 4: in bfloat16 all of them, in float32 those
without context parallelism (no fused attention takes float32, and Transformer Engine has no other one for it).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.cluster.config import Device
from rlframe.megatron.config import Dtype
from tests.multiprocess import gradient_matrix
from tests.multiprocess.gradient_matrix import Expected, Setup

pytestmark = pytest.mark.gpu

WORLDS = [world for world in (1, 2, 4) if world <= torch.cuda.device_count()]


@dataclass(frozen=True)
class Tolerance:
    """How far off a right cell may be; errors are Euclidean norms over those of the reference."""

    together: float
    """All gradients as one vector."""
    tensor: float
    """The gradient of any one tensor."""
    loss: float
    """The loss, over that with every token's share made positive."""


TOLERANCES = {
    # bfloat16 has 8 bits: on a CPU the dense model is off by 0.03, a tensor by 0.06. A router that flips on a near tie
    # moves that token's share in the gradients of two experts whole, and few tokens reach an expert: 0.13 and 0.92.
    # Mutations move the whole by 0.54 and more.
    (Dtype.BFLOAT16, "dense"): Tolerance(together=0.08, tensor=0.2, loss=0.02),
    (Dtype.BFLOAT16, "moe"): Tolerance(together=0.25, tensor=1.5, loss=0.03),
    # Without TF32 (`gradient_matrix.on_rank`), orders of summation only.
    (Dtype.FLOAT32, "dense"): Tolerance(together=1e-3, tensor=1e-3, loss=1e-3),
    (Dtype.FLOAT32, "moe"): Tolerance(together=1e-3, tensor=1e-3, loss=1e-3),
}
SEEN = 1.5
"""A mutation moves all gradients together by this many tolerances at least."""


def setups(dtype: Dtype) -> list[Setup]:
    """Those that fit the GPUs and the number format."""
    fitting = [setup for setup in gradient_matrix.setups() if setup.parallel.world in WORLDS]
    return [setup for setup in fitting if dtype is Dtype.BFLOAT16 or setup.parallel.cp == 1]


CELLS = [
    pytest.param(dtype, setup, index, id=f"{dtype} {setup} {cell}")
    for dtype in (Dtype.BFLOAT16, Dtype.FLOAT32)
    for setup in setups(dtype)
    for index, cell in enumerate(setup.cells)
]


Measured = tuple[dict[str, Expected], dict[Setup, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Dtype, int], Measured | AssertionError]:
    """By number format and number of ranks, which are started when first asked for: what transformers has with weights
    rounded to the format, and what the ranks have; or why they have nothing.

    A fixture with these two as parameters would be made anew for every test (pytest 9.2).
    """

    @cache
    def of(dtype: Dtype, world: int) -> Measured | AssertionError:
        folders = {name: tmp_path_factory.mktemp(name) for name in gradient_matrix.MODELS}
        try:
            return gradient_matrix.run(setups(dtype), folders, device=Device.CUDA, dtype=dtype, worlds=[world])
        except AssertionError as error:
            return error

    return of


def norm(error: Tensor) -> float:
    """Euclidean: in bfloat16 single elements are often off by all of themselves."""
    return float(error.norm())


def deviation_together(cells: list[dict[str, Any]], gradients: dict[str, Tensor]) -> float:
    """Norm of the error of all gradients over the norm of all gradients."""
    ours = gradient_matrix.assemble(cells, "gradients", {name: value.shape for name, value in gradients.items()})
    error = sum(norm(ours[name] - value) ** 2 for name, value in gradients.items())
    return (error / sum(norm(value) ** 2 for value in gradients.values())) ** 0.5


@pytest.mark.parametrize(("dtype", "setup", "index"), CELLS)
def test_loss_and_gradients_are_those_of_transformers(
    measured: Callable[[Dtype, int], Measured | AssertionError],
    dtype: Dtype,
    setup: Setup,
    index: int,
    record_property: Callable[[str, object], None],
) -> None:
    found = measured(dtype, setup.parallel.world)
    if isinstance(found, AssertionError):
        raise found
    expected, ranks = found
    cell, tolerance = setup.cells[index], TOLERANCES[dtype, setup.model]
    reference = expected[setup.model].losses[cell.loss, cell.aggregation]
    cells = [rank["cells"][index] for rank in ranks[setup]]
    together = deviation_together(cells, reference.gradients)
    # For --junitxml: how much of each tolerance is used.
    record_property("together", together)
    if cell.mutation:
        assert together > SEEN * tolerance.together, f"{cell.mutation} goes unseen: {together:.3f}"
        return
    deviations = gradient_matrix.deviations(cells, reference, size=norm)
    worst = max(deviations, key=lambda name: deviations[name])
    record_property("loss", deviations["loss"])
    record_property("tensor", f"{deviations[worst]:.3g} {worst}")
    assert together < tolerance.together, f"all gradients together are off by {together:.3g}"
    assert deviations["loss"] < tolerance.loss, f"the loss is off by {deviations['loss']:.3g}"
    assert deviations[worst] < tolerance.tensor, f"{worst} is off by {deviations[worst]:.3g}"
