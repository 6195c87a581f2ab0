"""Pieces of tensors are read as they are asked for, however they were written; what is not there is a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.api import CheckpointException

from rlframe.megatron.checkpoint.files import seal, write
from rlframe.megatron.checkpoint.pieces import LoadPieces, SavePieces
from rlframe.megatron.checkpoint.reading import Reader
from rlframe.megatron.checkpoint.staging import Staged
from rlframe.utils.errors import CheckpointError

WHOLE = torch.arange(24.0).view(4, 6)


def piece(
    key: str, values: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...], **more: Any
) -> ShardedTensor:
    """Returns `values` as the part at `offset` of a tensor of `shape`."""
    axes = len(shape) - values.dim()
    return ShardedTensor(
        key=key,
        data=values,
        dtype=values.dtype,
        local_shape=tuple(values.shape),
        global_shape=shape,
        global_offset=offset,
        axis_fragmentations=None,
        prepend_axis_num=axes,
        **more,
    )


def written(folder: Path) -> list[ShardedTensor | ShardedObject]:
    """Returns what `saved` writes: a matrix in two pieces, one layer of two, and an object."""
    layers = [piece("layers", torch.tensor([1.0, 2.0]) + 10 * layer, (layer, 0), (2, 2)) for layer in range(2)]
    rows = [piece("matrix", WHOLE[start:end], (start, 0), (4, 6)) for start, end in ((0, 1), (1, 4))]
    return [*rows, *layers, ShardedObject("state/object", {"scale": torch.ones(2)}, (1,), (0,))]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Returns the folder of a checkpoint."""
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    write_pieces(tmp_path, written(tmp_path))
    return tmp_path


def write_pieces(folder: Path, pieces: list[Any]) -> None:
    """Writes `pieces` as the only rank would."""
    planner = SavePieces(pieces)
    planner.set_up_planner({}, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    items = [(item, planner.resolve_data(item)) for item in plan.items]
    job = Staged(folder=folder, rank=0, items=items, metadata=metadata)
    seal(
        job,
        [
            write(
                job,
            )
        ],
    )


def read(folder: Path, *pieces: Any) -> LoadPieces:
    """Reads into `pieces`."""
    planner = LoadPieces(pieces)
    dcp.load({}, storage_reader=Reader(folder), planner=planner, no_dist=True)
    return planner


def failure(folder: Path, *pieces: Any) -> Exception:
    """Returns what reading into `pieces` raises."""
    with pytest.raises(CheckpointException) as caught:
        read(folder, *pieces)
    ((cause, _),) = caught.value.failures.values()
    assert isinstance(cause, Exception)
    return cause


def test_rows_are_read_as_columns_and_from_within_a_larger_tensor(saved: Path) -> None:
    left, room = torch.zeros(4, 2), torch.full((6, 8), -1.0)
    read(saved, piece("matrix", left, (0, 0), (4, 6)), piece("matrix", room[1:3, 2:5], (2, 1), (4, 6)))
    assert torch.equal(left, WHOLE[:, :2])
    assert torch.equal(room[1:3, 2:5], WHOLE[2:, 1:4])
    assert float(room.sum()) == float(WHOLE[2:, 1:4].sum()) - (48 - 6), "nothing else was touched"


def test_two_readers_of_one_place_both_get_it(saved: Path) -> None:
    one, other = torch.zeros(4, 6), torch.zeros(4, 6)
    read(saved, piece("matrix", one, (0, 0), (4, 6)), piece("matrix", other, (0, 0), (4, 6)))
    assert torch.equal(one, WHOLE) and torch.equal(other, WHOLE)


def test_axes_before_a_piece_come_and_go(saved: Path) -> None:
    second, both = torch.zeros(2), torch.zeros(2, 2)
    read(saved, piece("layers", second, (1, 0), (2, 2)), piece("layers", both, (0, 0), (2, 2)))
    assert second.tolist() == [11.0, 12.0] and both.tolist() == [[1.0, 2.0], [11.0, 12.0]]


def test_objects_are_plain_values(saved: Path) -> None:
    wanted = ShardedObject("state/object", None, (1,), (0,))
    loaded = read(saved, wanted).loaded
    assert loaded.keys() == {wanted.unique_key} and torch.equal(loaded[wanted.unique_key]["scale"], torch.ones(2))


def test_an_object_that_would_run_code_is_refused(saved: Path) -> None:
    mark = saved / "ran"

    class Planted:
        def __reduce__(self) -> Any:
            return Path.touch, (mark,)

    planted = ShardedObject("state/object", Planted(), (1,), (0,))
    write_pieces(saved, [planted])
    cause = failure(saved, planted)
    assert isinstance(cause, CheckpointError) and "is not plain values" in str(cause) and not mark.exists()


def test_padding_of_another_layout_is_zero(saved: Path) -> None:
    longer = torch.full((6, 6), 7.0)
    read(saved, piece("matrix", longer, (0, 0), (6, 6), allow_shape_mismatch=True))
    assert torch.equal(longer[:4], WHOLE) and not longer[4:].any()


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (piece("nothing", torch.zeros(1), (0,), (1,)), "it has no nothing"),
        (piece("matrix", torch.zeros(4, 5), (0, 0), (4, 5)), r"matrix has the shape (4, 6) there and (4, 5) here"),
        (piece("part", torch.zeros(4), (0,), (4,)), "of part it has 3 of the 4 values at (0,)"),
        (piece("state/object/shard_0_1", torch.zeros(1), (0,), (1,)), "is an object there and a tensor here"),
        (ShardedObject("state/nothing", None, (1,), (0,)), "it has no state/nothing"),
    ],
)
def test_what_is_not_there_is_a_sentence(saved: Path, wanted: Any, sentence: str) -> None:
    write_pieces(saved, [*written(saved), piece("part", torch.ones(3), (0,), (4,))])
    cause = failure(saved, wanted)
    assert isinstance(cause, CheckpointingException) and sentence in str(cause)
