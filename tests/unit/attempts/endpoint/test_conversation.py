"""Calls that go on after an earlier one, and those that begin a sequence: each response is trained on once, after the
tokens that its engine saw."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerBase

from rlframe.attempts.rendering.config import History, RenderingConfig
from rlframe.attempts.turns import Event
from rlframe.environments.base import Endpoint
from rlframe.types.rollout import SamplingParams
from tests.unit.attempts.endpoint.bench import CALCULATOR, END, QUESTION, load_words, play

OPENED = "<|user|>12*13=<|end|><|assistant|>"
FORGETFUL = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if loop.last or message.role != 'assistant' %}{{ message.content }}"
    "{% else %}{{ message.content.split(')')[-1] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Writes of earlier turns only what follows their last bracket, as thinking templates do."""


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    return load_words()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


async def ask(client: AsyncOpenAI, *messages: Any, **named: Any) -> str:
    said = await client.chat.completions.create(model="m", messages=list(messages), **named)
    return said.choices[0].message.content or ""


def counts(before: str) -> str:
    return f"{before.count('<|assistant|>')}{END}"


def test_what_goes_on_shares_the_tokens_and_what_does_not_begins_a_sequence(words: PreTrainedTokenizerBase) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        one = [QUESTION, assistant(await ask(client, QUESTION)), user("a")]
        two = [*one, assistant(await ask(client, *one)), user("b")]
        # Another system prompt, words that the policy did not say, an earlier answer left out, other tools.
        await ask(client, {"role": "system", "content": "be brief"}, *one)
        await ask(client, QUESTION, assistant("edited"), user("a"))
        await ask(client, QUESTION, user("a"))
        await ask(client, *one, tools=[CALCULATOR])
        # Content in parts is the same content, and an id that was not given changes nothing.
        parts = {"role": "assistant", "content": [{"type": "text", "text": "2"}]}
        await ask(client, *one, parts, user("b"))
        assert await ask(client, *two) == "3"

    played = play(agent, counts, words=words)
    played.check_exact()
    assert played.texts == [
        "<|system|>be brief<|end|>" + OPENED + "1<|end|><|user|>a<|end|><|assistant|>2<|end|>",
        OPENED + "edited<|end|><|user|>a<|end|><|assistant|>2<|end|>",
        "<|user|>12*13=<|end|><|user|>a<|end|><|assistant|>1<|end|>",
        "<|system|>calculator(expression)<|end|>" + OPENED + "1<|end|><|user|>a<|end|><|assistant|>2<|end|>",
        OPENED + "1<|end|><|user|>a<|end|><|assistant|>2<|end|><|user|>b<|end|><|assistant|>3<|end|>",
        OPENED + "1<|end|><|user|>a<|end|><|assistant|>2<|end|><|user|>b<|end|><|assistant|>3<|end|>",
    ]
    # The two calls with the same conversation share its tokens; those of the answers are trained on once.
    assert [len(each.turns) for each in played.sequences] == [1, 1, 1, 1, 3, 1]
    assert [each.sequence for each in played.sequences] == list(range(6))
    assert played.events == {Event.FORKED: 5}
    for each in played.sequences:
        assert each.messages[-1]["role"] == "assistant" and each.text == each.messages[-1]["content"]


def test_calls_at_the_same_time_are_answered_at_the_same_time(words: PreTrainedTokenizerBase) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        first = assistant(await ask(client, QUESTION))
        said = await asyncio.gather(*(ask(client, QUESTION, first, user(f"{index}?")) for index in range(20)))
        assert said == ["2"] * 20
        # The same again, twenty times: no answer is taken for another one.
        await asyncio.gather(*(ask(client, QUESTION) for _ in range(20)))

    played = play(agent, counts, words=words)
    played.check_exact()
    assert len(played.sequences) == 40 and sum(len(each.turns) for each in played.sequences) == 41
    assert len({request.seed for request in played.engine.asked}) == 41
    assert sum(text.startswith(OPENED + "1<|end|><|user|>") for text in played.texts) == 20


def test_one_of_two_equal_answers_is_gone_on_with_by_each_call(words: PreTrainedTokenizerBase) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        for _ in range(2):
            await ask(client, QUESTION)
        for text in "ab":
            await ask(client, QUESTION, assistant("1"), user(text))

    played = play(agent, counts, words=words)
    played.check_exact()
    assert [len(each.turns) for each in played.sequences] == [2, 2] and played.events == {Event.FORKED: 1}


