import logging
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlframe.cluster.watch.sight import State, cpu_seconds
from rlframe.environments.base import pays_all
from rlframe.environments.config import EnvironmentConfig
from rlframe.processes.pool import LARGEST_CHUNK
from rlframe.processes.process import Process
from rlframe.rewards import runner as module
from rlframe.rewards.config import Per, RewardConfig, RewardTerm
from rlframe.rewards.runner import RewardRunner, try_start
from rlframe.types.wait import Wait
from rlframe.utils.errors import ConfigError, RewardError, RlframeError
from tests.campaigns.rewards import BAD, HANGING, USER_CODE, rollout
from tests.until import under_a_fair_limit, until, until_state

pytestmark = pytest.mark.later


def test_it_tells_how_many_attempts_wait_for_which_part(monkeypatch: pytest.MonkeyPatch, user_file: str) -> None:
    now_s = [100.0]
    parts = {
        "best": RewardTerm(name=f"{user_file}:moody", per=Per.GROUP),
        "http": RewardTerm(name="exact_match"),
        "slow": RewardTerm(name="exact_match", timeout_s=90),
    }
    with RewardRunner(RewardConfig(parts=parts, workers=1)) as runner:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        assert runner.waits(lambda unit: True) == []
        rollouts = [rollout(index, "good") for index in range(3)]
        runner.submit([[each] for each in rollouts], Per.ATTEMPT)
        now_s[0] = 150.0
        runner.submit([rollouts], Per.GROUP)
        now_s[0] = 164.0
        found = runner.waits(lambda unit: unit[0] is not rollouts[2])
        while runner._open:
            runner.take()
        assert runner.waits(lambda unit: True) == []
    limit = "a call may take 5 s: reward.timeout_s; one runs at a time: reward.workers"
    ninety = "a call may take 90 s: reward.parts.slow.timeout_s; one runs at a time: reward.workers"
    assert found == [
        Wait(number=3, what="reward.parts.best", longest_s=14.0, limit=limit),
        Wait(number=2, what="reward.parts.http", longest_s=64.0, limit=limit),
        Wait(number=2, what="reward.parts.slow", longest_s=64.0, limit=ninety),
    ]


