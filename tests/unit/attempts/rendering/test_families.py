"""Properties of the renderer that hold for the inference templates of every family."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlframe.attempts.rendering.config import History
from rlframe.attempts.rendering.renderer import Fork, Renderer
from rlframe.attempts.rendering.reply import Reply
from rlframe.attempts.rendering.sampled import decode
from rlframe.data.prompts import make_prompts
from rlframe.data.records import Record
from rlframe.data.text.conversations import understand
from rlframe.data.text.special_tokens import special_tokens, strings
from rlframe.types.messages import Message
from tests.unit.attempts.rendering.conversations import TOOLS, Scene, Turn, sampled, scenes
from tests.unit.attempts.rendering.families import FAMILIES, data_of, renderer_of, tokenizer_of

pytestmark = pytest.mark.later

FRAGMENTS = (
    *(
        '{"name": "add", ',
        '"arguments": ',
        '"parameters": ',
        '{"count": 1}',
        "}",
        "[",
        "]",
        "\n",
        "add",
        "<function=add>",
    ),
    *("<parameter=count>", "1", "</parameter>", "</function>", "call:add{", "count:", "<tool_call>", "</tool_call>"),
    *(
        "```json\n",
        "\n```",
        "function",
        " to=functions.add",
        "json",
        "analysis",
        "final",
        "assistant",
        "thought\n",
        "\u00e9",
    ),
)
"""Pieces of calls of all families."""
REWRITES = {
    "qwen2.5": "a-a-",
    "qwen3": "FFFa",
    "qwen3-off": "F-F-",
    "qwen3-2507": "a-a-",
    "qwen3.5": "FFaa",
    "qwen3.6-kept": "aaaa",
    "llama3.1": "a-a-",
    "llama3.2": "a-a-",
    "glm4.5": "aFaa",
    "glm4.5-off": "a-a-",
    "deepseek-v3": "FFFF",
    "deepseek-r1": "FF--",
    "gpt-oss": "aFaa",
    "gemma3": "a---",
    "gemma4": "aFaa",
    "gemma4-off": "a-a-",
    "mistral-v3": "F-a-",
    "mistral-v7": "F-a-",
    "mistral-v11": "F-a-",
    "mistral-v13": "aaaa",
}
"""F where a turn forks, a where it is appended: a turn without and with reasoning before a user, calls without and with
it before a tool. -: the family has no such turn."""
every_family = pytest.mark.parametrize("name", FAMILIES)
examples = pytest.mark.parametrize("examples", [5, pytest.param(60, marks=pytest.mark.thorough)], ids=["some", "many"])
"""Numbers of random conversations."""


def some(examples: int) -> settings:
    """Settings of a property that needs `examples` conversations."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def as_the_template_takes_it(name: str, messages: list[Message]) -> list[Message]:
    """Messages with reasoning and arguments in the form that the family's template reads."""
    form = FAMILIES[name].form
    made: list[Message] = []
    for message in messages:
        message = dict(message)
        if form == "Harmony" and "reasoning_content" in message:
            message["thinking"] = message.pop("reasoning_content")
        if form == "DeepSeek" and "tool_calls" in message:
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": json.dumps(arguments, ensure_ascii=False)}}
                for call in message["tool_calls"]
                for arguments in [call["function"]["arguments"]]
            ]
        made.append(message)
    return made


def rendering(name: str, messages: list[Message], *, opened: bool = True) -> str:
    """The conversation as transformers renders it."""
    return tokenizer_of(name).apply_chat_template(
        as_the_template_takes_it(name, messages),
        tools=tools_of(name) or None,
        tokenize=False,
        add_generation_prompt=opened,
        **FAMILIES[name].kwargs,
    )


def tools_of(name: str) -> list[dict[str, Any]]:
    """The tools that the family's template lists."""
    return TOOLS if FAMILIES[name].calls and FAMILIES[name].lists_tools else []


def without_ids(message: Message) -> Message:
    """The message without the ids of its calls."""
    calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


def read(renderer: Renderer, messages: list[Message], tools: list[dict[str, Any]]) -> str:
    """The conversation as the renderer gives it to the template."""
    return renderer._render(messages, tools, opened=True).text


def spells_special(name: str, scene: Scene) -> bool:
    """Whether a text of the conversation reads like a special token."""
    texts = list(strings([list(scene.start), [[turn.said, *turn.new] for turn in scene.turns]]))
    return any(token in text for token in special_tokens(tokenizer_of(name)) for text in texts)


@every_family
def test_the_forms_are_told_from_the_template(name: str) -> None:
    renderer = renderer_of(name)
    assert type(renderer._chosen).__name__ == FAMILIES[name].form
    named = renderer_of(name, reasoning=FAMILIES[name].style)
    assert named._style is renderer._style


@examples
@every_family
def test_it_opens_as_prompts_are_made(name: str, examples: int) -> None:
    @some(examples)
    @given(scenes(FAMILIES[name]))
    def check(scene: Scene) -> None:
        messages = [*scene.start]
        for turn in scene.turns:
            messages += [{**turn.said}, *turn.new]
            messages[-1 - len(turn.new)].pop("reasoning_content", None)
        fields = {"messages": messages, "tools": tools_of(name), "answer": "1"}
        conversation = understand(Record(fields=fields, source="", where="r"), data_of(name))
        (prompt,) = make_prompts([conversation], data_of(name), tokenizer=tokenizer_of(name))
        opened = renderer_of(name).open(list(conversation.prompt), list(conversation.tools))
        assert opened.tolist() == prompt.input.token_ids.tolist()

    check()


