"""What is written is read back and compared, and damage is named with file and tensor."""

import os
import re
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from rlframe.megatron.checkpoint import writer
from rlframe.megatron.checkpoint.checksums import CHECKSUMS, read_entries, verify_share
from rlframe.megatron.checkpoint.files import seal, write
from rlframe.megatron.checkpoint.staging import HostMemory, Staged
from rlframe.utils.errors import CheckpointError, OutputError
from rlframe.utils.files.sealed import read_sealed, write_sealed

DATA = "__0_0.distcp"


def tensors() -> dict[str, torch.Tensor]:
    """A matrix, a view of the middle of another, and a scalar in bfloat16."""
    table = torch.arange(48.0).view(6, 8)
    return {"first": torch.arange(12.0).view(3, 4), "second": table[2:4], "third": torch.tensor(1.5).bfloat16()}


def staged(folder: Path, state: dict[str, torch.Tensor]) -> Staged:
    """`state` as the only rank would write it."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    items = [(item, planner.resolve_data(item)) for item in plan.items]
    return Staged(folder=folder, rank=0, items=items, metadata=metadata)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The `training` folder of a checkpoint, complete, with a small file of Megatron's beside the data."""
    folder = tmp_path / "step-00000007" / "training"
    folder.mkdir(parents=True)
    (folder / "common.pt").write_bytes(b"common")
    job = staged(folder, tensors())
    seal(
        job,
        [
            write(
                job,
            )
        ],
    )
    return folder


def test_torch_reads_what_was_written(saved: Path) -> None:
    empty = {name: torch.empty_like(value) for name, value in tensors().items()}
    dcp.load(empty, storage_reader=dcp.FileSystemReader(saved), no_dist=True)
    assert all(torch.equal(empty[name], value) for name, value in tensors().items())
    # A view is written as itself, not with all the memory that it is part of.
    assert all(entry.length < 2000 for entry in read_entries(saved))


def test_every_byte_of_every_file_has_a_checksum(saved: Path) -> None:
    entries = read_entries(saved)
    files = {path.name for path in saved.iterdir()} - {CHECKSUMS}
    assert {entry.file for entry in entries} == files == {DATA, "common.pt", ".metadata"}
    for name in files:
        content, position = (saved / name).read_bytes(), 0
        assert [each.file for each in entries] == sorted(each.file for each in entries)
        for entry in (each for each in entries if each.file == name):
            assert entry.offset == position
            position += entry.length
            assert entry.crc32 == zlib.crc32(content[:position]), "that of the file up to here"
        assert position == len(content)


