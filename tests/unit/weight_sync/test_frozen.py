"""Engines that load a model without a trainer are proved against its files."""

import pytest
import torch
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.frozen import FrozenProof
from rlframe.weight_sync.layout.memory import identity_layout, record
from tests.unit.weight_sync.groups import LocalDestinations, destination

NORM = "model.norm.weight"


def files() -> dict[str, Tensor]:
    """The tensors of a checkpoint in bfloat16."""
    torch.manual_seed(0)
    return {name: torch.randn(shape).bfloat16() for name, shape in {"embed": (12, 8), NORM: (8,)}.items()}


def engines(*held: dict[str, Tensor]) -> LocalDestinations:
    """An engine for each, which computes in float32."""
    return LocalDestinations([[destination(identity_layout(each), each)] for each in held])


def test_engines_that_hold_the_files_in_their_own_number_format_are_proved() -> None:
    checkpoint = files()
    loaded = [{name: value.float() for name, value in checkpoint.items()} for _ in range(2)]
    proof = FrozenProof(checkpoint.__getitem__, engines(*loaded), num_threads=2)
    assert proof.prove() is None
    assert proof.prove([1]) is None


@pytest.mark.parametrize("later", [False, True])
def test_an_engine_that_holds_something_else_is_named_with_the_tensor(later: bool) -> None:
    checkpoint = files()
    loaded = [{name: value.float() for name, value in checkpoint.items()} for _ in range(2)]
    proof = FrozenProof(checkpoint.__getitem__, engines(*loaded))
    if later:
        assert proof.prove() is None
    loaded[1][NORM].view(torch.int32)[3] ^= 1
    with pytest.raises(WeightSyncFailed, match=f"engine 1 does not hold the checkpoint .*: {NORM} differs, 1 tensors"):
        proof.prove()
    assert proof.prove([0]) is None


def test_ranks_of_an_engine_hold_other_tensors_in_other_number_formats() -> None:
    # As with expert parallelism: each rank has an expert of its own in FP8, and both have the rest.
    shared, fp8 = files(), torch.float8_e4m3fn
    checkpoint = shared | {f"experts.{rank}": torch.randn(8, 8).to(fp8) for rank in range(2)}
    shapes = {name: tuple(value.shape) for name, value in checkpoint.items()}
    ranks = []
    for rank in range(2):
        held = {name: checkpoint[name].clone() for name in (*shared, f"experts.{rank}")}
        layout = record(lambda p, c: [p[name].copy_(c[name]) for name in p], held, shapes)  # type: ignore[arg-type]
        ranks.append(destination(layout, held, dtype=torch.bfloat16))
    assert FrozenProof(checkpoint.__getitem__, LocalDestinations([ranks])).prove() is None


def test_engines_that_cannot_be_recorded_say_why() -> None:
    checkpoint = files()
    shapes = {name: tuple(value.shape) for name, value in checkpoint.items()}
    rank = destination(None, {}, tensors=shapes, refusal="keeps embed repacked")
    proof = FrozenProof(checkpoint.__getitem__, LocalDestinations([[rank]]))
    assert proof.prove() == "keeps embed repacked"