@examples
@every_family
def test_what_follows_a_turn_is_what_the_template_writes(name: str, examples: int) -> None:
    @some(examples)
    @given(scenes(FAMILIES[name]))
    def check(scene: Scene) -> None:
        play(name, scene)

    check()


def play(name: str, scene: Scene) -> None:
    """Plays a conversation with both policies and compares every turn with the template's own rendering."""
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    append, fork = renderer_of(name), renderer_of(name, History.FORK)
    before, tools = list(scene.start), tools_of(name)
    tokens = append.open(before, tools).tolist()
    plain = not spells_special(name, scene)
    for turn in scene.turns:
        ids = sampled(family, append, before, turn)
        reply = append.parse(ids, TOOLS, prompt=tokens)
        assert (without_ids(reply.message), reply.malformed) == (without_ids(turn.said), ())
        # Answers name the calls of the message.
        named = Reply(message=turn.said)
        appended = append.follow(before, ids, turn.new, tools, reply=named)
        assert isinstance(appended, np.ndarray)
        after = [*before, turn.said, *turn.new]
        # Templates themselves would make special tokens of those that are spelled.
        full = rendering(name, after) if plain else read(append, after, tools)
        ours = decode(appended, tokenizer)
        assert full.endswith(ours)
        if plain:
            whole = tokenizer(full, add_special_tokens=False)["input_ids"]
            assert whole[len(whole) - len(appended) :] == appended.tolist()
        # The template's own words before the turn, not those of the attempt, which may have kept its reasoning.
        opened = rendering(name, before) if plain else read(append, before, tools)
        forked = fork.follow(before, ids, turn.new, tools, reply=named)
        if full.startswith(opened + decode(ids[:-1], tokenizer)):
            assert not isinstance(forked, Fork) and forked.tolist() == appended.tolist()
        else:
            assert isinstance(forked, Fork)
            assert decode(forked.token_ids, tokenizer) == full
            assert forked.token_ids.tolist() == fork.open(after, tools).tolist()
            if plain:
                assert forked.token_ids.tolist() == whole
        tokens = [*tokens, *ids, *appended.tolist()]
        before = after


@every_family
def test_where_history_is_rewritten(name: str) -> None:
    family, fork = FAMILIES[name], renderer_of(name, History.FORK)
    function = {"name": "add", "arguments": {"count": 1}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefghi", "function": function}]}
    call["tool_calls"][0]["type"] = "function"
    said = {"role": "assistant", "content": "yes"}
    because = {"reasoning_content": "so"}
    more = ({"role": "user", "content": "more"},)
    answer = ({"role": "tool", "content": "2", "tool_call_id": "abcdefghi"},)
    found = ""
    for turn in (Turn(said, more), Turn(said | because, more), Turn(call, answer), Turn(call | because, answer)):
        if (turn.new is answer and not family.calls) or ("reasoning_content" in turn.said and not family.reasons):
            found += "-"
            continue
        before = [{"role": "user", "content": "hello"}]
        ids = sampled(family, fork, before, turn)
        followed = fork.follow(before, ids, turn.new, tools_of(name), reply=Reply(message=turn.said))
        found += "F" if isinstance(followed, Fork) else "a"
    assert found == REWRITES[name]


@examples
@every_family
def test_whatever_was_sampled_is_a_message_and_can_be_followed(name: str, examples: int) -> None:
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    append, fork = renderer_of(name), renderer_of(name, History.FORK)
    words = [*family.special, *family.words, *FRAGMENTS]
    spelled = st.lists(st.sampled_from(words), max_size=20).map(
        lambda pieces: tokenizer("".join(pieces), add_special_tokens=False)["input_ids"]
    )
    anything = st.lists(st.integers(0, len(tokenizer) - 1), max_size=30)
    start: list[Message] = [{"role": "user", "content": "hello"}]
    tools = tools_of(name)

    @some(4 * examples)
    @given(st.one_of(spelled, anything))
    def check(ids: list[int]) -> None:
        reply = append.parse(ids, TOOLS, prompt=append.open(start, tools))
        assert reply == append.parse(ids, TOOLS, prompt=append.open(start, tools))
        assert reply.message["role"] == "assistant" and isinstance(reply.message["content"], str)
        for one in reply.malformed:
            assert one.why and one.text in reply.message["content"]
        new = [
            {"role": "tool", "content": "so", "tool_call_id": call["id"]}
            for call in reply.message.get("tool_calls", ())
        ] or [{"role": "user", "content": "go on"}]
        appended = append.follow(start, ids, new, tools, reply=reply)
        assert isinstance(appended, np.ndarray) and len(appended)
        forked = fork.follow(start, ids, new, tools, reply=reply)
        assert isinstance(forked, Fork) or forked.tolist() == appended.tolist()

    check()


@every_family
def test_a_turn_that_was_cut_off_is_closed_first(name: str) -> None:
    renderer, tokenizer = renderer_of(name), tokenizer_of(name)
    start, new = [{"role": "user", "content": "hello"}], [{"role": "user", "content": "more"}]
    ids = tokenizer("so", add_special_tokens=False)["input_ids"]
    end = FAMILIES[name].ends[0] if FAMILIES[name].ends else tokenizer.eos_token
    whole = renderer.follow(start, [*ids, tokenizer.convert_tokens_to_ids(end)], new)
    cut = renderer.follow(start, ids, new)
    assert isinstance(whole, np.ndarray) and isinstance(cut, np.ndarray)
    # gpt-oss samples <|return|>, and its template closes earlier turns by <|end|>.
    closing = "<|end|>" if name == "gpt-oss" else end
    assert cut.tolist() == [tokenizer.convert_tokens_to_ids(closing), *whole.tolist()]
