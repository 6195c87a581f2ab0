import logging
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlframe.rewards.config import RewardConfig, RewardTerm
from rlframe.rewards.runner import RewardRunner, try_start
from rlframe.utils.errors import ConfigError, RewardError
from tests.campaigns.rewards import BAD, HANGING, USER_CODE, rollout

pytestmark = pytest.mark.later


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


@pytest.mark.parametrize("bad", [pytest.param(bad, marks=[] if bad in FIRST else pytest.mark.thorough) for bad in BAD])
def test_a_bad_reward_is_one_failed_sample_and_the_others_go_on(user_file: str, bad: str) -> None:
    config = RewardConfig(
        parts={"mine": RewardTerm(name=f"{user_file}:grade"), "right": RewardTerm(name="exact_match")},
        # What waits for the limit waits for a short one; the innocent may be slow on a busy machine.
        timeout_s=3.0 if bad in HANGING else 20.0,
        memory_gb=1.0,
    )
    rollouts = [rollout(index, "good" if index % 2 else "wrong") for index in range(40)]
    rollouts[7].text = bad
    with RewardRunner(config) as runner:
        for _ in range(2):  # the replaced worker judges on
            runner.score(rollouts)
            assert [one.reward_failed for one in rollouts] == [index == 7 for index in range(40)]
            assert [one.reward for one in rollouts] == [0 if index == 7 else 2 * (index % 2) for index in range(40)]
            assert rollouts[7].reward_parts == {"mine": 0.0, "right": 0.0}
            assert runner.failures == {"mine": 1, "right": 0}


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


def test_a_reward_that_never_scores_ends_the_run() -> None:
    rollouts = [rollout(index, "good") for index in range(32)]
    for one in rollouts:
        one.prompt = replace(one.prompt, answer=None)
    with RewardRunner(RewardConfig(parts={"right": RewardTerm(name="exact_match")})) as runner:
        runner.score(rollouts)
        with pytest.raises(RewardError, match="reward.parts.right has failed on each of the first 64 .* no answer"):
            runner.score(rollouts)


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
        ("import os\nfor d in range(3, 50):\n    try: os.write(d, b'x')\n    except OSError: pass\n", "cannot start"),
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
    config = RewardConfig(parts={"mine": RewardTerm(name=f"{user_file}:grade")}, timeout_s=0.3, workers=1)
    with RewardRunner(config) as runner:
        runner.score(rollouts)
    assert [one.reward_failed for one in rollouts] == [text in ("hang", "crash") for text in texts * 2]
    assert [one.reward for one in rollouts] == [float(text == "good") for text in texts * 2]
    assert runner.failures == {"mine": 8}


def test_only_what_exceeds_the_limit_fails_however_long_the_whole_chunk_takes(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef f(response, answer):\n    time.sleep(0.1)\n    return 1\n")
    rollouts = [rollout(index, "x") for index in range(16)]
    config = RewardConfig(parts={"slow": RewardTerm(name=f"{tmp_path}/slow.py:f")}, timeout_s=0.35, workers=1)
    with RewardRunner(config) as runner:
        runner.score(rollouts)
    assert runner.failures == {"slow": 0}


def test_what_a_hung_reward_started_is_killed_with_it(user_file: str) -> None:
    config = RewardConfig(parts={"mine": RewardTerm(name=f"{user_file}:grade")}, timeout_s=0.4, workers=1)
    with RewardRunner(config) as runner:
        runner.score([rollout(0, "child")])
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists()]
    assert not any(b"600.125" in command for command in commands)


def test_a_worker_that_dies_between_calls_costs_no_sample(user_file: str) -> None:
    with RewardRunner(RewardConfig(parts={"mine": RewardTerm(name=f"{user_file}:grade")}, workers=2)) as runner:
        rollouts = [rollout(index, "good") for index in range(8)]
        runner.score(rollouts)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
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


def test_judging_512_cheap_rollouts_takes_less_than_50_ms() -> None:
    rollouts = [rollout(index, "good") for index in range(512)]
    with RewardRunner(RewardConfig(parts={"right": RewardTerm(name="exact_match")})) as runner:
        runner.score(rollouts)  # waits for the workers to start
        times = []
        for _ in range(5):
            start = time.perf_counter()
            runner.score(rollouts)
            times.append(time.perf_counter() - start)
    assert min(times) < 0.050


def test_no_rollouts_are_scored_at_once() -> None:
    # Must not raise.
    with RewardRunner(RewardConfig(parts={"right": RewardTerm(name="exact_match")})) as runner:
        runner.score([])


def test_closing_ends_the_workers() -> None:
    before = set(children())
    runner = RewardRunner(RewardConfig(parts={"right": RewardTerm(name="exact_match")}, workers=3))
    # A process that is just becoming another program has no command line for a moment.
    deadline = time.monotonic() + 10
    while len(set(children()) - before) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(set(children()) - before) == 3
    runner.close()
    assert set(children()) == before


def test_a_worker_whose_runner_is_killed_ends_itself_even_in_a_hang(user_file: str) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); "
        "from tests.unit.rewards.test_runner import *; "
        f"parts = {{'mine': RewardTerm(name={user_file + ':grade'!r})}}; "
        "runner = RewardRunner(RewardConfig(parts=parts, timeout_s=1, workers=2)); "
        "runner.score([rollout(0, 'good'), rollout(1, 'good')]); print(*children(), flush=True); "
        "runner.score([rollout(0, 'hang')])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    time.sleep(0.5)
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 15  # 1 s for the task and 5 s of grace, on a busy machine
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in workers)


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
