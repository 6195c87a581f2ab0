"""Chat completions, asked by the openai client: what it is told, and what is trained on."""

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, OpenAI
from openai.types import Model
from transformers import PreTrainedTokenizerBase

from rlframe.attempts.endpoint import chat, responses
from rlframe.attempts.endpoint.asked import Refused
from rlframe.attempts.endpoint.said import Said, SaidCall
from rlframe.attempts.turns import Event
from rlframe.environments.base import Endpoint
from rlframe.types.rollout import FinishReason, SamplingParams
from rlframe.types.turn import state_of_messages
from tests.unit.attempts.endpoint.bench import CALCULATOR, CALL, END, QUESTION, Scripted, load_words, play

OPENED = "<|system|>calculator(expression)<|end|><|user|>12*13=<|end|><|assistant|>"


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    return load_words()


def as_sent_back(message: Any) -> dict[str, Any]:
    """An assistant's message as agents send it back."""
    return message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})


async def converse(client: AsyncOpenAI, **named: Any) -> list[Any]:
    """Answers calls of the calculator until there is none."""
    messages: list[Any] = [QUESTION]
    answers = []
    while True:
        response = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR], **named)
        answers.append(response)
        message = response.choices[0].message
        messages.append(as_sent_back(message))
        if not message.tool_calls:
            return answers
        for call in message.tool_calls:
            value = eval(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(value)})


def test_a_conversation_with_tools_is_one_sequence_as_the_engine_saw_it(words: PreTrainedTokenizerBase) -> None:
    said: list[Any] = []

    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        said.extend(await converse(client))

    played = play(agent, words=words)
    first, second = said
    assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content is None
    assert first.choices[0].message.tool_calls[0].function.model_dump() == {
        "name": "calculator",
        "arguments": '{"expression": "12*13"}',
    }
    assert second.choices[0].finish_reason == "stop" and second.choices[0].message.content == "156"
    assert second.model == "any"
    assert first.usage.prompt_tokens == len(words.encode(OPENED, add_special_tokens=False))
    assert played.texts == [OPENED + CALL + "<|tool|>156<|end|><|assistant|>156<|end|>"]
    played.check_exact()
    (rollout,) = played.sequences
    assert rollout.text == "156" and [each["role"] for each in rollout.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert played.events == {} and played.task.progress[0].turn == 2
    shown = rollout.messages[:1], rollout.messages[2:3]
    assert [record.state for record in rollout.records] == [state_of_messages(each) for each in shown]


def test_a_stream_says_the_same_as_a_whole_answer(words: PreTrainedTokenizerBase) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(model="m", messages=[QUESTION], tools=[CALCULATOR])
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="m",
                messages=[QUESTION],
                tools=[CALCULATOR],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        expected = whole.choices[0].message
        assert "".join(delta.content or "" for delta in deltas) == (expected.content or "") == "Let me see."
        assert "".join(call.function.arguments for call in calls) == expected.tool_calls[0].function.arguments
        assert calls[0].function.name == "calculator" and calls[0].id and calls[0].id != expected.tool_calls[0].id
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage == whole.usage and {chunk.usage for chunk in chunks[:-1]} == {None}

    play(agent, lambda before: "Let me see." + CALL, words=words).check_exact()


def test_a_client_that_blocks_asks_from_a_thread(words: PreTrainedTokenizerBase) -> None:
    def asks(endpoint: Endpoint) -> None:
        with OpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
            assert [each.id for each in client.models.list()] == ["policy"]
            assert client.models.retrieve("policy").id == "policy"
            assert client.models.retrieve("owner/name").id == "owner/name"
            assert client.get("/models/owner/name", cast_to=Model).id == "owner/name"
            with client.chat.completions.stream(model="m", messages=[QUESTION]) as stream:
                assert stream.get_final_completion().choices[0].message.content == "about 150"

    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        await asyncio.to_thread(asks, endpoint)

    play(agent, lambda before: "about 150" + END, words=words).check_exact()


def test_the_run_decides_how_is_sampled_and_the_agent_where_it_ends(words: PreTrainedTokenizerBase) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        ask = client.chat.completions.create
        plain = await ask(model="m", messages=[QUESTION])
        cut = await ask(model="m", messages=[QUESTION], max_completion_tokens=3, max_tokens=9, temperature=0.0, seed=5)
        stopped = await ask(model="m", messages=[QUESTION], stop=["fif", "x"], tool_choice="auto")
        assert [each.choices[0].message.content for each in (plain, cut, stopped)] == ["fifty-fifty", "fif", ""]
        assert [each.choices[0].finish_reason for each in (plain, cut, stopped)] == ["stop", "length", "stop"]
        again = [QUESTION, {"role": "assistant", "content": ""}, {"role": "user", "content": "and?"}]
        await ask(model="m", messages=again)

    sampling = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=50, min_tokens=4, stop=("never",))
    played = play(agent, lambda before: "fifty-fifty" + END, words=words, sampling=sampling)
    first, second, third, _ = (request.sampling for request in played.engine.asked)
    assert first == sampling
    assert (second.temperature, second.top_p, second.max_tokens, second.min_tokens) == (0.7, 0.9, 3, 3)
    assert third.stop == ("never", "fif", "x")
    assert played.events == {Event.PARAMETERS_IGNORED: 1, Event.CUT_OFF: 1, Event.FORKED: 2}
    # What followed the stop string goes on after it, as it was sampled.
    assert played.texts[-1].endswith("<|assistant|>fif<|end|><|user|>and?<|end|><|assistant|>fifty-fifty<|end|>")
    assert [each.finish_reason for each in played.sequences] == [
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.STOP,
    ]


