"""Agents that behave well or badly, by the id of their prompt. Sessions import them."""

import asyncio
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from rlframe.environments.base import Endpoint, Step
from rlframe.types.prompt import Prompt


def ask(endpoint: Endpoint, text: str, *, earlier: list[Any] | None = None) -> str:
    """Returns what the policy says, asked as simply as can be."""
    messages = [*(earlier or []), {"role": "user", "content": text}]
    return post(endpoint, json.dumps({"messages": messages}).encode())["choices"][0]["message"]["content"]


def post(endpoint: Endpoint, body: bytes) -> Any:
    headers = {"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{endpoint.url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def two_turns(endpoint: Endpoint) -> str:
    first = ask(endpoint, "one")
    return ask(endpoint, "two", earlier=[{"role": "user", "content": "one"}, {"role": "assistant", "content": first}])


def good(prompt: Prompt, endpoint: Endpoint) -> float:
    two_turns(endpoint)
    return 1.0


def says_more(prompt: Prompt, endpoint: Endpoint) -> dict[str, Any]:
    two_turns(endpoint)
    return {"reward": 0.5, "metrics": {"seed": float(endpoint.seed % 1000)}}


def masks(prompt: Prompt, endpoint: Endpoint) -> Any:
    two_turns(endpoint)
    return Step(verdict="mask")


def raises(prompt: Prompt, endpoint: Endpoint) -> None:
    two_turns(endpoint)
    raise KeyError("no such file")


def exits(prompt: Prompt, endpoint: Endpoint) -> None:
    sys.exit(3)


def never_calls(prompt: Prompt, endpoint: Endpoint) -> float:
    return 1.0


def says_nonsense(prompt: Prompt, endpoint: Endpoint) -> str:
    two_turns(endpoint)
    return "very good"


def says_too_much(prompt: Prompt, endpoint: Endpoint) -> dict[str, Any]:
    two_turns(endpoint)
    return {"score": 1.0}


def sends_garbage(prompt: Prompt, endpoint: Endpoint) -> None:
    for body in (b"{", b"null", b'{"messages": 3}'):
        try:
            post(endpoint, body)
        except urllib.error.HTTPError as error:
            error.close()
    raise ValueError("it does not understand me")


def calls_twenty_times_at_once(prompt: Prompt, endpoint: Endpoint) -> float:
    threads = [threading.Thread(target=ask, args=(endpoint, f"{index}")) for index in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1.0


def calls_for_ever(prompt: Prompt, endpoint: Endpoint) -> None:
    while True:
        ask(endpoint, "more")


def heeds_the_limit(prompt: Prompt, endpoint: Endpoint) -> float:
    try:
        calls_for_ever(prompt, endpoint)
    except urllib.error.HTTPError as error:
        error.close()
    return 0.25


def leaves_a_call_behind(prompt: Prompt, endpoint: Endpoint) -> float:
    two_turns(endpoint)
    threading.Thread(target=quietly, args=(endpoint, "slow"), daemon=True).start()
    # Until the call is there, which the policy holds up.
    while ask(endpoint, "is it there?") != "yes":
        time.sleep(0.01)
    return 1.0


def quietly(endpoint: Endpoint, text: str) -> None:
    try:
        ask(endpoint, text)
    except urllib.error.HTTPError as error:
        error.close()


async def hangs(prompt: Prompt, endpoint: Endpoint) -> None:
    await asyncio.to_thread(two_turns, endpoint)
    await asyncio.Event().wait()


async def ignores_its_cancellation(prompt: Prompt, endpoint: Endpoint) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


def blocks_the_process(prompt: Prompt, endpoint: Endpoint) -> None:
    os.kill(os.getpid(), 19)


BARRIER = threading.Barrier(3)
THERE: set[str] = set()


def waits_for_three(prompt: Prompt, endpoint: Endpoint) -> float:
    THERE.add(prompt.id)
    BARRIER.wait()
    most = len(THERE)
    BARRIER.wait()
    THERE.discard(prompt.id)
    BARRIER.wait()
    ask(endpoint, "done")
    return float(most)


def by_prompt(prompt: Prompt, endpoint: Endpoint, **options: Any) -> Any:
    """Behaves as the prompt's id says."""
    if prompt.id.startswith("waits_for_three"):
        return waits_for_three(prompt, endpoint)
    return globals()[prompt.id](prompt, endpoint)


async def by_prompt_in_the_loop(prompt: Prompt, endpoint: Endpoint) -> Any:
    """The same, for coroutine functions."""
    return await globals()[prompt.id](prompt, endpoint)
