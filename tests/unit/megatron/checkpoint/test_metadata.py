"""Reading a checkpoint's `.metadata` runs nothing that it names, whatever that is."""

import collections
import io
import pathlib
import pickle
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rlframe.megatron.checkpoint.files import seal, write
from rlframe.megatron.checkpoint.metadata import METADATA, read_metadata, require_plain
from rlframe.utils.errors import CheckpointError
from tests.unit.megatron.checkpoint.test_files import staged, tensors


class Planted:
    """Unpickled by an ordinary unpickler it writes a file, by calling what it is told to call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder that torch's own writer has written `.metadata` to."""
    job = staged(tmp_path, tensors())
    seal(
        job,
        [
            write(
                job,
            )
        ],
    )
    return tmp_path


def test_it_says_what_torchs_own_reader_says(saved: pathlib.Path) -> None:
    ours, theirs = read_metadata(saved), FileSystemReader(saved).read_metadata()
    assert ours.storage_data.keys() == theirs.storage_data.keys() and len(ours.storage_data) == 3
    for index, place in ours.storage_data.items():
        assert asdict(place) == asdict(theirs.storage_data[index]), "of each field that torch's reader looks at"
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for name, mine in ours.state_dict_metadata.items():
        other = theirs.state_dict_metadata[name]
        assert isinstance(mine, TensorStorageMetadata) and isinstance(other, TensorStorageMetadata)
        assert (mine.size, mine.chunks, mine.properties.dtype) == (other.size, other.chunks, other.properties.dtype)


def planted(mark: pathlib.Path) -> dict[str, Any]:
    """Ways to have a call made while a pickle is read, each of which leaves the file `mark`."""
    touch = Planted(pathlib.Path.touch, mark)
    good = Metadata(state_dict_metadata={}, storage_data={})
    inside = Metadata(state_dict_metadata={"x": touch}, storage_data={})
    beside = Metadata(state_dict_metadata={}, storage_data={}, planner_data=[touch])
    system = Planted(__import__("os").system, f"touch {mark}")
    return {
        "whole": touch,
        "os.system": system,
        "eval": Planted(eval, f"open({str(mark)!r}, 'w')"),
        "getattr": Planted(getattr, good, "state_dict_metadata"),
        "a field": inside,
        "a field that is not used": beside,
        "a key": {Planted(print): 1},
        "torch.load": Planted(torch.load, io.BytesIO(pickle.dumps(touch))),
        "a class of torch's": torch.nn.Linear(1, 1),
        "functools.partial": Planted(__import__("functools").partial, print),
        "a module": Planted(__import__, "antigravity"),
    }


def test_a_planted_pickle_runs_nothing_and_is_named(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(Planted(pathlib.Path.touch, mark)))
    assert mark.exists(), "the trap works"
    mark.unlink()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        for name, value in planted(mark).items():
            (saved / METADATA).write_bytes(pickle.dumps(value, protocol))
            with pytest.raises(CheckpointError, match="which no such file needs and which could run code") as caught:
                read_metadata(saved)
            assert str(saved / METADATA) in str(caught.value), name
            assert not mark.exists(), name


def test_nothing_that_a_file_does_to_the_names_it_knows_outlives_it(saved: pathlib.Path) -> None:
    # BUILD with a pair sets attributes, also on a class that was asked for by name.
    for name in (b"torch.distributed.checkpoint.metadata\nMetadata", b"torch\nSize", b"collections\nOrderedDict"):
        attack = b"c" + name + b"\n(N(dVplanted\nI1\nsttb."
        (saved / METADATA).write_bytes(attack)
        with pytest.raises(CheckpointError):
            read_metadata(saved)
    assert not any(hasattr(each, "planted") for each in (Metadata, torch.Size, collections.OrderedDict))


def test_garbage_is_a_sentence(saved: pathlib.Path) -> None:
    content = (saved / METADATA).read_bytes()
    for position in range(0, len(content), 7):
        for damaged in (content[:position], content[:position] + b"\xff" + content[position + 1 :]):
            (saved / METADATA).write_bytes(damaged)
            try:
                read_metadata(saved)
            except CheckpointError as error:
                assert METADATA in str(error)
    (saved / METADATA).unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: No such file"):
        read_metadata(saved)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", ""])
def test_no_file_outside_the_folder_is_read(saved: pathlib.Path, name: str) -> None:
    metadata = FileSystemReader(saved).read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = name
    (saved / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is not in the checkpoint's folder"):
        read_metadata(saved)


def test_wrong_types_are_refused(saved: pathlib.Path) -> None:
    changes: list[dict[str, Any]] = [{"state_dict_metadata": [1]}, {"state_dict_metadata": {1: 2}}]
    for change in [*changes, {"storage_data": {"x": 1}}, {"storage_data": None}]:
        metadata = FileSystemReader(saved).read_metadata()
        metadata.__dict__.update(change)
        (saved / METADATA).write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match="is not the metadata of a distributed checkpoint"):
            read_metadata(saved)
    (saved / METADATA).write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match="where a Metadata belongs"):
        read_metadata(saved)


def test_fp8_states_hold_tensors_and_recipes_only(tmp_path: pathlib.Path) -> None:
    state = {"scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(4, 3), "extra_fp8_variables": {"num_gemms": 1}}
    require_plain(pickle.dumps(state), name="decoder._extra_state")
    mark = tmp_path / "ran"
    inner = io.BytesIO()
    torch.save(Planted(pathlib.Path.touch, mark), inner)
    for planted_state in (
        state | {"recipe": Planted(pathlib.Path.touch, mark)},
        state | {"scale_fwd": Planted(torch.storage._load_from_bytes, inner.getvalue())},
    ):
        with pytest.raises(CheckpointError, match="decoder._extra_state is not one of Transformer Engine's"):
            require_plain(pickle.dumps(planted_state), name="decoder._extra_state")
        assert not mark.exists()
