"""Conversations with tools: what calls look like to a template, and which tokens are learnt."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig
from rlframe.data.kinds.examples import ExampleSource, learnt_turns
from rlframe.data.kinds.preferences import PreferenceSource
from rlframe.data.prompts import PromptSource
from rlframe.data.records import read
from rlframe.data.text.conversations import understand
from rlframe.data.text.tool_calls import tools_of
from rlframe.utils.errors import DataError
from tests.unit.data.marks import marked, record, write

TEMPLATE = (
    "{% for tool in tools or [] %}<system>{{ tool.function.name }}<end>{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"name": "add", "description": "Sum.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TURNS = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is 2."},
]
CHAT = {"messages": TURNS, "tools": [{"type": "function", "function": TOOL}]}
TEXT_CALL = CALL | {"function": {"name": "add", "arguments": '{"a": 1}'}}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "It is 2."},
    ],
    "tools": '[{"name": "add", "description": "Sum.", "parameters": {"type": "object", "properties": {}}}]',
}


@pytest.fixture(scope="module")
def calling(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer with a template that writes tools and calls."""
    return with_template(tokenizer, TEMPLATE)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>", extra_special_tokens=["<assistant>", "<user>"]
    )
    made.chat_template = template
    return made


def learnt(text: str) -> str:
    """The characters, each in brackets."""
    return "".join(f"[{character}]" for character in text)


def example(tokenizer: PreTrainedTokenizerFast, fields: dict) -> str:
    return " | ".join(examples(tokenizer, fields))


def examples(tokenizer: PreTrainedTokenizerFast, fields: dict) -> list[str]:
    encoded = learnt_turns(understand(record(**fields), DataConfig()), tokenizer, config=DataConfig())
    return [marked(sequence, tokenizer) for sequence in encoded.sequences]


@pytest.mark.parametrize(
    "fields",
    [CHAT, CHAT | {"messages": [TURNS[0], TURNS[1] | {"tool_calls": [TEXT_CALL]}, *TURNS[2:]]}, SHAREGPT],
    ids=["chat", "arguments as text", "sharegpt"],
)
def test_calls_are_learnt_and_their_results_are_not(calling: PreTrainedTokenizerFast, fields: dict) -> None:
    # All shapes give the template the same: arguments are a dict, not text within text.
    assert example(calling, fields) == (
        "<system>add<end><user>q<end>\n<assistant>" + learnt('add{"a": 1}') + "[<end>]\n<tool>2<end>\n"
        "<assistant>" + learnt("It is 2.") + "[<end>]"
    )


def test_a_call_of_weight_zero_is_not_learnt(calling: PreTrainedTokenizerFast) -> None:
    fields = CHAT | {"messages": [TURNS[0], TURNS[1] | {"weight": 0}, *TURNS[2:]]}
    assert '<assistant>add{"a": 1}<end>\n<tool>2<end>\n<assistant>[I]' in example(calling, fields)


def test_a_message_of_calls_keeps_what_a_template_may_ask_for() -> None:
    conversation = understand(record(**CHAT), DataConfig())
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert conversation.messages[2] == {"role": "tool", "content": "2", "tool_call_id": "1"}
    assert conversation.tools == ({"type": "function", "function": TOOL},)
    both = understand(record(**{**CHAT, "messages": [TURNS[0], TURNS[1] | {"content": "See:"}]}), DataConfig())
    assert both.messages[-1]["content"] == "See:" and both.answer is None
    several = record(conversations=[{"from": "human", "value": "q"}, {"from": "function_call", "value": "[{}, {}]"}])
    with pytest.raises(DataError, match=r"s:1: expected conversations\[1\]\[0\] to be a function with a name"):
        understand(several, DataConfig())


