"""The gradient matrix on GPUs: Transformer Engine's layers, against transformers in float32 on the CPU.

Runs the setups that as many ranks as there are GPUs can hold, of 1, 2 and 4: in bfloat16 all of them, in float32 those
without context parallelism and shared prompts (no fused attention takes float32, and Transformer Engine's other one
knows neither).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.cluster.config import Device
from rlframe.megatron.config.train import Dtype
from tests.multiprocess.megatron.gradients import cells, comparison
from tests.multiprocess.megatron.gradients.cells import SHARED, Setup
from tests.multiprocess.megatron.gradients.reference import Expected

pytestmark = pytest.mark.gpu

WORLDS = [world for world in (1, 2, 4) if world <= torch.cuda.device_count()]


@dataclass(frozen=True)
class Tolerance:
    """How far off a right cell may be; errors are Euclidean norms over those of the reference."""

    together: float
    """All gradients as one vector."""
    tensor: float
    """The gradient of any one tensor, see PART_OF."""
    loss: float
    """The loss, over that with every token's share made positive."""


TOLERANCES = {
    # bfloat16 has 8 bits: on a CPU the dense model is off by 0.03, a tensor by 0.06. A router that flips on a near tie
    # moves that token's share in the gradients of two experts whole: 0.13, and 0.33 of a router's own, 0.38 on H200s.
    # Mutations move the whole by 0.5 and more.
    (Dtype.BFLOAT16, "dense"): Tolerance(together=0.08, tensor=0.2, loss=0.02),
    (Dtype.BFLOAT16, "moe"): Tolerance(together=0.25, tensor=0.5, loss=0.03),
    # Its routers cannot flip.
    (Dtype.BFLOAT16, "replayed"): Tolerance(together=0.08, tensor=0.2, loss=0.02),
    # Without TF32 (`gradients.ranks.on_rank`), orders of summation only: on H200s at most 5e-6. TF32 would be 3e-4.
    (Dtype.FLOAT32, "dense"): Tolerance(together=5e-5, tensor=5e-5, loss=5e-5),
    (Dtype.FLOAT32, "moe"): Tolerance(together=5e-5, tensor=5e-5, loss=5e-5),
    (Dtype.FLOAT32, "replayed"): Tolerance(together=5e-5, tensor=5e-5, loss=5e-5),
}
TOLERANCES |= {
    (Dtype.BFLOAT16, f"shared{name}"): TOLERANCES[Dtype.BFLOAT16, kind]
    for name, kind in (("", "dense"), ("_moe", "moe"))
}
SEEN = 1.5
"""A mutation moves all gradients together by this many tolerances at least."""


def setups(dtype: Dtype) -> list[Setup]:
    """Those that fit the GPUs and the number format."""
    fitting = [setup for setup in cells.setups() if setup.parallel.world in WORLDS]
    exact = [setup for setup in fitting if setup.parallel.cp == 1 and setup.model not in SHARED]
    return fitting if dtype is Dtype.BFLOAT16 else exact


CELLS = [
    pytest.param(dtype, setup, index, id=f"{dtype} {setup} {cell}")
    for dtype in (Dtype.BFLOAT16, Dtype.FLOAT32)
    for setup in setups(dtype)
    for index, cell in enumerate(setup.cells)
]


Measured = tuple[dict[str, Expected], dict[Setup, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Dtype, int], Measured | AssertionError]:
    """By number format and number of ranks, which are started when first asked for: what transformers has with weights
    rounded to the format, and what the ranks have in the setups of the selected tests; or why they have nothing.

    A fixture with these two as parameters would be made anew for every test (pytest 9.2).
    """
    given = [item.callspec.params for item in request.session.items if item.path == request.path]
    selected = {(each["dtype"], each["setup"]) for each in given}

    @cache
    def of(dtype: Dtype, world: int) -> Measured | AssertionError:
        chosen = [setup for setup in setups(dtype) if (dtype, setup) in selected]
        folders = {name: tmp_path_factory.mktemp(name) for name in sorted({setup.model for setup in chosen})}
        try:
            return comparison.run(chosen, folders, device=Device.CUDA, dtype=dtype, worlds=[world])
        except AssertionError as error:
            return error

    return of


def norm(error: Tensor) -> float:
    """Euclidean: in bfloat16 single elements are often off by all of themselves."""
    return float(error.norm())


def whole(_: str) -> str:
    """All gradients as one vector."""
    return "all"


def layers_experts(name: str) -> str:
    """An expert's tensor goes with those of the layer's other experts: of the eight, one is reached by three tokens
    only, and the gradient of one that flips to it or away is as large as its own."""
    return re.sub(r"experts\.\d+", "experts.*", name)


PART_OF = {Dtype.BFLOAT16: layers_experts, Dtype.FLOAT32: str}
"""What is measured as one tensor."""


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
    measured = [rank["cells"][index] for rank in ranks[setup]]
    together = comparison.deviations(measured, reference, size=norm, part_of=whole)["all"]
    # For --junitxml: how much of each tolerance is used.
    record_property("together", together)
    if cell.mutation:
        assert together > SEEN * tolerance.together, f"{cell.mutation} goes unseen: {together:.3f}"
        return
    deviations = comparison.deviations(measured, reference, size=norm, part_of=PART_OF[dtype])
    worst = max(deviations, key=lambda name: deviations[name])
    record_property("loss", deviations["loss"])
    record_property("tensor", f"{deviations[worst]:.3g} {worst}")
    assert together < tolerance.together, f"all gradients together are off by {together:.3g}"
    assert deviations["loss"] < tolerance.loss, f"the loss is off by {deviations['loss']:.3g}"
    assert deviations[worst] < tolerance.tensor, f"{worst} is off by {deviations[worst]:.3g}"