@pytest.fixture(autouse=True)
def equal_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call in a process has no more time than others, so that no test waits for it."""
    monkeypatch.setattr(module, "FIRST_CALL_S", 0.0)


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(USER_CODE)
    return str(file)


def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    parts = {
        "right": RewardTerm(name="exact_match", weight=2.0),
        "form": RewardTerm(name="format", weight=0.5, options={"pattern": "o"}),
        "long": RewardTerm(name="length", weight=0.25, options={"max_tokens": 4, "cache_tokens": 4}),
    }
    rollouts = [rollout(0, "good"), rollout(1, "oh"), rollout(2, "bad")]
    with RewardRunner(RewardConfig(parts=parts)) as runner:
        runner.score(rollouts)
    # Two of four tokens were sampled: length gives -0.5.
    assert rollouts[0].reward_parts == {"right": 1.0, "form": 1.0, "long": -0.5}
    assert [one.reward for one in rollouts] == [2.0 + 0.5 - 0.125, 0.5 - 0.125, -0.125]
    assert not any(one.reward_failed for one in rollouts)


FIRST = {
    "hang", "hang in C", "crash", "exit", "raise", "fork", "print for ever", "garbage in the pipes", "forged",
    "close everything", "memory", "segfault", "stop", "nan", "list",
}  # fmt: skip
"""One of each kind of BAD."""
ALONE = {"mine": 1, "right": 0}
"""The failures of a batch with one bad rollout."""


@pytest.mark.parametrize("bad", [pytest.param(bad, marks=[] if bad in FIRST else pytest.mark.thorough) for bad in BAD])
def test_a_bad_reward_is_one_failed_sample_and_the_others_go_on(user_file: str, bad: str) -> None:
    parts = {"mine": RewardTerm(name=f"{user_file}:grade"), "right": RewardTerm(name="exact_match")}
    rollouts = [rollout(index, "good" if index % 2 else "wrong") for index in range(40)]
    rollouts[7].text = bad

    def failures(limit_s: float) -> list[dict[str, int]]:
        found = []
        with RewardRunner(RewardConfig(parts=parts, timeout_s=limit_s, memory_gb=1.0)) as runner:
            for _ in range(2):  # the replaced worker judges on
                runner.score(rollouts)
                found.append(runner.failures)
                if runner.failures == ALONE:
                    assert [one.reward_failed for one in rollouts] == [index == 7 for index in range(40)]
                    rewards = [0 if index == 7 else 2 * (index % 2) for index in range(40)]
                    assert [one.reward for one in rollouts] == rewards
                    assert rollouts[7].reward_parts == {"mine": 0.0, "right": 0.0}
        return found

    # What hangs waits for the limit, or computes until then.
    first_s = 0.5 if bad in HANGING else 60.0
    assert under_a_fair_limit(failures, lambda found: found == [ALONE] * 2, first_s=first_s) == [ALONE] * 2


def test_a_part_without_a_say_is_left_out_and_no_failure(user_file: str) -> None:
    moody = RewardTerm(name=f"{user_file}:moody", weight=2.0)
    rollouts = [rollout(0, "nothing", "nothing"), rollout(1, "good"), rollout(2, "bad")]
    with RewardRunner(RewardConfig(parts={"moody": moody, "right": RewardTerm(name="exact_match")})) as runner:
        runner.score(rollouts)
    # 1 * 1 from the other part alone; 2 * 1 + 1 * 1; 0.
    assert [one.reward for one in rollouts] == [1.0, 3.0, 0.0]
    assert rollouts[0].reward_parts == {"right": 1.0}
    assert not any(one.reward_failed for one in rollouts)
    with RewardRunner(RewardConfig(parts={"moody": moody})) as runner:
        runner.score(rollouts)
    assert math.isnan(rollouts[0].reward) and [one.reward for one in rollouts[1:]] == [2.0, 0.0]


def test_an_attempt_that_no_part_has_a_say_on_keeps_the_environments_reward(user_file: str) -> None:
    moody = RewardTerm(name=f"{user_file}:moody")
    rollouts = [rollout(0, "nothing", "nothing"), rollout(1, "nothing", "nothing")]
    rollouts[0].credit(0.75)
    with RewardRunner(RewardConfig(parts={"moody": moody}), paid=True) as runner:
        runner.score(rollouts)
    assert [one.total_reward for one in rollouts] == [0.75, 0.0]


@pytest.mark.parametrize(("name", "paid"), [("gymnasium", True), ("endpoint", False), ("tools", False)])
def test_each_attempt_has_a_reward_of_environments_with_rewards_and_not_of_agents(name: str, paid: bool) -> None:
    assert pays_all(EnvironmentConfig(name=name)) is paid


def test_a_reward_that_never_scores_ends_the_run() -> None:
    rollouts = [rollout(index, "good") for index in range(32)]
    for one in rollouts:
        one.prompt = replace(one.prompt, answer=None)
    with RewardRunner(RewardConfig(parts={"right": RewardTerm(name="exact_match")})) as runner:
        runner.score(rollouts)
        with pytest.raises(RlframeError, match="has failed on each of the first 64 .* no answer") as caught:
            runner.score(rollouts)
    assert str(caught.value).startswith("reward.parts.right ")
    assert not isinstance(caught.value, ValueError), "the program would end with the exit code of what never began"


def test_a_reward_that_has_scored_may_fail_for_a_while(user_file: str) -> None:
    with RewardRunner(RewardConfig(parts={"mine": RewardTerm(name=f"{user_file}:grade")})) as runner:
        runner.score([rollout(0, "good")])
        for _ in range(3):
            runner.score([rollout(index, "raise") for index in range(32)])
            assert runner.failures == {"mine": 32}


def test_what_a_reward_prints_goes_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "chatty.py").write_text("def f(response, answer):\n    print('seen', response)\n    return 1\n")
    caplog.set_level(logging.INFO)
    with RewardRunner(RewardConfig(parts={"chatty": RewardTerm(name=f"{tmp_path}/chatty.py:f")}, workers=1)) as runner:
        runner.score([rollout(0, "this")])
    assert "a reward printed: seen this" in caplog.text


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("import os; print('last words'); os._exit(3)", r"exit code 3.*it printed last: last words"),
        ("import os; os.kill(os.getpid(), 9)", r"exit code -9"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os\nfor d in range(3, 4096):\n    try: os.write(d, b'x')\n    except OSError: pass\n", "cannot start"),
    ],
)
def test_a_file_that_leaves_while_it_is_imported_is_a_sentence(tmp_path: Path, code: str, sentence: str) -> None:
    file = tmp_path / "leaves.py"
    file.write_text(f"{code}\ndef f(response, answer):\n    return 1\n")
    with pytest.raises(RewardError, match=sentence):
        try_start(RewardConfig(parts={"mine": RewardTerm(name=f"{file}:f")}))


def test_several_hangs_and_crashes_in_one_chunk_are_each_found(user_file: str) -> None:
    texts = ["good", "hang", "crash", "good", "crash", "hang", "wrong"]
    rollouts = [rollout(index, text) for index, text in enumerate(texts * 2)]

    def failures(limit_s: float) -> dict[str, int]:
        parts = {"mine": RewardTerm(name=f"{user_file}:grade")}
        with RewardRunner(RewardConfig(parts=parts, timeout_s=limit_s, workers=1)) as runner:
            runner.score(rollouts)
        return runner.failures

    assert under_a_fair_limit(failures, lambda found: found == {"mine": 8}, first_s=0.3) == {"mine": 8}
    assert [one.reward_failed for one in rollouts] == [text in ("hang", "crash") for text in texts * 2]
    assert [one.reward for one in rollouts] == [float(text == "good") for text in texts * 2]


def test_only_what_exceeds_the_limit_fails_however_long_the_whole_chunk_takes(tmp_path: Path) -> None:
    code = "import time\ndef f(response, answer):\n    time.sleep({})\n    return 1\n"
    rollouts = [rollout(index, "x") for index in range(16)]

    def failures(limit_s: float) -> dict[str, int]:
        file = tmp_path / f"slow_{limit_s:.0f}.py"
        file.write_text(code.format(limit_s / 4))
        with RewardRunner(
            RewardConfig(parts={"slow": RewardTerm(name=f"{file}:f")}, timeout_s=limit_s, workers=1)
        ) as runner:
            runner.score(rollouts)
        return runner.failures

    assert under_a_fair_limit(failures, lambda found: found == {"slow": 0}, first_s=0.4) == {"slow": 0}


def test_what_a_hung_reward_started_is_killed_with_it(tmp_path: Path) -> None:
    # A number that no other test on this machine has.
    seconds, file = f"600.{uuid.uuid4().int % 10**9:09}", tmp_path / "mine.py"
    file.write_text(f"import subprocess\ndef f(response, answer):\n    subprocess.run(['sleep', '{seconds}'])\n")

    def is_there() -> bool:
        return any(seconds in (each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"]))

    with RewardRunner(RewardConfig(parts={"mine": RewardTerm(name=f"{file}:f")}, timeout_s=5.0, workers=1)) as runner:
        runner.submit([[rollout(0, "x")]], Per.ATTEMPT)
        until(lambda: runner.take(0.0) or is_there())
        while not runner.take():
            pass
    assert runner.failures == {"mine": 1}
    until(lambda: not is_there())


def test_a_worker_that_dies_between_calls_costs_no_sample(user_file: str) -> None:
    with RewardRunner(RewardConfig(parts={"mine": RewardTerm(name=f"{user_file}:grade")}, workers=2)) as runner:
        rollouts = [rollout(index, "good") for index in range(8)]
        runner.score(rollouts)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
            until_state(pid, State.DEAD)
        runner.score(rollouts)
        assert runner.failures == {"mine": 0}
        assert all(one.reward == 1.0 for one in rollouts)


def test_a_worker_that_is_killed_while_it_starts_costs_no_sample(user_file: str) -> None:
    with RewardRunner(RewardConfig(parts={"mine": RewardTerm(name=f"{user_file}:grade")}, workers=2)) as runner:
        os.kill(children()[0], signal.SIGKILL)
        rollouts = [rollout(index, "good") for index in range(8)]
        runner.score(rollouts)
        assert runner.failures == {"mine": 0}
        assert all(one.reward == 1.0 for one in rollouts)


def test_workers_never_import_torch(user_file: str) -> None:
    names = ["math_verify", "torch", "transformers", "ray", "megatron"]
    parts = {
        name: RewardTerm(name=name, options=options)
        for name, options in {
            "exact_match": {},
            "math_verify": {},
            "format": {"pattern": "x"},
            "length": {"max_tokens": 9, "cache_tokens": 1},
        }.items()
    }
    parts["loaded"] = RewardTerm(name=f"{user_file}:loaded")
    rollouts = [rollout(index, name, answer="1") for index, name in enumerate(names)]
    with RewardRunner(RewardConfig(parts=parts)) as runner:
        runner.score(rollouts)
    assert {one.text: one.reward_parts["loaded"] for one in rollouts} == dict.fromkeys(names, 0.0) | {
        "math_verify": 1.0
    }


def test_judging_512_cheap_rollouts_takes_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[int] = []
    assign = Process.assign
    monkeypatch.setattr(Process, "assign", lambda worker, tasks: chunks.append(len(tasks)) or assign(worker, tasks))
    rollouts = [rollout(index, "good") for index in range(512)]
    with RewardRunner(RewardConfig(parts={"right": RewardTerm(name="exact_match")}, workers=2)) as runner:
        runner.score(rollouts)  # waits for the workers to start
        times = []
        for _ in range(5):
            start = time.perf_counter()
            runner.score(rollouts)
            times.append(time.perf_counter() - start)
    # The workers get them in chunks; it takes 10 ms, and on a busy machine less than a hundred times as long.
    assert chunks == [LARGEST_CHUNK] * (6 * 512 // LARGEST_CHUNK) and min(times) < 1.0


def test_no_rollouts_are_scored_at_once() -> None:
    # Must not raise.
    with RewardRunner(RewardConfig(parts={"right": RewardTerm(name="exact_match")})) as runner:
        runner.score([])


def test_closing_ends_the_workers() -> None:
    before = set(children())
    runner = RewardRunner(RewardConfig(parts={"right": RewardTerm(name="exact_match")}, workers=3))
    # A process that is just becoming another program has no command line for a moment.
    until(lambda: len(set(children()) - before) >= 3)
    assert len(set(children()) - before) == 3
    runner.close()
    assert set(children()) == before


def test_a_worker_whose_runner_is_killed_ends_itself_even_in_a_hang(user_file: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); "
        "from tests.unit.rewards.test_runner import *; "
        f"parts = {{'mine': RewardTerm(name={user_file + ':grade'!r})}}; module.FIRST_CALL_S = 0; "
        "runner = RewardRunner(RewardConfig(parts=parts, timeout_s=1, workers=2)); "
        "runner.score([rollout(0, 'good'), rollout(1, 'good')]); print(*children(), flush=True); "
        "runner.score([rollout(0, 'hang')])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    begun_s = sum(map(cpu_seconds, workers))
    until(lambda: sum(map(cpu_seconds, workers)) > begun_s + 0.1)
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not any(map(alive, workers)))  # 1 s for the task and 5 s of grace


def test_a_runner_without_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match="reward.parts must name at least one reward"):
        RewardRunner(RewardConfig())


def test_a_reward_that_cannot_be_built_in_the_worker_stops_the_run(tmp_path: Path) -> None:
    file = tmp_path / "moody.py"
    file.write_text("def f(response, answer):\n    return 1\n")
    runner = RewardRunner(RewardConfig(parts={"moody": RewardTerm(name=f"{file}:f")}, workers=1))
    for pid in children():
        os.kill(pid, signal.SIGSTOP)  # so that it reads the file only after it has changed
    file.write_text("1/0\n")
    for pid in children():
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(RewardError, match="a reward worker cannot start"):
        runner.score([rollout(0, "x")])


def children() -> list[int]:
    """Process ids of the reward workers this process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"rlframe.processes.worker" in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
        except OSError:
            continue
    return found


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