def test_tools_and_calls_have_no_nulls_of_the_columns_of_a_file(tmp_path: Path) -> None:
    rows = []
    for name in "ab":
        function = {"name": name, "parameters": {"properties": {name: {"type": "string"}}}}
        call = {"type": "function", "function": {"name": name, "arguments": {name: "x"}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        rows.append({"messages": [TURNS[0], said], "tools": [{"type": "function", "function": function}]})
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    for row, found in zip(rows, read(str(file), max_bytes=1e6), strict=True):
        understood = understand(found, DataConfig())
        assert (list(understood.tools), understood.messages[-1]) == (row["tools"], row["messages"][-1])
    # Those of other files are meant.
    call = {"type": "function", "function": {"name": "a", "arguments": {"a": None}}}
    meant = understand(record(messages=[TURNS[0], {"role": "assistant", "tool_calls": [call]}]), DataConfig())
    assert meant.messages[-1].get("tool_calls") == [call]


@pytest.mark.parametrize("without", ["{{ call.function.name }}", "{{ tool.function.name }}"])
def test_a_template_that_passes_over_tools_or_calls_is_refused(
    tokenizer: PreTrainedTokenizerFast, without: str
) -> None:
    silent = with_template(tokenizer, TEMPLATE.replace(without, ""))
    with pytest.raises(DataError, match="s:1: the chat template leaves out the tool 'add' or a call of it: written"):
        example(silent, CHAT)
    # The embedded model's, and any that was made before there were tools.
    with pytest.raises(DataError, match="s:1: the chat template leaves out the tool 'add'"):
        example(tokenizer, SHAREGPT)


def test_a_template_that_passes_over_the_content_beside_calls_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    # As those of Llama 3.1 do.
    either = TEMPLATE.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
    passing, config = with_template(tokenizer, either), DataConfig()
    said = {**TURNS[1], "content": "I add."}
    messages = [TURNS[0], said, *TURNS[2:]]
    with pytest.raises(
        DataError, match="s:1: the chat template leaves out 'I add.', content of a turn that is learned"
    ):
        learnt_turns(understand(record(**CHAT | {"messages": messages}), config), passing, config=config)
    # What is not learned is as the template serves it.
    messages[1] = {**said, "weight": 0}
    (tokens,) = learnt_turns(
        understand(record(**CHAT | {"messages": messages}), config), passing, config=config
    ).sequences
    assert "I add." not in marked(tokens, passing) and "[I][t]" in marked(tokens, passing)


def test_where_a_template_rewrites_earlier_calls_each_is_learned(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    # The arguments are gone once an answer follows.
    forgetful = TEMPLATE.replace(
        "{{ call.function.arguments | tojson }}", "{% if messages[-1] == m %}{{ call.function.arguments }}{% endif %}"
    )
    call, answer = examples(with_template(tokenizer, forgetful), CHAT)
    assert call.endswith("<assistant>" + learnt("add{'a': 1}") + "[<end>]")
    assert answer.endswith("<assistant>add<end>\n<tool>2<end>\n<assistant>" + learnt("It is 2.") + "[<end>]")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": "{"}, "expected tools to be JSON, found '{'"),
        ({"tools": {"name": "add"}}, "expected 'tools' to be a list, found {'name'"),
        ({"tools": [{"description": "x"}]}, r"expected tools\[0\] to be a function with a name, found {'desc"),
        (
            {
                "messages": [
                    TURNS[0],
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
                ]
            },
            r"expected messages\[1\].tool_calls\[0\].arguments to name each argument, found 5",
        ),
        (
            {"messages": [{"role": "user", "content": "q", "tool_calls": [CALL]}, TURNS[3]]},
            r"expected messages\[0\] to be {role, content} .*, or an assistant's {role, tool_calls}, found",
        ),
    ],
)
def test_a_bad_tool_or_call_is_named(fields: dict, message: str) -> None:
    with pytest.raises(DataError, match="s:1: " + message):
        understand(record(**{**CHAT, **fields}), DataConfig())


def test_calls_tell_prompts_and_responses_apart(tmp_path: Path, calling: PreTrainedTokenizerFast) -> None:
    other = CALL | {"function": {"name": "add", "arguments": {"a": 2}}}
    pair = {"prompt": "q", "chosen": [TURNS[1]], "rejected": [TURNS[1] | {"tool_calls": [other]}], "tools": [TOOL]}
    config = DataConfig(path=write(tmp_path / "a.jsonl", [pair]), evaluation_count=0, cache_folder=None)
    stream = PreferenceSource(config, tokenizer=calling, seed=0, max_tokens=100)
    chosen, rejected = (marked(part, calling) for part in stream.next(1)[0].parts)
    assert chosen.endswith("<assistant>" + learnt('add{"a": 1}') + "[<end>]")
    assert rejected.endswith("<assistant>" + learnt('add{"a": 2}') + "[<end>]")


def test_a_prompt_names_the_tools_that_may_be_called(tmp_path: Path, calling: PreTrainedTokenizerFast) -> None:
    config = DataConfig(path=write(tmp_path / "a.jsonl", [CHAT]), evaluation_count=0)
    (prompt,) = PromptSource(config, tokenizer=calling, seed=0).next(1)
    assert prompt.text == ('<system>add<end><user>q<end>\n<assistant>add{"a": 1}<end>\n<tool>2<end>\n<assistant>')


def test_the_tool_demo_becomes_examples(shared_data: Path, calling: PreTrainedTokenizerFast) -> None:
    path = str(shared_data / "llamafactory" / "glaive_toolcall_en_demo.json")
    config = DataConfig(path=path, evaluation_count=0, cache_folder=None)
    stream = ExampleSource(config, tokenizer=calling, seed=0, max_tokens=100_000)
    # Some records stand there twice.
    assert len(stream) + stream.dropped["duplicate id"] == 300 and set(stream.dropped) == {"duplicate id"}
    first = min(stream.next(len(stream)), key=lambda item: item.id)
    assert 0 < first.parts[0].weights.sum() < first.num_tokens
    assert tools_of(record(tools="[]")) == ()