def test_reasoning_too_is_told_up_to_the_stop_string(words: PreTrainedTokenizerBase) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        for stop, expected in ((["So"], "12*13, "), (["fif", "nothing"], "12*13, So it is.")):
            said = await client.chat.completions.create(model="m", messages=[QUESTION], stop=stop)
            message = said.choices[0].message
            assert (message.model_extra or {})["reasoning_content"] == expected and message.content == ""

    template = words.chat_template + "{# <think> </think> #}"
    play(agent, lambda before: "<think>12*13, So it is.</think>fifty" + END, words=words, template=template)


OTHERS: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False},
    "stop_token_ids": [1],
    "min_tokens": 2,
    "ignore_eos": True,
    "allowed_token_ids": [1],
    "bad_words": ["no"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "logit_bias": {"5": -100},
}
"""Parameters of other servers, which clients send as `extra_body`."""


def test_what_other_servers_take_besides_is_not_ignored_in_silence() -> None:
    assert set(chat.read({"messages": [QUESTION], **OTHERS}).ignored) == OTHERS.keys()
    for name in ("guided_json", "structured_outputs", "regex", "ebnf", "json_schema"):
        with pytest.raises(Refused, match="nothing but the policy decides"):
            chat.read({"messages": [QUESTION], name: {"type": "object"}})
    for name, value in {"chat_template": "{{ x }}", "echo": True, "add_generation_prompt": False}.items():
        with pytest.raises(Refused, match=f"{name}="):
            chat.read({"messages": [QUESTION], name: value})
    harmless = {"bad_words": [], "include_stop_str_in_output": False, "add_generation_prompt": True, "echo": False}
    assert chat.read({"messages": [QUESTION], **harmless}).ignored == ()


