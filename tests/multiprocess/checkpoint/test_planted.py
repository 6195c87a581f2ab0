"""A checkpoint with a program planted in it runs nothing, though its checksums agree: converted, and loaded."""

import contextlib
import io
import json
import pathlib
import pickle
import shutil
import zlib
from typing import Any

import pytest
import torch

from rlframe.megatron.checkpoint.checksums import THIS_FILE, Entry, read_entries, verify_share, write_entries
from tests.multiprocess.distributed import run_distributed
from tests.tiny_models import make

pytestmark = pytest.mark.thorough
DATA = "__0_0.distcp"


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: pathlib.Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return pathlib.Path.touch, (self.mark,)


def reseal(folder: pathlib.Path) -> None:
    """Makes the list of checksums agree with the files, as someone would who means harm."""
    entries = []
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        known = [entry for entry in read_entries(folder) if entry.file == file.name]
        for entry in known or [Entry(file.name, THIS_FILE, 0, len(content), 0)]:
            if file.name != DATA:
                entry = entry._replace(length=len(content))
            entries.append(entry._replace(crc32=zlib.crc32(content[: entry.offset + entry.length])))
    write_entries(folder, [entry for entry in entries if entry.file != "checksums.json"])
    verify_share(folder, rank=0, world=1)


def plant(folder: pathlib.Path, where: str, mark: pathlib.Path) -> None:
    """Puts the trap in a file of a distributed checkpoint, or in an entry of a rank's file, at its length."""
    buffer = io.BytesIO()
    torch.save(Trap(mark), buffer)
    if where == ".metadata":
        (folder / where).write_bytes(pickle.dumps(Trap(mark)))
    elif where == "common.pt":
        (folder / where).write_bytes(buffer.getvalue())
    elif where == "metadata.json":
        (folder / where).write_text(json.dumps({"sharded_backend": "zarr", "common_backend": "torch"}))
    else:
        largest = max((entry for entry in read_entries(folder) if entry.file == DATA), key=lambda entry: entry.length)
        program = pickle.dumps(Trap(mark)) if where == "bare" else buffer.getvalue()
        content = bytearray((folder / DATA).read_bytes())
        # A zip file is found by its end.
        assert len(program) <= largest.length
        padded = program.ljust(largest.length, b"\0") if where == "bare" else program
        first = largest.offset + largest.length - len(padded)
        content[largest.offset : largest.offset + largest.length] = bytes(largest.length)
        content[first : first + len(padded)] = padded
        (folder / DATA).write_bytes(content)
    reseal(folder)


PLACES = (".metadata", "common.pt", "metadata.json", "archive", "bare")


def attempts(rank: int, init_method: str, folder: pathlib.Path) -> dict[str, str]:
    """What the conversion of each planted checkpoint says, and a trainer that begins with it."""
    from rlframe.tools.convert import main  # noqa: PLC0415 - spawned processes need it, the test does not

    model, clean = str(folder / "model"), folder / "clean"
    main(["to-megatron", "--model", model, "--out", str(clean), "--dtype", "float32"])
    said = {}
    for place in PLACES:
        shutil.copytree(clean, folder / place)
        plant(folder / place, place, folder / f"ran-{place}")
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), contextlib.suppress(SystemExit):
            main(["to-huggingface", "--checkpoint", str(folder / place), "--model", model,
                  "--out", str(folder / f"{place}-out")])  # fmt: skip
        said[place] = stderr.getvalue()
    return said


def begin(rank: int, init_method: str, folder: pathlib.Path) -> dict[str, str]:
    """What a trainer says that is to begin with the weights of each."""
    from rlframe.megatron.cpu import platform  # noqa: PLC0415 - the platform must be installed before Megatron

    platform.install(torch.device("cpu"))
    from rlframe.megatron.config.train import TrainConfig  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415
    from rlframe.models.config import ModelConfig  # noqa: PLC0415
    from rlframe.utils.errors import CheckpointError  # noqa: PLC0415

    trainer = Trainer(TrainerSetup(
        rank=rank, init_method=init_method, device=torch.device("cpu"), model=ModelConfig(path=str(folder / "model")),
        train=TrainConfig(dtype="float32"), seed=0, temperature=1.0, total_optimizer_steps=1, timeout_s=60,
        with_reference=False,
    ))  # fmt: skip
    said = {}
    for place in PLACES:
        try:
            trainer.verify(folder / place)
            trainer.load_weights(folder / place)
            said[place] = "loaded"
        except CheckpointError as error:
            said[place] = str(error)
    return said


def test_nothing_planted_in_a_checkpoint_runs(tmp_path: pathlib.Path) -> None:
    make("qwen3", tmp_path / "model")
    pickle.loads(pickle.dumps(Trap(tmp_path / "trap works")))
    assert (tmp_path / "trap works").exists()
    (converted,) = run_distributed(attempts, 1, tmp_path)
    (loaded,) = run_distributed(begin, 1, tmp_path)
    assert [path.name for path in tmp_path.glob("ran-*")] == []
    for said in (converted, loaded):
        assert "asks for pathlib.Path.touch, which no such file needs" in said[".metadata"]
        assert "must name sharded_backend 'torch_dist', got 'zarr'" in said["metadata.json"]
        assert "weights" in said["archive"].lower() and "does not hold this model" in said["archive"], said["archive"]
        assert "does not hold this model" in said["bare"]
    # It is not read: what it would say stands in the run's state.
    assert loaded["common.pt"] == "loaded" and (tmp_path / "common.pt-out").exists()
