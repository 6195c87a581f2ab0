"""What each form of tool calls reads, and what it makes of calls that are none."""

import time
from typing import Any

import pytest

from rlframe.attempts.rendering.formats import find_format, names
from rlframe.attempts.rendering.formats.base import bare_value
from rlframe.attempts.rendering.reasoning import STYLES
from rlframe.attempts.rendering.reply import Call, fault_of, id_of

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}, "deep": {"type": "object"}},
            "required": ["a"],
        },
    },
}
TOOLS = {"add": TOOL}
DS = "<\uff5ctool\u2581{}\uff5c>"
CALLS, END_CALLS, CALL, SEP, END_CALL = (
    DS.format(name) for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "sep", "call\u2581end")
)
ONE = {"a": 1, "note": "two"}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "two"}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\ntwo\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>note</arg_key>\n"
    "<arg_value>two</arg_value>\n</tool_call>",
    "llama": '{"name": "add", "parameters": {"a": 1, "note": "two"}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "note": "two"}, "id": "123456789"}]',
    "deepseek": f'{CALLS}{CALL}function{SEP}add\n```json\n{{"a": 1, "note": "two"}}\n```{END_CALL}{END_CALLS}',
    "harmony": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "note": "two"}<|call|>',
    "gemma": '<|tool_call>call:add{a:1,note:<|"|>two<|"|>}<tool_call|>',
}


def read(form: str, text: str) -> list[Any]:
    """The parts of a text: texts as they are, calls as (name, arguments), those that cannot be read as None."""
    parts = find_format(form)().parts(text, TOOLS)
    return [(None if part.fault else (part.name, part.arguments)) if isinstance(part, Call) else part for part in parts]


def test_every_form_has_an_example() -> None:
    assert sorted(WRITTEN) == names()


@pytest.mark.parametrize("form", WRITTEN)
def test_a_call_is_read(form: str) -> None:
    (part,) = find_format(form)().parts(WRITTEN[form], TOOLS)
    assert isinstance(part, Call)
    assert (part.name, part.arguments, part.fault, fault_of(part, TOOLS)) == ("add", ONE, "", "")
    assert part.text == WRITTEN[form] or form == "deepseek"


@pytest.mark.parametrize("form", [form for form in WRITTEN if form not in ("llama", "harmony", "mistral")])
def test_text_beside_calls_stays(form: str) -> None:
    text = f"One moment.\n{WRITTEN[form]}\nDone."
    assert read(form, text) == ["One moment.", ("add", ONE), "Done."]


@pytest.mark.parametrize("form", WRITTEN)
def test_text_without_a_call_is_text(form: str) -> None:
    assert read(form, "It is {7}.") == ["It is {7}."]