def test_what_the_responses_api_of_other_servers_takes_is_heeded_or_told_of() -> None:
    asked = responses.read({"input": "x", "stop": ["5"], "seed": 1, "logit_bias": {"5": 1}, "presence_penalty": 0})
    assert asked.stop == ("5",) and asked.ignored == ("seed", "logit_bias")
    with pytest.raises(Refused, match="the run records logprobs itself"):
        responses.read({"input": "x", "include": ["message.output_text.logprobs"]})
    assert responses.read({"input": "x", "include": ["reasoning.encrypted_content"]}).ignored == ()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "n": ({"n": 2}, "n=2 is not supported"),
    "logprobs": ({"logprobs": True}, "the run records them itself"),
    "json": ({"response_format": {"type": "json_object"}}, "response_format="),
    "no messages": ({"messages": []}, "at least one message"),
    "role": ({"messages": [{"role": "robot", "content": ""}]}, "role must be one of"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "got 'image_url'"),
    "prefill": ({"messages": [QUESTION, {"role": "assistant", "content": "1"}]}, "policy's turn"),
    "tools": ({"tools": [{"type": "web_search"}]}, "tools[0].type must be one of function"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "with a name"),
    "limit": ({"max_tokens": 0}, "max_tokens must be at least 1"),
    "type": ({"max_tokens": "many"}, "max_tokens must be of the type int"),
    "stop": ({"stop": [""]}, "not empty"),
    "arguments": (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]},
                QUESTION,
            ]
        },
        "must be JSON text",
    ),
}
"""Parameters that cannot be heeded, and what the agent reads."""


def test_what_cannot_be_done_is_refused_with_a_reason(words: PreTrainedTokenizerBase) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        for parameters, why in REFUSED.values():
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**{"model": "m", "messages": [QUESTION], **parameters})
            assert why in caught.value.message, caught.value.message
            assert caught.value.type == "invalid_request_error"
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        async with httpx2.AsyncClient(base_url=endpoint.url, headers=headers) as raw:
            for body in (b"", b"{", b"[]", b"\xff", b'{"messages": "x"}', b"[" * 100_000, b'{"a": "\\ud800"}'):
                answer = await raw.post(f"{endpoint.url}/chat/completions", content=body)
                assert answer.status_code == 400 and answer.json()["error"]["message"], body[:20]
            broken = {"Content-Encoding": "gzip"}
            answer = await raw.post(f"{endpoint.url}/chat/completions", content=b"{}", headers=broken)
            assert answer.status_code == 400 and "the body of the request" in answer.json()["error"]["message"]
            assert (await raw.post(f"{endpoint.url}/embeddings", json={})).json()["error"]["message"]
            assert (await raw.get(f"{endpoint.url}/chat/completions")).status_code == 405

    played = play(agent, words=words)
    assert played.engine.asked == [] and played.events == {Event.CALLS_REFUSED: len(REFUSED) + 8}


