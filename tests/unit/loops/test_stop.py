"""A signal lets the step finish and be saved, once; the second ends at once. Each run is a process of its own."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlframe.loops.config import CheckpointConfig
from rlframe.loops.saving.checkpoints import Checkpoints, RunState
from rlframe.loops.saving.manifest import claim_owner
from rlframe.loops.schedule import Event, Schedule
from rlframe.loops.stop import Stop, Stopped, failure
from tests.until import PATIENCE_S

pytestmark = pytest.mark.later

ROOT = Path(__file__).parents[3]
RUN = """
import sys, time
from rlframe.loops.stop import Stop

stop = Stop(patience_s=float(sys.argv[1]))
stop.listen()
saved, settled = [], []
try:
    for step in stop.steps(1, 100, settle=lambda: settled.append(len(saved))):
        print(step, flush=True)
        # The second step lasts until a signal is there, or for longer than the test.
        while step > 1 and not (sys.argv[2] == "short" and stop.code):
            time.sleep(0.01)
        if stop.begins_save(step, due=False):
            time.sleep(float(sys.argv[3]))
            saved.append(step)
except KeyboardInterrupt:
    print("saved", saved, "settled", settled, stop.code, stop.sentence, flush=True)
    sys.exit(stop.code)
"""


def run(number: signal.Signals, *, patience_s: float, step: str, save_s: float = 0.0, times: int = 1) -> tuple:
    """Exit code and last line of a run that got the signal in its second step, which is `short` or `endless`."""
    command = [sys.executable, "-c", RUN, *map(str, (patience_s, step, save_s))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "1\n" and process.stdout.readline() == "2\n"
    said = ""
    for remaining in range(times, 0, -1):
        process.send_signal(number)
        if remaining > 1:
            # The blank line, and what the first signal says.
            said = process.stderr.readline() + process.stderr.readline()
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in errors
    return process.returncode, out.splitlines()[-1], said + errors


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130)])
def test_the_first_signal_finishes_the_step_and_saves_it(number: signal.Signals, name: str, code: int) -> None:
    # Saving may take longer than the patience: that is the step's.
    got, last, errors = run(number, patience_s=4, step="short", save_s=4.5)
    assert got == code
    said = f"stopped by {name}: saved after step 2 of 100; the same command resumes from there"
    assert last == f"saved [2] settled [1] {code} {said}"
    assert f"{name}: step 2 may take another checkpoint.on_signal_s=4 s and is then saved; a second signal" in errors


@pytest.mark.parametrize("patience_s", [0.0, 0.3])
def test_a_step_that_takes_longer_is_given_up(patience_s: float) -> None:
    code, last, _ = run(signal.SIGTERM, patience_s=patience_s, step="endless")
    assert code == 143
    assert last.startswith("saved [] settled [] 143 stopped by SIGTERM: step 2 was not finished within")


def test_the_second_signal_ends_at_once() -> None:
    code, last, _ = run(signal.SIGINT, patience_s=600, step="endless", times=2)
    assert code == 130
    assert last.startswith("saved [] settled [] 130 stopped by Ctrl-C, then Ctrl-C: ended at once")


def test_another_thread_can_make_the_step_the_last() -> None:
    stop, settled = Stop(), []
    with pytest.raises(Stopped):
        for step in stop.steps(1, 9, settle=lambda: settled.append(stop.begins_save(3, due=False))):
            if step == 3:
                thread = threading.Thread(target=stop.ask, args=("gcs_server (pid 7) died",))
                thread.start()
                thread.join()
    assert (step, settled, stop.code, stop.signalled) == (3, [True], 1, False)
    assert stop.sentence == "gcs_server (pid 7) died: saved after step 3 of 9; the same command resumes from there"


@pytest.fixture
def handlers() -> Iterator[None]:
    """The handlers of signals are those of before when the test is over."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def signalled() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def nothing() -> None: ...


def saved_run(
    folder: Path,
    *,
    patience_s: float,
    steps: int,
    step: Callable[[int], None] = lambda _: None,
    write: Callable[[], object] = nothing,
    background: bool = True,
) -> tuple[Checkpoints, Stop, BaseException]:
    """Runs steps that are all saved, each by calling `write`. Returns what ended them too."""
    claim_owner(folder, "digest")
    checkpoints, stop = Checkpoints(folder / "checkpoints", CheckpointConfig()), Stop(patience_s=patience_s)
    stop.listen()

    def stage(folder: Path) -> Callable[[], dict[str, float]]:
        (folder / "weights").write_text("weights")
        return lambda: {"time/write_s": 0.0} if write() else {}

    def save(number: int) -> None:
        state = RunState(step=number, num_optimizer_steps=number, data={}, results={})
        checkpoints.save(state, stage, background=background)

    schedule = Schedule(last_step=steps, every={Event.CHECKPOINT: 1}, checkpoints=checkpoints, stop=stop)
    with pytest.raises((Stopped, LookupError)) as raised:
        schedule.run(0, step, {Event.CHECKPOINT: save})
    return checkpoints, stop, raised.value


