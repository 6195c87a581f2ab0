"""Rewards that misbehave: each must stay one failed sample, or a sentence, and change no other rollout's score."""

import itertools
import tempfile
import time
from pathlib import Path

from rlframe.rewards.config import RewardConfig, RewardTerm
from rlframe.rewards.runner import RewardRunner, try_start
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, Rollout
from rlframe.utils.errors import RewardError
from tests.campaigns.trials import Outcome, Trial, write

USER_CODE = """
import ctypes, os, signal, subprocess, sys, threading, time

class Odd(Exception):
    def __str__(self):
        raise ValueError("no text")

class Unseen:
    def __repr__(self):
        raise ValueError("no repr")

def descriptors():
    return [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]

def write_everywhere(text):
    for descriptor in descriptors():
        try:
            os.write(descriptor, text)
        except OSError:
            pass

def recurse():
    return recurse() + 1

def answer_for_others():
    if os.fork() == 0:
        return 1.0
    time.sleep(0.1)
    raise KeyError("the parent raises")

def fork_and_raise():
    if os.fork() == 0:
        raise KeyError("the child raises")
    time.sleep(0.1)
    raise KeyError("so does the parent")

DEEDS = {
    "hang in C": lambda: 9 ** 9 ** 9 ** 9,
    "crash": lambda: os._exit(3),
    "exit": sys.exit,
    "exit with a word": lambda: sys.exit("bye"),
    "child": lambda: subprocess.run(["sleep", "600.125"]),
    "fork": answer_for_others,
    "fork and raise": fork_and_raise,
    "print and raise": lambda: print("x" * 1_000_000) or {}["broken"],
    "print for ever": lambda: [print("x" * 1000) for _ in iter(int, 1)],
    "print to both": lambda: [os.write(2, b"y" * 100_000) for _ in range(50)] and {}["broken"],
    "garbage in the pipes": lambda: write_everywhere(b"[1, 2, 3]\\n\\x80\\x00\\xff\\n"),
    "a long line in the pipes": lambda: write_everywhere(b"z" * 200_000),
    "forged": lambda: write_everywhere(b'["0", 7, 1.0]\\n'),
    "close everything": lambda: os.closerange(0, 4096),
    "memory": lambda: len(bytearray(40 << 30)),
    "memory bit by bit": lambda: [bytearray(1 << 28) for _ in iter(int, 1)],
    "segfault": lambda: ctypes.string_at(0),
    "recursion": recurse,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(5),
}

def grade(response, answer):
    if response == "hang":
        while True:
            pass
    if response == "raise":
        raise KeyError("broken")
    if response == "raise without text":
        raise Odd
    if response in DEEDS:
        return DEEDS[response]()
    special = {
        "nan": float("nan"), "inf": float("inf"), "text": "1", "huge": 10 ** 400, "absurd": 1e308, "large": -1.1e6,
        "unseen": Unseen(), "list": [1.0, 2.0], "complex": 1j, "nothing": None,
    }
    return special[response] if response in special else response == answer

def loaded(response, answer):
    return float(response in sys.modules)

def moody(response, answer):
    return None if response == "nothing" else float(response == answer)
"""
BAD = [
    "hang", "hang in C", "crash", "exit", "exit with a word", "raise", "raise without text", "fork", "fork and raise",
    "print and raise", "print for ever", "print to both", "garbage in the pipes", "a long line in the pipes", "forged",
    "close everything", "memory", "memory bit by bit", "segfault", "recursion", "stop", "terminate", "interrupt",
    "nan", "inf", "text", "huge", "absurd", "large", "unseen", "list", "complex",
]  # fmt: skip