@pytest.mark.parametrize("form", WRITTEN)
def test_a_call_that_is_cut_off_is_malformed_or_text(form: str) -> None:
    whole = WRITTEN[form]
    for length in range(len(whole) - (len("<|call|>") if form == "harmony" else 0)):
        for part in find_format(form)().parts(whole[:length], TOOLS):
            assert isinstance(part, str) or part.fault or fault_of(part, TOOLS), whole[:length]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "note": "two"}'),
        ("mistral", '[TOOL_CALLS] add[CALL_ID]123456789[ARGS] {"a": 1, "note": "two"}'),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "note": "two"}<|call|>'),
        ("deepseek", f'{CALLS}{CALL}add{SEP}{{"a": 1, "note": "two"}}{END_CALL}{END_CALLS}'),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "note": "two"}}'),
        ("gemma", '<|tool_call>call:add{<|"|>a<|"|>:1,note:<|"|>two<|"|>}<tool_call|>'),
    ],
)
def test_other_ways_to_write_a_call(form: str, text: str) -> None:
    assert read(form, text) == [("add", ONE)]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>add(1)</tool_call>"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}} and</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "name": "x", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>'),
        ("hermes", '<tool_call>["add", 1]</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("qwen_xml", "<tool_call>add</tool_call>"),
        ("qwen_xml", "<tool_call><function=add>a=1</function></tool_call>"),
        ("qwen_xml", f"<tool_call><function=add>{2 * '<parameter=a>1</parameter>'}</function></tool_call>"),
        ("glm", "<tool_call>add<arg_key>a</arg_key></tool_call>"),
        ("glm", f"<tool_call>add{2 * '<arg_key>a</arg_key><arg_value>1</arg_value>'}</tool_call>"),
        ("llama", '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}'),
        ("llama", "<|python_tag|>add(1)"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]add[ARGS]1 2"),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}] so'),
        ("deepseek", f"{CALLS}{END_CALLS}"),
        ("deepseek", f"{CALLS}{CALL}function{SEP}add\n```json\n{{\n```{END_CALL}{END_CALLS}"),
        ("deepseek", f"{CALLS}{CALL}add{END_CALL}{END_CALLS}"),
        ("harmony", "<|channel|>commentary to=browser.open<|message|>{}<|call|>"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>a=1<|call|>"),
        ("gemma", "<|tool_call>add{}<tool_call|>"),
        ("gemma", "<|tool_call>call:add{a:1,a:2}<tool_call|>"),
        ("gemma", "<|tool_call>call:add{a:one}<tool_call|>"),
        ("gemma", "<|tool_call>call:add{a:" + "[" * 10_000 + "<tool_call|>"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_is_one_malformed_part(form: str, text: str) -> None:
    (part,) = find_format(form)().parts(text, TOOLS)
    assert isinstance(part, Call) and part.fault
    assert part.text.strip() in text and (form == "deepseek" or part.text.strip() == text.strip())


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (Call(text="", name="sub", arguments={}), "there is no tool 'sub'; there are: add"),
        (Call(text="", name=7, arguments={}), "the call has no name"),
        (Call(text="", name="add", arguments={"note": "x"}), "add needs the argument 'a'"),
        (Call(text="", name="add", arguments='{"a": 1}'), "the arguments of add must be an object"),
        (Call(text="", name="add", arguments={"a": "\ud800"}), "half of a surrogate pair"),
        (Call(text="", fault="it is none"), "it is none"),
        (Call(text="", name="add", arguments={"a": 1, "more": 2}), ""),
    ],
)
def test_a_call_is_compared_with_the_tools(call: Call, why: str) -> None:
    assert (why in fault_of(call, TOOLS)) if why else fault_of(call, TOOLS) == ""


@pytest.mark.parametrize("form", ["hermes", "qwen_xml", "glm"])
def test_an_argument_may_have_the_tag_that_closes_a_call(form: str) -> None:
    text = WRITTEN[form].replace("two", "a </tool_call> b")
    call = ("add", {"a": 1, "note": "a </tool_call> b"})
    assert read(form, text) == [call]
    assert read(form, f"{text} and {text}") == [call, "and", call]


def test_each_call_of_a_list_has_its_own_text() -> None:
    wrong, right = '{"name": "sub", "arguments": {"x": [1, 2]}}', '{"name": "add", "arguments": {"a": 1}}'
    parts = find_format("mistral")().parts(f"[TOOL_CALLS] [ {wrong} , {right}]", TOOLS)
    texts = [part.text for part in parts if isinstance(part, Call)]
    assert texts == [f"[TOOL_CALLS][{wrong}]", f"[TOOL_CALLS][{right}]"]


def test_bare_values_have_the_type_of_their_schema() -> None:
    # `note` is a text, whatever it reads like; `a` is none, so 1 is a number; of `deep` nothing but JSON is an object.
    text = "<tool_call>add<arg_key>{}</arg_key><arg_value>{}</arg_value></tool_call>"
    assert read("glm", text.format("note", "1")) == [("add", {"note": "1"})]
    assert read("glm", text.format("a", "1")) == [("add", {"a": 1})]
    assert read("glm", text.format("deep", '{"x": [null]}')) == [("add", {"deep": {"x": [None]}})]
    assert read("glm", text.format("other", "True")) == [("add", {"other": True})]
    assert read("glm", text.format("other", "so so")) == [("add", {"other": "so so"})]


@pytest.mark.parametrize(
    "schema",
    [{"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, {"type": ["string", "null"]}],
)
@pytest.mark.parametrize(
    ("bare", "value"), [("123", "123"), ("null", None), ("None", None), ("true", "true"), ('"x"', '"x"'), ("x", "x")]
)
def test_an_optional_text_is_a_text_or_null(schema: dict[str, Any], bare: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"query": schema}}}}
    assert bare_value(bare, "query", tool) == value


