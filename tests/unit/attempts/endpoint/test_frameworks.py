"""Frameworks of others at the endpoint, as they are: what they do there is one sequence, token by token."""

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerBase

from rlframe.environments.base import Endpoint
from rlframe.types.rollout import SamplingParams
from tests.unit.attempts.endpoint.bench import (
    CALL,
    END,
    QUESTION,
    Played,
    load_words,
    play,
    uses_the_calculator,
)

pytestmark = pytest.mark.later
FLAT_CALCULATOR: Any = {
    "type": "function",
    "name": "calculator",
    "description": "Calculates.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    "strict": True,
}
LONG = SamplingParams(max_tokens=400)


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    return load_words()


def check_one_sequence(played: Played, turns: int = 2) -> None:
    """All calls went on after each other, and what they sampled is what is trained on."""
    played.check_exact()
    (rollout,) = played.sequences
    assert len(rollout.turns) == turns and "<|tool|>156" in played.texts[0]


@pytest.mark.parametrize("streams", [False, True])
def test_the_responses_api_by_the_openai_client(words: PreTrainedTokenizerBase, streams: bool) -> None:
    async def ask(client: AsyncOpenAI, items: list[Any]) -> Any:
        named: Any = {"model": "m", "instructions": "be brief", "input": items, "tools": [FLAT_CALCULATOR]}
        if not streams:
            return await client.responses.create(**named)
        async with client.responses.stream(**named) as stream:
            names = [event.type async for event in stream]
            assert names[0] == "response.created" and names[-1] == "response.completed"
            return await stream.get_final_response()

    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        items: list[Any] = [QUESTION]
        first = await ask(client, items)
        assert [each.type for each in first.output] == ["message", "function_call"]
        assert first.output_text == "Let me see." and first.usage.input_tokens > 0
        call = first.output[1]
        items += [each.to_dict() for each in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "156"}]
        second = await ask(client, items)
        assert second.output_text == "156" and second.status == "completed"

    def policy(before: str) -> str:
        said = uses_the_calculator(before)
        return "Let me see." + said if said == CALL else said

    check_one_sequence(play(agent, policy, words=words, sampling=LONG))


def test_what_the_responses_api_cannot_do_here_is_refused(words: PreTrainedTokenizerBase) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        for parameters, why in (
            ({"previous_response_id": "resp_1"}, "nothing is stored"),
            ({"tools": [{"type": "web_search"}]}, "must be one of function"),
            ({"text": {"format": {"type": "json_object"}}}, "text.format"),
            ({"input": []}, "at least one item"),
            ({"input": [{"type": "item_reference", "id": "1"}]}, "got 'item_reference'"),
        ):
            with pytest.raises(openai.BadRequestError, match=why):
                await client.responses.create(**{"model": "m", "input": "x", **parameters})
        cut = await client.responses.create(model="m", input="x", max_output_tokens=2)
        assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"

    play(agent, lambda before: "many words" + END, words=words)


@pytest.mark.parametrize(
    ("api", "streams"),
    [
        pytest.param("chat_completions", False, marks=pytest.mark.thorough),
        ("chat_completions", True),
        pytest.param("responses", False, marks=pytest.mark.thorough),
        ("responses", True),
    ],
)
def test_openai_agents(words: PreTrainedTokenizerBase, api: str, streams: bool) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def calculator(expression: str) -> str:
        """Calculates.

        Args:
            expression: what to calculate.
        """
        return str(eval(expression))

    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        kind = agents.OpenAIChatCompletionsModel if api == "chat_completions" else agents.OpenAIResponsesModel
        made = agents.Agent(
            name="a", instructions="Use the tool.", tools=[calculator], model=kind("policy", openai_client=client)
        )
        if streams:
            result = agents.Runner.run_streamed(made, "12*13=")
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(made, "12*13=")
        assert result.final_output == "156"

    check_one_sequence(play(agent, words=words, sampling=LONG))


def test_smolagents(words: PreTrainedTokenizerBase) -> None:
    smolagents = pytest.importorskip("smolagents")

    tool = smolagents.tool

    @tool
    def calculator(expression: str) -> str:
        """Calculates.

        Args:
            expression: what to calculate.
        """
        return str(eval(expression))

    def run(endpoint: Endpoint) -> None:
        model = smolagents.OpenAIModel(model_id="policy", api_base=endpoint.url, api_key=endpoint.key)
        agent = smolagents.ToolCallingAgent(tools=[calculator], model=model, verbosity_level=0, max_steps=4)
        assert agent.run("12*13=") == "156"

    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        await asyncio.to_thread(run, endpoint)

    def policy(before: str) -> str:
        if "Observation" not in before.rpartition("12*13=")[2]:
            return CALL
        return '<tool_call>{"name": "final_answer", "arguments": {"answer": "156"}}</tool_call>' + END

    played = play(agent, policy, words=words, sampling=LONG, most=100_000)
    played.check_exact()
    # It writes its calls into the next prompt as text of its own, so that nothing goes on after what was sampled.
    assert [len(each.turns) for each in played.sequences] == [1, 1]
    assert "Calling tools:" in played.texts[1] and "<tool_call>" not in played.texts[1].rpartition("12*13=")[0]
