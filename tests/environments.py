"""Environments for tests, which workers import by name."""

import json
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlframe.environments.base import Endpoint, Environment, Step, Turn
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt


@dataclass(kw_only=True, slots=True)
class OneMoreTurnConfig:
    """Holds the answer."""

    answer: str = "w10"


class OneMoreTurn(Environment):
    """Answers the first response, and ends the attempt after the second."""

    deterministic = True

    def __init__(self, config: OneMoreTurnConfig):
        self._answer, self._answered = config.answer, False

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        return [{"role": "user", "content": prompt.text}]

    async def step(self, turn: Turn) -> Step:
        if self._answered:
            return Step(done=True)
        self._answered = True
        return Step(messages=[{"role": "user", "content": self._answer}])


class FailsOnOne(Environment):
    """Raises for the prompt p1, and ends every other attempt after its first response."""

    def __init__(self, config: OneMoreTurnConfig):
        pass

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        self._id = prompt.id
        return [{"role": "user", "content": prompt.text}]

    async def step(self, turn: Turn) -> Step:
        if self._id == "p1":
            raise RuntimeError("no session left")
        return Step(done=True)


def asks_three_times(prompt: Prompt, endpoint: Endpoint) -> float:
    """Asks, asks on, and begins again."""
    assert endpoint.url.startswith("http://127.0.0.1:"), "Ray is alone on this machine"

    def ask(*messages: Any, **named: Any) -> Any:
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        body = json.dumps({"model": "policy", "messages": messages, **named}).encode()
        request = urllib.request.Request(f"{endpoint.url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]

    question = {"role": "user", "content": "w7"}
    first = ask(question)
    ask(question, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "w10"})
    ask(question, max_tokens=2, temperature=0.0)
    return 1.0
