"""Loss and every parameter's gradient do not depend on layout, split, packing or recomputation, and are transformers'.

Float32 on CPU ranks. tests/gpu/test_gradient_matrix_cuda.py runs the same cells on GPUs.
"""

import pathlib
from dataclasses import asdict
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.cluster.config import Device
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype
from rlframe.megatron.messages.microbatch import join
from rlframe.models import shards
from rlframe.models.hub import load_family, read_config
from rlframe.tools.plan_sync import trainer_layouts
from tests.multiprocess.megatron.gradients import cells, comparison
from tests.multiprocess.megatron.gradients.cells import Setup
from tests.multiprocess.megatron.gradients.reference import Expected

TOLERANCE = 5e-5
"""Of a tensor's greatest gradient, and of the loss. Orders of summation differ: measured are at most 5e-6."""
SEEN = 5e-2
"""A mutation moves the loss or some tensor's gradient by this much at least: a thousand times the tolerance."""
SETUPS = cells.setups()
DENSE = [Parallel.parse(layout) for layout in ("d1", "d2", "c2")]
"""Those with mutations, and one rank. test_layouts.py has dense families in t2 and p2."""
PARTS = [*(Parallel.parse(layout) for layout in ("d2", "t2", "c2", "p2", "p2v2")), Parallel(pp=2, first_stage_layers=1)]
"""Of layouts with more: each two axes on four ranks, t2p2v2, and a pipeline whose last stage is short."""
PAIRED = [Parallel.parse(layout) for layout in ("t2c2", "c2p2v2", "t2p2|ffn:p2e2", "d2t2e2")]
"""Layouts on four ranks, each two axes of which another setup on four ranks has together."""
FURTHER = {
    setup
    for setup in SETUPS
    if setup.parallel in PAIRED
    or (setup.model, str(setup.parallel)) == ("replayed", "d1t2p2")
    or (setup.model in cells.SHARED and setup.parallel not in DENSE)
    or (setup.model == "dense" and setup.parallel not in DENSE)
    or (setup.model == "moe" and setup.parallel in PARTS)
    or (setup.long and setup.parallel.world > 1)
    or (setup.dynamic and (setup.model, setup.parallel.world) != ("moe", 2))
}
"""The dense model in layouts of several kinds is here too, all of which a model with experts has, and dense layers."""


def marks(setup: Setup) -> list[pytest.MarkDecorator]:
    """Of the tests of a setup."""
    return [pytest.mark.thorough] if setup in FURTHER else []


BY_SETUP = [pytest.param(setup, id=str(setup), marks=marks(setup)) for setup in SETUPS]
CELLS = [
    pytest.param(setup, index, id=f"{setup} {cell}", marks=marks(setup))
    for setup in SETUPS
    for index, cell in enumerate(setup.cells)
]

Results = tuple[dict[str, Expected], dict[Setup, list[dict[str, Any]]], dict[str, pathlib.Path]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What transformers has, what the ranks have in the setups of the chosen tests, and the folders of the models."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    chosen = {item.callspec.params["setup"] for item in items}
    setups = [setup for setup in SETUPS if setup in chosen]
    models = {setup.model for setup in setups}
    folders = {name: tmp_path_factory.mktemp(name) for name in cells.MODELS if name in models}
    expected, measured = comparison.run(setups, folders, device=Device.CPU, dtype=Dtype.FLOAT32, worlds=[1, 2, 4])
    return expected, measured, folders


@pytest.mark.parametrize(("setup", "index"), CELLS)
def test_loss_and_gradients_are_those_of_transformers(setup: Setup, index: int, results: Results) -> None:
    expected, measured, _ = results
    cell = setup.cells[index]
    deviations = comparison.deviations(
        [rank["cells"][index] for rank in measured[setup]], expected[setup.model].losses[cell.loss, cell.aggregation]
    )
    worst = max(deviations, key=lambda name: deviations[name])
    if cell.mutation:
        assert deviations[worst] > SEEN, f"{cell.mutation} goes unseen: at most {deviations[worst]:.1e}, of {worst}"
    else:
        assert deviations[worst] < TOLERANCE, f"{worst} is off by {deviations[worst]:.1e}"


@pytest.mark.parametrize("setup", BY_SETUP)
def test_logprobs_export_and_gradient_norm_are_those_of_transformers(setup: Setup, results: Results) -> None:
    expected, ranks, folder = results[0][setup.model], results[1][setup], results[2][setup.model]
    reporting = sorted((rank for rank in ranks if rank["where"].reports), key=lambda rank: rank["where"].dp_rank)
    logprobs = join([rank["logprobs"] for rank in reporting], reporting[0]["plan"], expected.batch.lengths)
    # Others are not computed.
    wanted = expected.logprobs * expected.batch.loss_mask
    torch.testing.assert_close(logprobs, wanted, atol=1e-4, rtol=0)
    lengths = expected.batch.lengths.clone()
    lengths[1::2] = 0
    kept = join([rank["kept_logprobs"] for rank in reporting], reporting[0]["plan"], lengths)
    pieces = wanted.split(expected.batch.lengths.tolist())[::2]
    torch.testing.assert_close(kept, torch.cat(pieces), atol=1e-4, rtol=0)

    disk = load_file(folder / "model.safetensors")
    exported = comparison.assemble(ranks, "weights", {name: value.shape for name, value in disk.items()})
    assert [name for name, value in disk.items() if not torch.equal(exported[name], value)] == []

    cell = cells.EVERY_CELL[0]
    gradients = expected.losses[cell.loss, cell.aggregation].gradients
    norm = sum(float(value.square().sum()) for value in gradients.values()) ** 0.5
    assert [rank["grad_norm"] for rank in ranks] == pytest.approx([norm] * len(ranks), rel=1e-4)


@pytest.mark.parametrize("setup", BY_SETUP)
def test_what_each_rank_holds_is_known_without_starting_it(setup: Setup, results: Results) -> None:
    ranks, folder = results[1][setup], results[2][setup.model]
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    layouts = trainer_layouts(family, architecture, setup.parallel, dtype=torch.float32)
    assert [rank["where"].rank for rank in ranks] == list(range(setup.parallel.world))
    for rank, (found, layout) in enumerate(zip(ranks, layouts, strict=True)):
        foreseen = shards.shards_of_rank(architecture, rank, **asdict(setup.parallel))
        assert foreseen == found["shards"], f"rank {rank}"
        assert shards.parameters(family, architecture, foreseen) == found["shapes"], f"rank {rank}"
        assert layout == found["layout"], f"rank {rank}"