def test_a_schema_may_be_in_another_place() -> None:
    # As pydantic writes the schema of an enumeration and of a class that contains itself, and MCP servers pass it on.
    names = {"Code": {"enum": ["1", "2"], "type": "string"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}}
    schemas = [
        {"$ref": "#/$defs/Code"},
        {"allOf": [{"$ref": "#/$defs/Code"}], "default": "1"},
        {"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]},
        {"$ref": "#/$defs/Loop"},
        {"$ref": "#/$defs/Nowhere"},
        {"$ref": "https://example.com/schema"},
    ]
    properties = {str(index): schema for index, schema in enumerate(schemas)}
    parameters = {"$defs": names, "properties": properties}
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    assert [bare_value("1", name, tool) for name in properties] == ["1", "1", "1", 1, 1, 1]


def test_a_value_that_may_be_text_or_a_number_is_what_it_reads_like() -> None:
    either = {"anyOf": [{"type": "string"}, {"oneOf": [{"type": "number"}, {"type": "array"}]}]}
    tool = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"query": either}}}}
    assert [bare_value(bare, "query", tool) for bare in ("1", "1.5", "[1]", "x", "{}")] == [1, 1.5, [1], "x", "{}"]


@pytest.mark.parametrize(
    ("style", "text", "is_open", "reasoning", "rest"),
    [
        ("think", "<think>\nso\n</think>\n\nyes", False, "so", "yes"),
        ("think", "so\n</think>\n\nyes", True, "so", "yes"),
        ("think", "<think>so", False, "so", ""),
        ("think", "so", True, "so", ""),
        ("think", "yes", False, "", "yes"),
        ("think", 'write("</think>")', False, "", 'write("</think>")'),
        ("think", "<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("brackets", "[THINK]so[/THINK]yes", False, "so", "yes"),
        ("gemma", "<|channel>thought\nso\n<channel|>yes", False, "so", "yes"),
        ("gemma", "so\n<channel|>yes", True, "so", "yes"),
        ("harmony", "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>yes", False,
         "so", "<|start|>assistant<|channel|>final<|message|>yes"),
    ],
)  # fmt: skip
def test_reasoning_is_told_from_the_rest(style: str, text: str, is_open: bool, reasoning: str, rest: str) -> None:
    thought = STYLES[style].split(text, is_open=is_open)
    assert (thought.reasoning, thought.rest) == (reasoning, rest)


@pytest.mark.parametrize("form", WRITTEN)
def test_garbage_takes_time_in_proportion_to_its_length(form: str) -> None:
    # A pattern that tries every length of every stretch would take hours for these.
    pieces = [*find_format(form).markers, *WRITTEN[form].split(), " ", "\n", "{", "[", '"', "`", "<", ":", ","]
    begun = time.process_time()
    for one in pieces:
        find_format(form)().parts(one * 10_000, TOOLS)
        find_format(form)().parts(pieces[0] + one + "\n" * 20_000 + "x", TOOLS)
        for other in pieces[:4]:
            find_format(form)().parts((one + other) * 2_000, TOOLS)
            find_format(form)().parts((one + WRITTEN[form][:-5] + other) * 500, TOOLS)
    assert time.process_time() - begun < 20


def test_ids_of_calls_are_the_same_for_the_same_tokens() -> None:
    assert id_of([1, 2], 0) == id_of([1, 2], 0)
    assert len({id_of([1, 2], 0), id_of([1, 2], 1), id_of([12], 0)}) == 3
    assert all(len(id_of([1], index)) == 9 and id_of([1], index).isalnum() for index in range(20))