HANGING = {"hang", "hang in C", "print for ever", "memory bit by bit", "stop"}
"""Those of BAD that end at the limit of time."""
IMPORTED = {
    "sys.exit": "import sys; sys.exit(0)",
    "sys.exit with a word": "import sys; sys.exit('bye')",
    "os._exit": "import os; print('last words'); os._exit(3)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "interrupt": "raise KeyboardInterrupt",
    "division": "1 / 0",
    "syntax": "def",
    "missing package": "import no_such_package",
    "odd error": "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
    "memory": "x = bytearray(40 << 30)",
    "recursion": "def g(): return g() + 1\ng()",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "no function": "f = None",
    "closed pipes": "import os; os.closerange(0, 4096)",
    "garbage": "import os\nfor d in range(3, 50):\n    try: os.write(d, b'x' * 100_000)\n    except OSError: pass",
    "forked": "import os\nif os.fork() == 0:\n    raise SystemExit\n1 / 0",
    "printed": "print('x' * 1_000_000); 1 / 0",
}
"""What a user's file may do while it is imported."""
PLACES = {"first": [0], "last": [23], "twice": [3, 4]}
"""Which of the 24 rollouts meet the deed."""


def rollout(index: int, text: str, answer: str = "good") -> Rollout:
    return Rollout(
        prompt=Prompt(id=str(index), text="p", input=ModelInput((1,)), answer=answer),
        sample_index=0,
        input=ModelInput([1, 5, 2]),
        loss_mask=[False, True, True],
        rollout_logprobs=[0.0, -0.1, -0.2],
        versions=[-1, 0, 0],
        finish_reason=FinishReason.STOP,
        text=text,
    )


def called(folder: Path, deed: str, places: list[int], workers: int) -> Trial:
    """Tries one deed at some places of a batch, twice: the second batch meets replaced workers."""
    name = f"{deed}, rollouts {places}, {workers} workers"
    file = folder / "mine.py"
    file.write_text(USER_CODE)
    rollouts = [rollout(index, "good" if index % 2 else "wrong") for index in range(24)]
    for place in places:
        rollouts[place].text = deed
    parts = {"mine": RewardTerm(name=f"{file}:grade"), "right": RewardTerm(name="exact_match")}
    with RewardRunner(RewardConfig(parts=parts, timeout_s=1.0, memory_gb=1.0, workers=workers)) as runner:
        runner.score([rollout(0, "good")])
        start = time.monotonic()
        for _ in range(2):
            runner.score(rollouts)
            wrong = [
                one.prompt.id
                for index, one in enumerate(rollouts)
                if one.reward_failed != (index in places) or one.reward != (0 if index in places else 2 * (index % 2))
            ]
            if wrong:
                return Trial(name=name, outcome=Outcome.WRONG, said=f"rollouts {wrong} have other scores")
        seconds = (time.monotonic() - start) / 2
        return Trial(name=name, outcome=Outcome.SURVIVED, said=f"{runner.failures}", seconds=seconds)


def imported(folder: Path, name: str) -> Trial:
    """Tries one deed of a file that is imported."""
    file = folder / "mine.py"
    file.write_text(f"{IMPORTED[name]}\n" + ("" if name == "no function" else "def f(response, answer): return 1\n"))
    start = time.monotonic()
    try:
        try_start(RewardConfig(parts={"mine": RewardTerm(name=f"{file}:f")}))
    except RewardError as error:
        said = str(error).splitlines()[0]
        return Trial(name=f"import: {name}", outcome=Outcome.REFUSED, said=said, seconds=time.monotonic() - start)
    return Trial(name=f"import: {name}", outcome=Outcome.WRONG, said="was taken")


def trials() -> list[Trial]:
    """Returns every deed at every place, with one worker and with three, and every deed at import."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for deed, (_, places), workers in itertools.product(BAD, PLACES.items(), (1, 3)):
            found.append(called(Path(folder), deed, places, workers))
        for name in IMPORTED:
            found.append(imported(Path(folder), name))
    return found


if __name__ == "__main__":
    print(write("rewards", trials(), command="python -m tests.campaigns.rewards").row())
