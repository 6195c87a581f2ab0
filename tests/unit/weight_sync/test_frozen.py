"""Engines that load a model without a trainer are proved against its files."""

import pytest
import torch
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.frozen import FrozenProof
from rlframe.weight_sync.layout.memory import identity_layout
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


def test_engines_that_cannot_be_recorded_say_why() -> None:
    checkpoint = files()
    shapes = {name: tuple(value.shape) for name, value in checkpoint.items()}
    rank = destination(None, {}, tensors=shapes, refusal="keeps embed repacked")
    proof = FrozenProof(checkpoint.__getitem__, LocalDestinations([[rank]]))
    assert proof.prove() == "keeps embed repacked"