NAMES = st.sampled_from(
    "role content tool_calls tool_call_id id type function name arguments parameters text input output call_id items "
    "messages tools model stream stop max_tokens tool_choice stream_options instructions format user assistant tool "
    "system function_call function_call_output message reasoning {} [] 1".split()
)
SAID = Said(
    id="0",
    model="m",
    created=0,
    content="Let me see.",
    reasoning="hm",
    calls=(SaidCall(id="call00001", name="f", arguments="{}"),),
    is_cut_off=False,
    prompt_tokens=1,
    sampled_tokens=2,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.parametrize("api", [chat, responses])
@given(body=st.dictionaries(NAMES, VALUES), messages=st.lists(st.dictionaries(NAMES, VALUES)))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_asked_is_read_or_refused(api: Any, body: dict[str, Any], messages: list[Any]) -> None:
    for one in (body, {**body, "messages": messages, "input": messages}):
        try:
            asked = api.read(one)
        except Refused as refusal:
            assert refusal.status == 400 and refusal.body["error"]["message"]
        else:
            assert asked.messages and all(isinstance(each["content"], str) for each in asked.messages)
            assert api.answer(SAID, one)["model"] == "m" and len(list(api.events(SAID, one))) > 3


def test_nobody_asks_without_the_key(words: PreTrainedTokenizerBase) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        for key in ("", "x", "\u00e9", endpoint.key[:-1], endpoint.key + "0"):
            async with httpx2.AsyncClient() as raw:
                headers = {"Authorization": f"Bearer {key}".encode("latin-1")} if key else {}
                answer = await raw.post(f"{endpoint.url}/chat/completions", json={}, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for scheme in ("bearer", "BEARER"):
            async with httpx2.AsyncClient() as raw:
                answer = await raw.get(f"{endpoint.url}/models", headers={"Authorization": f"{scheme} {endpoint.key}"})
            assert answer.status_code == 200
        for other in ("2", "0", "x", "9" * 30):
            url = endpoint.url.replace("/attempts/1/", f"/attempts/{other}/")
            with pytest.raises(openai.AuthenticationError):
                await AsyncOpenAI(base_url=url, api_key=endpoint.key).models.list()
        assert endpoint.url.startswith("http://127.0.0.1:")

    played = play(agent, words=words)
    assert played.engine.asked == []


def test_after_the_end_of_the_attempt_nothing_is_answered(words: PreTrainedTokenizerBase) -> None:
    engine = Scripted(words, lambda before: "late" + END, hold=asyncio.Event())
    refusals: list[openai.APIStatusError] = []

    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        async def ask() -> None:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(model="m", messages=[QUESTION])
            refusals.append(caught.value)

        waits = asyncio.create_task(ask())
        while not engine.asked:
            await asyncio.sleep(0.01)
        ends[0]()
        await waits
        await ask()

    ends: list[Any] = []
    played = play(agent, words=words, engine=engine, ending=ends.append)
    assert [(each.status_code, each.code) for each in refusals] == [(410, "attempt_is_over")] * 2
    assert engine.aborted == 1 and len(engine.asked) == 1
    assert played.events == {} and not played.sequences[0].turns


def test_limits_of_calls_and_tokens_are_told_once_counted(words: PreTrainedTokenizerBase) -> None:
    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        ask = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(model="m", messages=[{"role": "user", "content": "x" * 200}])
        assert caught.value.code == "context_length_exceeded"
        await ask(model="m", messages=[{"role": "user", "content": "x" * 150}], max_tokens=10)
        await ask(model="m", messages=[QUESTION])
        for _ in range(3):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(model="m", messages=[QUESTION])
            assert caught.value.code == "too_many_calls"

    played = play(agent, lambda before: "no" + END, words=words, most=200, max_calls=2)
    assert played.events == {Event.NO_ROOM: 1, Event.CALLS_REFUSED: 4, Event.FORKED: 1}


def test_an_agent_that_does_not_wait_ends_its_request(words: PreTrainedTokenizerBase) -> None:
    engine = Scripted(words, lambda before: "late" + END)

    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        engine.hold = asyncio.Event()
        task = asyncio.create_task(client.chat.completions.create(model="m", messages=[QUESTION]))
        while not engine.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        while not engine.aborted:
            await asyncio.sleep(0.01)
        engine.hold.set()
        await client.chat.completions.create(model="m", messages=[QUESTION])

    played = play(agent, words=words, engine=engine)
    assert played.events == {Event.CALLS_LOST: 1} and len(played.sequences) == 1
    played.check_exact()


def test_a_response_that_is_interrupted_goes_on_where_it_was(words: PreTrainedTokenizerBase) -> None:
    engine = Scripted(words, lambda before: "about 150" + END, interruptions=2)

    async def agent(endpoint: Endpoint, client: AsyncOpenAI) -> None:
        said = await client.chat.completions.create(model="m", messages=[QUESTION])
        assert said.choices[0].message.content == "about 150"

    played = play(agent, words=words, engine=engine)
    assert [request.first_position for request in engine.asked] == [0, 2, 4]
    (rollout,) = played.sequences
    assert rollout.versions[rollout.loss_mask].tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2]
    played.check_exact()
