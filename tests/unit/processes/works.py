"""What the tests of the pool run. Workers import this file."""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlframe.processes.work import TaskFailed, Work
from tests.until import until


@dataclass(frozen=True)
class Arithmetic(Work):
    """Evaluates sums; knows words that misbehave."""

    bias: int = 0
    gate: str = ""
    """What is slow lasts until there is a file of this name."""

    def prepare(self) -> Callable[[Any], Any]:
        """Returns what evaluates."""
        words: dict[str, Callable[[], Any]] = {
            "hang": lambda: time.sleep(600),
            "leave": lambda: os._exit(7),
            "who": os.getpid,
            "long": lambda: "x" * 50_000,
            "too long": lambda: "x" * 70_000,
            "no JSON": lambda: {1, 2},
            "slow": lambda: until(Path(self.gate).exists),
            "talk": lambda: [say(f"{number} " + "x" * 300) for number in range(30)] and None,
        }

        def run(task: Any) -> Any:
            if isinstance(task, str):
                return words[task]()
            if task == [0, 0]:
                raise TaskFailed("nothing to add")
            return {"sum": sum(task) + self.bias}

        return run


@dataclass(frozen=True)
class Slow(Work):
    """Sleeps. A task is its kind, and for how many seconds."""

    def prepare(self) -> Callable[[Any], Any]:
        """Returns what sleeps."""
        return lambda task: time.sleep(task[1])

    def kind(self, task: Any) -> str:
        """See Work."""
        return task[0]


@dataclass(frozen=True)
class Broken(Work):
    """Cannot be prepared."""

    def prepare(self) -> Callable[[Any], Any]:
        """Raises."""
        raise ValueError("no such tool")


@dataclass(frozen=True)
class Deadly(Work):
    """Ends the process instead."""

    def prepare(self) -> Callable[[Any], Any]:
        """Leaves."""
        say("last words")
        os._exit(3)


def say(text: str) -> None:
    """Prints."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Calculator(Work):
    """A step of an environment: the reply to what the model wrote, with the state to go on from."""

    def prepare(self) -> Callable[[Any], Any]:
        """Returns what takes a step."""

        def run(task: Any) -> Any:
            state, said = task
            return {"state": state + 1, "reply": f"step {state}: {said.upper()}"}

        return run