def test_bytes_that_are_no_text_stay_the_tokens_that_were_sampled(words: PreTrainedTokenizerBase) -> None:
    """What the agent reads of them would be other tokens."""

    class Broken:
        def __init__(self, words: PreTrainedTokenizerBase):
            self._words = words

        def __call__(self, before: str) -> str:
            return "\u00e9" + END

    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        said = await ask(client, QUESTION, max_tokens=1)
        assert said == "\ufffd"
        await ask(client, QUESTION, assistant(said), user("and?"))

    played = play(agent, Broken(words), words=words)
    (rollout,) = played.sequences
    start, end = rollout.turns[0]
    assert end - start == 1 and rollout.token_ids[start] == words.encode("\u00e9", add_special_tokens=False)[0]


def test_a_call_keeps_its_answer_whatever_ids_the_agent_gives(words: PreTrainedTokenizerBase) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'

    def policy(before: str) -> str:
        return ("done" if "<|tool|>" in before else call + call) + END

    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        said = await client.chat.completions.create(model="m", messages=[QUESTION], tools=[CALCULATOR])
        calls = said.choices[0].message.tool_calls
        assert calls and len({each.id for each in calls}) == 2
        theirs = [
            {"id": name, "type": "function", "function": each.function} for name, each in zip("xy", calls, strict=True)
        ]
        results = [{"role": "tool", "tool_call_id": name, "content": name * 2} for name in "xy"]
        separately = [assistant("", tool_calls=[each]) for each in theirs]
        for messages in (
            [QUESTION, {"role": "assistant", "tool_calls": theirs}, *results],
            # Some agents send each call as a message of its own.
            [QUESTION, *separately, *results],
        ):
            assert await ask(client, *messages, tools=[CALCULATOR]) == "done"

    played = play(agent, policy, words=words, sampling=SamplingParams(max_tokens=300))
    played.check_exact()
    assert [len(each.turns) for each in played.sequences] == [2, 1] and played.texts[0] == played.texts[1]
    own = [call["id"] for call in played.sequences[0].messages[1]["tool_calls"]]
    assert [each["tool_call_id"] for each in played.sequences[0].messages[2:4]] == own
    assert [each["name"] for each in played.sequences[0].messages[2:4]] == ["calculator"] * 2


@pytest.mark.parametrize("history", list(History))
def test_a_history_that_the_template_rewrites_is_handled_as_the_setting_says(
    words: PreTrainedTokenizerBase, history: History
) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        messages: list[Any] = [QUESTION]
        for text in "abc":
            messages += [assistant(await ask(client, *messages)), user(text)]

    played = play(
        agent,
        lambda before: f"(hm)go{END}",
        words=words,
        template=FORGETFUL,
        rendering=RenderingConfig(history=history, reasoning="none"),
    )
    played.check_exact()
    if history is History.APPEND:
        assert played.texts == [
            OPENED + "(hm)go<|end|><|user|>a<|end|><|assistant|>(hm)go<|end|><|user|>b<|end|><|assistant|>(hm)go<|end|>"
        ]
    else:
        assert played.texts == [
            OPENED + "(hm)go<|end|>",
            OPENED + "go<|end|><|user|>a<|end|><|assistant|>(hm)go<|end|>",
            OPENED + "go<|end|><|user|>a<|end|><|assistant|>go<|end|><|user|>b<|end|><|assistant|>(hm)go<|end|>",
        ]
        assert played.events == {Event.FORKED: 2}


def test_reasoning_that_the_agent_does_not_send_back_stays_where_it_was_sampled(
    words: PreTrainedTokenizerBase,
) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        said = (await client.chat.completions.create(model="m", messages=[QUESTION])).choices[0].message
        assert said.content == "156" and said.reasoning_content == "12 times 13"
        await ask(client, QUESTION, assistant("156"), user("sure?"))
        await ask(client, QUESTION, assistant("156", reasoning_content="12 times 13"), user("sure?"))

    played = play(
        agent,
        lambda before: f"<think>12 times 13</think>156{END}",
        words=words,
        rendering=RenderingConfig(reasoning="think"),
    )
    played.check_exact()
    assert [len(each.turns) for each in played.sequences] == [2, 1]
    assert played.texts[0] == played.texts[1] and played.texts[0].count("12 times 13") == 2
