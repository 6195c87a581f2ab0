"""An environment that misbehaves in one of many ways when its prompt says so, and counts to three for all others."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlframe.environments.base import Environment, Step, Turn
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt

GOOD = "good"
TURNS = 3


@dataclass(kw_only=True, slots=True)
class MisbehavingConfig:
    """No settings."""


class Misbehaving(Environment):
    """Ends good attempts in their third turn, with a reward of 1."""

    def __init__(self, config: MisbehavingConfig):
        self._turns = 0

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        self._kind = prompt.id
        if self._kind.startswith("reset "):
            return await WAYS[self._kind.removeprefix("reset ")]()
        return [{"role": "user", "content": prompt.text}]

    async def step(self, turn: Turn) -> Step:
        await asyncio.sleep(0.01)
        if self._kind in WAYS:
            return await WAYS[self._kind]()
        self._turns += 1
        if self._turns == TURNS:
            return Step(done=True, reward=1.0)
        return Step(messages=[{"role": "user", "content": f"{self._turns}"}])

    async def close(self) -> None:
        if self._kind == "raises in close":
            raise OSError("the session cannot be closed")
        if self._kind == "hangs in close":
            await asyncio.sleep(3600)


class Hostile(Exception):
    """Its text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


WAYS: dict[str, Any] = {}
"""The ways to misbehave, by their names."""


def way(function: Any) -> Any:
    """Adds a way."""
    WAYS[function.__name__.replace("_", " ")] = function
    return function


@way
async def raises() -> Step:
    raise KeyError("no such tool")


@way
async def raises_without_a_text() -> Step:
    raise Hostile


@way
async def exits() -> Step:
    sys.exit(3)


@way
async def interrupts_itself() -> Step:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(3600)
    return Step(done=True)


@way
async def cancels_itself() -> Step:
    raise asyncio.CancelledError


@way
async def waits_for_ever() -> Step:
    await asyncio.sleep(3600)
    return Step(done=True)


@way
async def ignores_its_cancellation() -> Step:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass


@way
async def computes_for_ever() -> Step:
    while True:
        pass


@way
async def blocks_for_ever() -> Step:
    time.sleep(3600)
    return Step(done=True)


@way
async def waits_for_a_thread_that_hangs() -> Step:
    await asyncio.to_thread(time.sleep, 3600)
    return Step(done=True)


@way
async def leaves_at_once() -> Step:
    os._exit(0)


@way
async def kills_itself() -> Step:
    os.kill(os.getpid(), signal.SIGKILL)
    return Step(done=True)


@way
async def crashes() -> Step:
    os.kill(os.getpid(), signal.SIGSEGV)
    return Step(done=True)


@way
async def stops_itself() -> Step:
    os.kill(os.getpid(), signal.SIGSTOP)
    return Step(done=True)


@way
async def forks_and_both_return() -> Step:
    os.fork()
    return Step(messages=[{"role": "user", "content": "twice"}])


@way
async def forks_and_hangs() -> Step:
    if os.fork() == 0:
        while True:
            time.sleep(3600)
    await asyncio.sleep(3600)
    return Step(done=True)


@way
async def starts_a_program_and_waits() -> Step:
    subprocess.run(["sleep", "3600"], check=True)
    return Step(done=True)


@way
async def takes_all_memory() -> Step:
    held = [bytearray(1 << 24) for _ in range(1 << 16)]
    return Step(done=len(held) > 0)


@way
async def writes_a_huge_file() -> Step:
    path = f"/tmp/rlframe-misbehaving-{os.getpid()}"
    try:
        with open(path, "wb") as file:
            file.seek((1 << 30) - 1)
            file.write(b"ab")
            file.flush()
    finally:
        os.unlink(path)
    return Step(done=True)


@way
async def prints_without_end_and_hangs() -> Step:
    for _ in range(1 << 14):
        print("x" * 1000)
    while True:
        time.sleep(0.01)


@way
async def answers_by_itself() -> Step:
    for descriptor in range(3, 16):
        try:
            os.write(descriptor, b'["key", 0, null, null, {"done": true, "reward": 9.0}]\n')
        except OSError:
            pass
    await asyncio.sleep(0.2)
    return Step(done=True, reward=9.0)


@way
async def closes_every_descriptor() -> Step:
    os.closerange(3, 4096)
    return Step(done=True)


@way
async def leaves_later() -> Step:
    threading.Timer(0.1, os._exit, [0]).start()
    return Step(messages=[{"role": "user", "content": "?"}])


@way
async def exits_in_a_task() -> Step:
    async def leave() -> None:
        sys.exit(5)

    asyncio.get_running_loop().create_task(leave())
    await asyncio.sleep(3600)
    return Step(done=True)


@way
async def stops_the_loop() -> Step:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(3600)
    return Step(done=True)


@way
async def raises_in_a_thread_and_hangs() -> Step:
    threading.Thread(target=lambda: 1 / 0).start()
    await asyncio.sleep(3600)
    return Step(done=True)


@way
async def returns_nothing() -> Any:
    return None


@way
async def returns_text() -> Any:
    return "done"


@way
async def returns_a_dict() -> Any:
    return {"done": True}


@way
async def returns_a_reward_of_nan() -> Step:
    return Step(done=True, reward=float("nan"))


@way
async def returns_a_huge_reward() -> Step:
    return Step(done=True, reward=1e30)


@way
async def returns_no_message_and_goes_on() -> Step:
    return Step()


@way
async def speaks_for_the_policy() -> Step:
    return Step(messages=[{"role": "assistant", "content": "42"}])


@way
async def returns_bytes() -> Step:
    return Step(messages=[{"role": "user", "content": b"42"}])


@way
async def returns_too_much() -> Step:
    return Step(messages=[{"role": "user", "content": "x" * (1 << 21)}])


@way
async def returns_half_a_character() -> Step:
    return Step(messages=[{"role": "user", "content": "\ud800"}])


@way
async def recurses_for_ever() -> Step:
    def deeper(number: int) -> int:
        return deeper(number + 1)

    return Step(done=bool(deeper(0)))