def newest(checkpoints: Checkpoints) -> str:
    latest = checkpoints.latest()
    return latest.name if latest else ""


@pytest.mark.parametrize(("steps", "background"), [(1, False), (1, True), (4, False)])
def test_a_save_that_is_due_may_take_longer_than_the_step(
    steps: int, background: bool, tmp_path: Path, handlers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    def write() -> None:
        signalled()
        time.sleep(0.3)

    checkpoints, stop, _ = saved_run(tmp_path, patience_s=0.1, steps=steps, write=write, background=background)
    assert stop.sentence == f"stopped by SIGTERM: saved after step 1 of {steps}; the same command resumes from there"
    assert newest(checkpoints) == "step-00000001" and stop.code == 143 and stop.signalled
    assert "SIGTERM: step 1 is being saved, and the run then ends; a second signal" in capfd.readouterr().err


def test_the_checkpoint_before_a_step_that_is_given_up_or_fails_is_written(tmp_path: Path, handlers: None) -> None:
    def late(number: int) -> None:
        if number == 2:
            signalled()
            time.sleep(PATIENCE_S)

    def broken(number: int) -> None:
        if number == 2:
            raise LookupError("an error of the user's")

    for name, step in {"late": late, "broken": broken}.items():
        folder = tmp_path / name
        folder.mkdir()
        checkpoints, *_ = saved_run(folder, patience_s=0.1, steps=4, step=step, write=lambda: time.sleep(0.3))
        assert newest(checkpoints) == "step-00000001"


def test_the_second_signal_does_not_wait_for_a_checkpoint(tmp_path: Path, handlers: None) -> None:
    released = threading.Event()

    def twice(number: int) -> None:
        if number == 2:
            signalled()
            signalled()

    checkpoints, stop, _ = saved_run(tmp_path, patience_s=9, steps=4, step=twice, write=released.wait)
    assert "then SIGTERM: ended at once" in stop.sentence and newest(checkpoints) == ""
    released.set()
    checkpoints.abandon()


@pytest.mark.parametrize(("saves", "then"), [(True, "and is then saved"), (False, "and the run then ends")])
def test_the_first_signal_lets_a_step_finish_that_is_the_last_already(
    saves: bool, then: str, handlers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    stop, saved = Stop(patience_s=9), []
    stop.listen()
    with pytest.raises(Stopped):
        for step in stop.steps(1, 4, settle=nothing):
            stop.ask("good enough", code=0, saves=saves)
            signalled()
            saved.append(stop.begins_save(step, due=False))
    assert saved == [saves] and stop.code == 143 and not stop.at_once
    assert stop.sentence.startswith(f"good enough, then SIGTERM: {'saved' if saves else 'ended'} after step 1 of 4")
    assert f"SIGTERM: step 1 may take another checkpoint.on_signal_s=9 s {then}; a second" in capfd.readouterr().err


def test_a_signal_while_earlier_files_are_written_says_that_the_step_is_not_saved(
    handlers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = Stop(patience_s=9)
    stop.listen()
    with pytest.raises(Stopped):
        for step in stop.steps(1, 4, settle=signalled):
            stop.ask("the loss is no number", saves=False)
            assert not stop.begins_save(step, due=False)
    assert "SIGTERM: step 1 has ended, and the run then ends; a second signal" in capfd.readouterr().err
    assert stop.sentence.startswith("the loss is no number, then SIGTERM: ended after step 1 of 4") and stop.code == 1


def test_the_first_signal_behind_the_end_that_a_callback_wanted_does_not_kill(handlers: None) -> None:
    stop = Stop(patience_s=9)
    stop.listen()
    with pytest.raises(Stopped):
        for _ in stop.steps(1, 4, settle=nothing):
            stop.ask("good enough", code=0)
    with pytest.raises(Stopped, match="good enough, then SIGTERM between steps"):
        signalled()


def test_a_run_that_a_callback_stops_has_not_failed() -> None:
    by_signal, error = Stopped("stopped by SIGTERM", 143), LookupError()
    assert failure(None) is None and failure(Stopped("good enough: saved after step 2 of 9", 0)) is None
    assert failure(by_signal) is by_signal and failure(error) is error


def test_a_signal_before_the_first_step_is_told_as_such() -> None:
    stop = Stop()
    with pytest.raises(Stopped, match="^stopped by SIGTERM before any step; the same command begins it again"):
        stop._signalled(signal.SIGTERM, None)
