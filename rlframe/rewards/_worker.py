"""The process that runs rewards: `python -m rlframe.rewards._worker FD`. Judges task after task until the pipe closes.

It says one thing per task, in order, as soon as it is done, so that the judge always knows which task a silent or dead
worker is stuck in.
"""

import faulthandler
import math
import os
import sys
from multiprocessing.connection import Connection
from numbers import Real

from rlframe.rewards.base import Attempt, Reward, build_reward
from rlframe.rewards.config import RewardConfig

ORPHAN_GRACE_S = 5.0
"""The judge kills a stuck worker; a worker whose judge was killed ends itself this much later."""


def main() -> None:
    """Speaks the judge's protocol over the inherited pipe: config, None when ready, then chunks and their results."""
    connection = Connection(int(sys.argv[1]))
    config: RewardConfig = connection.recv()
    try:
        rewards = {key: build_reward(part, key=f"reward.parts.{key}") for key, part in config.parts.items()}
    except Exception as error:  # said to the judge, which raises it
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    with open(os.devnull, "w") as nowhere:
        while True:
            try:
                tasks: list[tuple[Attempt, str]] = connection.recv()
                limit = config.timeout_s * len(tasks) + ORPHAN_GRACE_S
                faulthandler.dump_traceback_later(limit, exit=True, file=nowhere)
                for attempt, part in tasks:
                    connection.send(judge(rewards[part], attempt))
                faulthandler.cancel_dump_traceback_later()
            except (EOFError, OSError):
                return


def judge(reward: Reward, attempt: Attempt) -> float | str:
    """The score, or why there is none."""
    try:
        score = reward.score(attempt)
        if not isinstance(score, Real) or not math.isfinite(score):
            return f"a reward must be a finite number, got {score!r:.60}"
        return float(score)
    except Exception as error:  # one failed sample, counted by the judge
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
