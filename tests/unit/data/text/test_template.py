"""Keyword arguments of the chat template: they reach every rendering, and none is set in vain."""

import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig
from rlframe.data.kinds import find_source
from rlframe.data.prompts import PromptSource
from rlframe.data.text.chat import encode, render
from rlframe.data.text.template import names_read
from rlframe.data.text.tool_calls import with_arguments_as_text
from rlframe.utils.errors import ConfigError, DataError
from tests.unit.data.marks import write
from tests.unit.data.text.test_special_tokens import merging

BRIEF = (
    "{% for message in messages %}<{{ message.role }}>{{ 'b' if brief is defined and brief else 'a' }}"
    "{{ message.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose template reads `brief`."""
    made = merging()
    made.chat_template = BRIEF
    return made


def data(path: str, **kwargs: object) -> DataConfig:
    return DataConfig(path=path, cache_folder=None, chat_template_kwargs=kwargs or None)


def test_they_reach_prompts_and_held_out_records(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = [{"id": str(number), "prompt": f"x{number}", "answer": "1"} for number in range(40)]
    path = write(tmp_path / "a.jsonl", rows)
    for kwargs, mark in (({}, "a"), ({"brief": False}, "a"), ({"brief": True}, "b")):
        source = PromptSource(data(path, **kwargs), tokenizer=tokenizer, seed=0)
        prompts = [*source.next(8), *source.evaluation_prompts()]
        assert len(prompts) > 8 and all(prompt.text.startswith(f"<user>{mark}x") for prompt in prompts)


DATED = "{{ strftime_now('%d %b %Y') }}" + BRIEF


def test_the_day_is_that_of_the_settings_and_a_template_that_writes_none_refuses_it(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "x", "completion": "y"}])
    monday, tuesday = (
        DataConfig(path=path, evaluation_count=0, chat_template_date=f"2026-11-2{day}") for day in (3, 4)
    )
    with pytest.raises(ConfigError, match=r"data.chat_template_date has no effect .* never reads strftime_now"):
        PromptSource(monday, tokenizer=tokenizer, seed=0)
    tokenizer.chat_template = DATED
    (prompt,) = PromptSource(monday, tokenizer=tokenizer, seed=0).next(1)
    assert prompt.text == "23 Nov 2026<user>ax<end>\n<assistant>"
    for config, written in ((monday, "23 Nov"), (monday, "23 Nov"), (tuesday, "24 Nov")):
        # Items of another day are not those of the cache.
        (item,) = find_source("examples")(config, tokenizer=tokenizer, seed=0, max_tokens=100).next(1)
        assert tokenizer.decode(item.parts[0].token_ids).startswith(written)
    (today,) = PromptSource(data(path), tokenizer=tokenizer, seed=0).next(1)
    assert re.match(r"\d\d \w+ \d{4}<user>ax", today.text)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("examples", {"prompt": "x", "completion": "y"}),
        ("preferences", {"prompt": "x", "chosen": "y", "rejected": "z"}),
        ("unpaired", {"prompt": "x", "completion": "y", "label": True}),
        ("labelled", {"prompt": "x", "label": 1}),
    ],
)
def test_they_reach_training(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kind: str, row: dict[str, str]
) -> None:
    path = write(tmp_path / "a.jsonl", [row])
    found = {}
    for brief in (False, True):
        source = find_source(kind)(data(path, brief=brief), tokenizer=tokenizer, seed=0, max_tokens=100)
        (item,) = source.next(1)
        found[brief] = [tokenizer.decode(part.token_ids) for part in item.parts]
        assert "chat_template_kwargs" in source.settings
    assert found[True] == [
        text.replace("<user>ax", "<user>bx").replace(">ay", ">by").replace(">az", ">bz") for text in found[False]
    ]
    assert found[True] != found[False]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "breif",
            "data.chat_template_kwargs.breif has no effect with .* never reads it; .* the template reads: brief$",
        ),
        ("message", "data.chat_template_kwargs.message has no effect"),
        ("tools", "data.chat_template_kwargs.tools is not for the configuration to set"),
        ("messages", "data.chat_template_kwargs.messages is not for the configuration to set"),
        ("add_generation_prompt", "is not for the configuration to set"),
    ],
)
def test_one_that_has_no_effect_is_refused_by_name(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str, sentence: str
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "x", "answer": "1"}])
    with pytest.raises(ConfigError, match=sentence):
        PromptSource(data(path, **{name: True}), tokenizer=tokenizer, seed=0)


def test_what_a_template_reads() -> None:
    assert names_read("{{ a }}{% set b = c | default(1) %}{{ b }}{% for d in e %}{{ d }}{% endfor %}") == {
        "a",
        "c",
        "e",
    }
    assert names_read("{%- set x = x | default(false) -%}{{ x }}") == {"x"}
    assert names_read("{% generation %}{{ a }}{% endgeneration %}{% for b in c %}{% break %}{% endfor %}") == {"a", "c"}
    assert names_read("{% if %}") == frozenset()


def test_templates_that_take_arguments_as_text_get_json() -> None:
    tokenizer = merging()
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls %}"
        "{{ call.function.name + call.function.arguments }}{% endfor %}<end>{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "\u00e9<end>"}}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rendering = render(tokenizer, messages, config=DataConfig(), generation_prompt=False, where="r")
    assert rendering.text == '<user>x<end><assistant>f{"a": "\u00e9<end>"}<end>'
    # The text of the argument is no special token.
    assert encode(tokenizer, [rendering])[0].count(0) == 2
    assert with_arguments_as_text(messages[0]) == messages[0]
    tokenizer.chat_template = "{{ 'a' + 1 }}"
    with pytest.raises(DataError, match="refuses turns of user, assistant: TypeError"):
        render(tokenizer, messages, config=DataConfig(), generation_prompt=False, where="r")


def test_a_template_that_drops_a_later_system_message_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    # gpt-oss's writes only one at the beginning, DeepSeek R1's only the last one.
    said = {"user": "x", "assistant": "y", "system": "be  brief "}
    turns = [{"role": role, "content": said[role]} for role in ("user", "assistant", "system", "user")]

    def text(content: str) -> str:
        tokenizer.chat_template = BRIEF.replace("message.content", content)
        return render(tokenizer, turns, config=DataConfig(), generation_prompt=True, where="s:1").text

    assert "<system>abe  brief <end>" in text("message.content")
    assert "<system>abe brief<end>" in text("message.content | trim | replace('  ', ' ')")
    with pytest.raises(
        DataError, match="s:1: the chat template leaves out message 3, of role system, 'be  brief'; give"
    ):
        text("message.content if message.role != 'system'")