def test_a_staged_state_does_not_change_with_the_live_one(tmp_path: Path) -> None:
    live = tensors()
    job = staged(tmp_path, live)
    job.stage_on_host(HostMemory(torch.device("cpu")))
    for value in live.values():
        value.fill_(-1)
    seal(
        job,
        [
            write(
                job,
            )
        ],
    )
    empty = {name: torch.empty_like(value) for name, value in live.items()}
    dcp.load(empty, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert all(torch.equal(empty[name], value) for name, value in tensors().items())


def test_a_flipped_bit_is_found_wherever_it_is(saved: Path) -> None:
    verify_share(saved, rank=0, world=1)
    for name in (DATA, ".metadata", "common.pt"):
        content = (saved / name).read_bytes()
        for position in range(0, len(content), 97):
            broken = bytearray(content)
            broken[position] ^= 1 << position % 8
            (saved / name).write_bytes(broken)
            with pytest.raises(CheckpointError, match="is damaged"):
                verify_share(saved, rank=0, world=1)
        (saved / name).write_bytes(content)
    verify_share(saved, rank=0, world=1)


def test_the_message_names_the_file_the_tensor_and_what_to_do(saved: Path) -> None:
    entry = next(entry for entry in read_entries(saved) if "second" in entry.name)
    content = bytearray((saved / DATA).read_bytes())
    content[entry.offset + entry.length // 2] ^= 1
    (saved / DATA).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        verify_share(saved, rank=0, world=1)
    assert f"{saved / DATA} is damaged: {entry.name}, bytes {entry.offset} to" in str(caught.value)
    assert f"delete {saved.parent} to go on from the checkpoint before it" in str(caught.value)
    (saved / DATA).write_bytes(content[: entry.offset + 5])
    with pytest.raises(
        CheckpointError, match=f"{DATA} is truncated: it ends .* before the end of {re.escape(entry.name)}"
    ):
        verify_share(saved, rank=0, world=1)
    (saved / DATA).unlink()
    with pytest.raises(CheckpointError, match=f"{DATA} cannot be read"):
        verify_share(saved, rank=0, world=1)


def test_ranks_share_the_reading(saved: Path) -> None:
    entries = sorted(read_entries(saved))
    for world in (2, 3, 7):
        for entry in entries:
            content = (saved / entry.file).read_bytes()
            broken = bytearray(content)
            broken[entry.offset] ^= 1
            (saved / entry.file).write_bytes(broken)
            found = [rank for rank in range(world) if damaged(saved, rank, world)]
            assert len(found) == 1, "every entry is read by one rank"
            (saved / entry.file).write_bytes(content)


def damaged(folder: Path, rank: int, world: int) -> bool:
    """Does this rank find something?"""
    try:
        verify_share(folder, rank=rank, world=world)
    except CheckpointError:
        return True
    return False


def test_a_disk_that_loses_data_is_noticed_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = writer._File.flush

    def lossy(file: writer._File) -> None:
        real(file)
        with file.path.open("r+b") as again:
            again.seek(-70, 2)
            again.write(bytes(8))
            again.flush()
            os.fsync(again.fileno())

    monkeypatch.setattr(writer._File, "flush", lossy)
    with pytest.raises(CheckpointError, match="the disk or the network to it loses data"):
        write(staged(tmp_path, tensors()))
    assert write(staged(tmp_path, tensors()), read_back=0.0).verify_s < 0.01


def test_a_checkpoint_without_checksums_says_what_to_set(saved: Path) -> None:
    for garbled in ("[[1", "[]"):
        (saved / CHECKSUMS).write_text(garbled)
        with pytest.raises(CheckpointError, match="checkpoint.verify=false"):
            verify_share(saved, rank=0, world=1)
    (saved / CHECKSUMS).unlink()
    with pytest.raises(CheckpointError, match="checkpoint.verify=false"):
        verify_share(saved, rank=0, world=1)


def test_the_list_is_sealed_and_speaks_of_every_file(saved: Path) -> None:
    content = (saved / CHECKSUMS).read_bytes()
    for position in range(len(content)):
        broken = bytearray(content)
        broken[position] ^= 2
        (saved / CHECKSUMS).write_bytes(broken)
        with pytest.raises(CheckpointError, match="is damaged"):
            verify_share(saved, rank=0, world=1)
    (saved / CHECKSUMS).write_bytes(content)
    with (saved / DATA).open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=f"{DATA} is damaged: it has .* bytes, written were"):
        verify_share(saved, rank=0, world=1)
    (saved / "stray").touch()
    with pytest.raises(CheckpointError, match="stray is not part of what was written there"):
        verify_share(saved, rank=0, world=1)


def test_a_list_of_another_format_is_refused(saved: Path) -> None:
    write_sealed(saved / CHECKSUMS, read_sealed(saved / CHECKSUMS) | {"format": 3})
    with pytest.raises(CheckpointError, match="has format 3, this rlframe reads format 2"):
        verify_share(saved, rank=0, world=1)


def test_a_disk_that_is_full_or_gone_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: No such file"):
        write(staged(tmp_path / "gone", tensors()))
    (tmp_path / DATA).symlink_to("/dev/full")
    with pytest.raises(OutputError, match=f"{DATA} cannot be written: No space left on device; the disk is full"):
        write(staged(tmp_path, tensors()))
