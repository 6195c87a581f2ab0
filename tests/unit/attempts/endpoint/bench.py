"""A real server with the real desk of one attempt, and a policy that is a function of text."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerBase

from rlframe.attempts.endpoint.desk import Desk
from rlframe.attempts.endpoint.server import Server
from rlframe.attempts.rendering.config import RenderingConfig
from rlframe.attempts.rendering.renderer import Renderer
from rlframe.attempts.turns import Hosted, Task
from rlframe.data.config import DataConfig
from rlframe.environments.base import Endpoint
from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, SamplingParams

END = "<|end|>"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*13"}}</tool_call>' + END
QUESTION = {"role": "user", "content": "12*13="}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
Policy = Callable[[str], str]
"""Returns the policy's response to a sequence, both as text. One that does not end with END was cut off."""


def load_words() -> PreTrainedTokenizerBase:
    """The tokenizer of the embedded model that calls tools: one token a byte, and special tokens."""
    return tokenizer.load(resolve(ModelConfig(path="qwen3_moe_tiny_tools")))


def uses_the_calculator(before: str) -> str:
    return "156" + END if "<|tool|>" in before else CALL


@dataclass
class Scripted:
    """An engine whose responses are a function of text, and its records."""

    words: PreTrainedTokenizerBase
    policy: Policy
    asked: list[GenerationRequest] = field(default_factory=list)
    saw: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Tokens of each request and of its response."""
    aborted: int = 0
    interruptions: int = 0
    """Number of requests that are interrupted after two tokens."""
    version: int = 0
    hold: asyncio.Event | None = None
    """Set when requests may be answered."""

    async def sample(self, request: GenerationRequest) -> Completion:
        self.asked.append(request)
        try:
            if self.hold is not None:
                await self.hold.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        before = request.input.token_ids[: request.prompt_tokens].tolist()
        said = self.policy(str(self.words.decode(before)))
        ids = self.words.encode(said, add_special_tokens=False)
        reason = FinishReason.STOP if said.endswith(END) else FinishReason.LENGTH
        for stop in request.sampling.stop:
            if stop in said:
                ids, reason = self.words.encode(said[: said.index(stop) + len(stop)]), FinishReason.STOP
        if len(ids) > request.sampling.max_tokens:
            ids, reason = ids[: request.sampling.max_tokens], FinishReason.LENGTH
        ids = ids[request.first_position :]
        if self.interruptions:
            self.interruptions -= 1
            ids, reason = ids[:2], FinishReason.ABORT
        else:
            self.saw.append((before, self.words.encode(said, add_special_tokens=False)))
        logprobs = [-0.25 * (1 + token % 4) for token in ids]
        versions = [self.version] * len(ids)
        self.version += reason is FinishReason.ABORT
        return Completion(token_ids=ids, logprobs=logprobs, versions=versions, finish_reason=reason)


@dataclass
class Played:
    """What is left of an attempt."""

    task: Task
    events: dict[str, int]
    engine: Scripted
    words: PreTrainedTokenizerBase

    @property
    def sequences(self) -> list[Rollout]:
        """The sequences in their order."""
        return sorted(self.task.group.rollouts, key=lambda each: each.sequence)

    @property
    def texts(self) -> list[str]:
        """The sequences as text."""
        return [str(self.words.decode(each.token_ids)) for each in self.sequences]

    def check_exact(self) -> None:
        """Every response is in one sequence and nowhere else, after the tokens that the engine saw before it, and has a
        record."""
        found = []
        for each in self.sequences:
            assert (each.first_turn, len(each.records)) == (len(found), each.num_turns)
            assert each.first_sampled == sum(len(tokens) for _, tokens in found)
            for start, end in each.turns:
                found.append((each.token_ids[:start].tolist(), each.token_ids[start:end].tolist()))
                expected = [-0.25 * (1 + token % 4) for token in each.token_ids[start:end].tolist()]
                assert each.rollout_logprobs[start:end].tolist() == expected
        assert sorted(found) == sorted(self.engine.saw)


Agent = Callable[[Endpoint, AsyncOpenAI], Awaitable[Any]]


def play(
    agent: Agent,
    policy: Policy = uses_the_calculator,
    *,
    words: PreTrainedTokenizerBase,
    template: str | None = None,
    rendering: RenderingConfig | None = None,
    most: int = 4096,
    max_calls: int = 50,
    sampling: SamplingParams | None = None,
    engine: Scripted | None = None,
    ending: Callable[[Callable[[], None]], None] = lambda end: None,
) -> Played:
    """Lets an agent run in this process until it returns, and returns what is left.

    Args:
        ending: gets what ends the attempt while the agent goes on.
    """
    if template is not None:
        words = copy.deepcopy(words)
        words.chat_template = template
    engine = engine or Scripted(words, policy)
    events: dict[str, int] = {}

    def count(event: str) -> None:
        events[str(event)] = events.get(str(event), 0) + 1

    prompt = Prompt(id="p", messages=(QUESTION,), text="", input=ModelInput((1, 2)), answer="156")
    task = Task(group=Group.begin("0", prompt, 1), sampling=sampling or SamplingParams(max_tokens=100), step=1).begun()
    hosted = Hosted(
        task=task,
        rollout=task.group.rollouts[0],
        progress=task.progress[0],
        sample=engine.sample,
        seed=lambda turn: turn,
        most=most,
        count=count,
    )
    language = Renderer(words, rendering or RenderingConfig(), data=DataConfig())
    decode = partial(words.decode, skip_special_tokens=True)
    asyncio.run(served(hosted, language, agent, decode=decode, max_calls=max_calls, ending=ending))
    return Played(task, events, engine, words)


async def served(
    hosted: Hosted,
    language: Renderer,
    agent: Agent,
    *,
    decode: Callable[[list[int]], str],
    max_calls: int,
    ending: Callable[[Callable[[], None]], None],
) -> None:
    """Lets an agent run with a server."""
    server = Server("127.0.0.1")
    desk = Desk(hosted, language, decode, max_calls=max_calls)
    number, endpoint = await server.open(desk, seed=0)

    def end() -> None:
        if not desk.is_over:
            server.close(number)
            desk.close()

    ending(end)
    try:
        async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
            await agent(endpoint, client)
            end()
    finally:
        await server.stop()
