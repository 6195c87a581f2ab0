"""A record of this process, written and read back."""

import gzip
import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlframe.cluster.profiling.config import Tool
from rlframe.cluster.profiling.recorders import driver_recorder, recorder
from rlframe.cluster.profiling.recording import Recording
from rlframe.cluster.profiling.request import Request
from rlframe.cluster.profiling.stacks import StackRecorder

pytestmark = pytest.mark.later


def request(folder: Path) -> Request:
    return Request(tool=Tool.TORCH, folder=str(folder / "step_1"), name="policy_0")


def test_calls_lie_in_their_phase_and_threads_are_seen(tmp_path: Path) -> None:
    recording = Recording(recorder(request(tmp_path)), request(tmp_path))
    recording.phase = "train"
    with recording.call("policy.train"):
        torch.mm(torch.ones(4, 4), torch.ones(4, 4))
        work = threading.Thread(target=lambda: torch.ones(3).cumsum(0))
        work.start()
        work.join()
    recording.phase = ""
    with recording.call("policy.sleep"):
        pass
    found = recording.end()
    assert found.files == ["policy_0.json.gz"] and found.phases.keys() == {"train"}
    events = json.loads(gzip.decompress((tmp_path / "step_1" / "policy_0.json.gz").read_bytes()))["traceEvents"]
    of = {each["name"]: each for each in events if "dur" in each}
    train, call = of["train"], of["policy.train"]
    assert train["ts"] <= call["ts"] and call["ts"] + call["dur"] <= train["ts"] + train["dur"]
    assert {"aten::mm", "aten::cumsum", "policy.sleep"} <= of.keys()
    assert of["aten::cumsum"]["tid"] != of["aten::mm"]["tid"]


def test_a_record_that_is_dropped_leaves_no_file_and_room_for_the_next(tmp_path: Path) -> None:
    Recording(recorder(request(tmp_path)), request(tmp_path)).drop()
    assert not list(tmp_path.iterdir())
    assert Recording(recorder(request(tmp_path)), request(tmp_path)).end().files


def test_a_record_that_could_not_be_written_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As by a signal that stops the run while the trace is written.
    def stopped(self: object, file: str) -> None:
        raise InterruptedError

    stops: list[object] = []
    stop = torch.profiler.profile.stop
    record = driver_recorder(request(tmp_path))
    record.begin()
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "export_chrome_trace", stopped)
        # torch 2.11 refuses to stop twice.
        patch.setattr(torch.profiler.profile, "stop", lambda self: (stops.append(self), stop(self)))
        with pytest.raises(InterruptedError):
            record.end()
        record.drop()
    assert len(stops) == 1
    assert Recording(recorder(request(tmp_path)), request(tmp_path)).end().files


def test_allocations_are_not_recorded_any_more_after_a_snapshot_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[bool] = []

    def record(enabled: str | None = "all", *, max_entries: int = 0) -> None:
        recorded.append(enabled is not None)

    def full(file: str) -> None:
        raise OSError(28, "No space left on device")

    # There are none without a GPU.
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    wanted = replace(request(tmp_path), tool=Tool.MEMORY)
    recording = Recording(recorder(wanted), wanted)
    with pytest.raises(OSError, match="No space left"):
        # The rank keeps nothing of a record that it has ended, and trains on.
        recording.end()
    assert recorded == [True, False]


def test_stacks_are_those_of_one_thread(tmp_path: Path) -> None:
    done = threading.Event()

    def waits_in_vain() -> None:
        done.wait()

    other = threading.Thread(target=waits_in_vain, name="other")
    other.start()
    stacks = StackRecorder(request(tmp_path), thread="other")
    stacks.begin()
    while not stacks.sampler.counts:
        pass
    (file,) = stacks.end()
    done.set()
    other.join()
    assert all("waits_in_vain" in line for line in file.read_text().splitlines())
