"""The process that runs rewards: `python -m rlframe.rewards._worker REQUESTS RESULTS`, two file descriptors.

It answers one line per task, in order, as soon as the task is done, so that the runner knows which task a silent or
dead worker is stuck in. Rewards are users' code: whatever they print, fork, exit from or allocate must fail one sample
only. So they print into a separate pipe, answers carry a key that no printed text has, a fork that returns from a
reward ends silently, and the kernel refuses memory beyond a limit.
"""

import faulthandler
import json
import math
import os
import pickle
import resource
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import BinaryIO

from rlframe.rewards.base import Attempt, Reward, build_reward
from rlframe.rewards.config import LARGEST_SCORE, RewardConfig

ORPHAN_GRACE_S = 5.0
"""Seconds after which a worker whose runner was killed ends itself. The runner kills stuck workers."""
GIGABYTE = 1 << 30
LONGEST_MESSAGE = 600
"""Greatest number of characters of an error message, so that an answer fits into the 4,096 bytes that a pipe accepts at
once."""
STARTED = -1
"""Number of the first answer, which reports that all rewards have been built."""

Answer = Callable[[int, float | str | None], None]
"""Sends the number of a task with its score, None if the reward does not apply, or the text of a failure."""


def main() -> None:
    """Reads the key and the configuration, reports that it is ready, and scores until the pipe closes."""
    requests, results = os.fdopen(int(sys.argv[1]), "rb"), int(sys.argv[2])
    key, config = pickle.load(requests)
    limit(config)
    owner = os.getpid()

    def answer(number: int, outcome: float | str | None) -> None:
        if os.getpid() != owner:
            # A reward forked and returned twice. Only the original process may answer.
            os._exit(0)
        os.write(results, json.dumps([key, number, outcome]).encode("ascii") + b"\n")

    rewards = {}
    for name, part in config.parts.items():
        try:
            rewards[name] = build_reward(part, key=f"reward.parts.{name}")
        except BaseException as error:  # A user's file may raise anything; the runner reports it.
            answer(STARTED, described(error))
            return
    answer(STARTED, None)
    try:
        serve(requests, rewards, config, answer)
    except (EOFError, OSError):
        return


def limit(config: RewardConfig) -> None:
    """Makes the kernel refuse memory beyond `reward.memory_gb`, and kill this process first if the machine runs out of
    memory."""
    most = int(config.memory_gb * GIGABYTE)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")


def serve(requests: BinaryIO, rewards: dict[str, Reward], config: RewardConfig, answer: Answer) -> None:
    """Scores chunk after chunk. Raises EOFError or OSError if the runner has ended."""
    with open(os.devnull, "w") as nowhere:
        while True:
            tasks: list[tuple[int, Attempt, str]] = pickle.load(requests)
            patience_s = config.timeout_s * len(tasks) + ORPHAN_GRACE_S
            faulthandler.dump_traceback_later(patience_s, exit=True, file=nowhere)
            for number, attempt, part in tasks:
                answer(number, judge(rewards[part], attempt))
            faulthandler.cancel_dump_traceback_later()


def judge(reward: Reward, attempt: Attempt) -> float | str | None:
    """Returns the score, None if the reward does not apply, or the text of the failure."""
    try:
        score = reward.score(attempt)
        if score is None:
            return None
        if not isinstance(score, Real) or not math.isfinite(score) or abs(score) > LARGEST_SCORE:
            return f"a reward must be a finite number of at most {LARGEST_SCORE:g} in size, or None, got {score!r:.60}"
        return float(score)
    except BaseException as error:  # one failed sample, counted by the runner; sys.exit must not end the worker
        return described(error)


def described(error: BaseException) -> str:
    """Returns the error as one string, even if its class fails to format it."""
    try:
        text = str(error)
    except Exception as broken:  # The user's class may raise anything.
        text = f"an error whose text raises {type(broken).__name__}"
    return f"{type(error).__name__}: {text}"[:LONGEST_MESSAGE]


if __name__ == "__main__":
    main()
