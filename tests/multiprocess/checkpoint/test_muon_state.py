"""A state of Muon, with a step that was skipped, goes on in the same layout bit by bit, in another exactly as it was
saved."""

import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.parallel import Parallel
from tests.multiprocess.checkpoint.test_training_state import losses, visit, whole
from tests.multiprocess.distributed import run_distributed
from tests.tiny_models import make

CASES = [
    ("qwen3_moe", "float32", "d2e2", ["d2e2", "d1t2"], 3.75),
    *(pytest.param(*case, marks=pytest.mark.thorough) for case in [
        ("qwen3_moe", "bfloat16", "d2", ["d2", "d1p2"], 3.75),
        ("deepseek_v3", "float32", "d1t2", ["d1t2", "d2", "d1"], 5.0),
        ("gpt_oss", "bfloat16", "d2e2", ["d2e2", "d1"], 4.85),
    ]),
]  # fmt: skip
"""(model, dtype, layout of the save, layouts that go on, norm above which steps are skipped)"""


def on_rank(
    rank: int, init_method: str, folder: pathlib.Path, case: tuple[str, str, str], layouts: list[str], bound: float
) -> list:
    """What this rank saw in each layout; None where a layout has fewer ranks."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    platform.install(platform.resolve(Device.CPU))
    optimizer = OptimizerConfig(name="muon", lr=2e-3, weight_decay=0.1, skip_norm_above=bound, skip_outlier_factor=8.0)
    return [
        visit(rank, f"{init_method}-{index}", folder, case, layout, index == 0, optimizer)
        if rank < Parallel.parse(layout).world
        else None
        for index, layout in enumerate(layouts)
    ]


@pytest.mark.parametrize(("model", "dtype", "source", "targets", "bound"), CASES)
def test_a_state_of_muon_goes_on(
    tmp_path: pathlib.Path, model: str, dtype: str, source: str, targets: list[str], bound: float
) -> None:
    make(model, tmp_path / model)
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / model / "model.safetensors").items()}
    ranks = run_distributed(on_rank, 2, tmp_path, (model, dtype, source), [source, *targets], bound)
    before, *others = [[rank[index] for rank in ranks if rank[index]] for index in range(len(targets) + 1)]
    saved = states(before, shapes)
    assert not set(saved["momentum_buffer"]) & set(saved["exp_avg"])
    norms = [step["train/grad_norm"].value for step in before[0]["earlier"]]
    assert {norm > bound for norm in norms} == {True, False}, "some of the steps before the save are skipped"
    num_skipped = {rank["losses"][-1]["train/skipped_steps"].value for rank in before}
    assert min(num_skipped) >= sum(norm > bound for norm in norms)
    assert all(tensor.any() for tensors in saved.values() for tensor in tensors.values())
    for layout, after in zip(targets, others, strict=True):
        for kind, tensors in states(after, shapes).items():
            assert [name for name in saved[kind] if not torch.equal(tensors[name], saved[kind][name])] == [], kind
        tolerance = 0.0 if layout == source else {"float32": 1e-4, "bfloat16": 1e-2}[dtype]
        assert losses(after) == pytest.approx(losses(before), rel=tolerance, abs=0), layout
        assert {rank["losses"][-1]["train/skipped_steps"].value for rank in after} == num_skipped
        if layout == source:
            ended, again = (whole([rank["trained"] for rank in part], shapes) for part in (before, after))
            assert [name for name in shapes if not torch.equal(ended[name], again[name])] == []


def states(ranks: list[dict[str, Any]], shapes: dict[str, torch.Size]) -> dict[str, dict[str, torch.Tensor]]:
    """Weights, main weights, moments and momentum, each of the tensors that have it."""
    found = {}
    for kind in ranks[0]["state"]:
        held = [{name: pieces for name, pieces in rank["state"][kind].items() if pieces} for rank in ranks]
        found[kind] = whole(held, {name: shapes[name] for own in held for name in own})
    return found
