"""The renderer on small templates: what it appends, when it forks, and what it refuses."""

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlframe.attempts.rendering.config import History, RenderingConfig
from rlframe.attempts.rendering.renderer import Fork, Renderer
from rlframe.data.config import DataConfig
from rlframe.utils.errors import DataError, SettingError

PLAIN = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETTING = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}}}
HELLO = [{"role": "user", "content": "hello"}]
MORE = [{"role": "user", "content": "more"}]


def tokenizer_with(template: str, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with tokens for roles."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = ["<end>", "<user>", "<assistant>", "<tool>", "<stop>"]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", extra_special_tokens=special[1:])
    made.chat_template = template
    return made


def renderer_with(template: str, *, data: DataConfig | None = None, **settings: Any) -> Renderer:
    """A renderer of such a tokenizer."""
    return Renderer(tokenizer_with(template), RenderingConfig(**settings), data=data or DataConfig())


def ids_of(text: str) -> list[int]:
    return tokenizer_with(PLAIN)(text, add_special_tokens=False)["input_ids"]


def text_of(ids: Any) -> str:
    return tokenizer_with(PLAIN).decode(ids)


@pytest.mark.parametrize(
    ("said", "appended"),
    [
        ("yes<end>", "\n<user>more<end>\n<assistant>"),
        ("yes", "<end>\n<user>more<end>\n<assistant>"),
        ("", "<end>\n<user>more<end>\n<assistant>"),
        # A stop token that is not the template's end of a turn stays, and the turn ends after it.
        ("yes<stop>", "<end>\n<user>more<end>\n<assistant>"),
    ],
)
def test_the_end_of_a_turn_is_appended_unless_it_was_sampled(said: str, appended: str) -> None:
    found = renderer_with(PLAIN).follow(HELLO, ids_of(said), MORE)
    assert text_of(found) == appended and isinstance(found, np.ndarray) and found.dtype == np.int32


def test_a_template_without_ends_ends_a_turn_with_the_next_ones_beginning() -> None:
    endless = renderer_with(PLAIN.replace("<end>", ""))
    assert text_of(endless.follow(HELLO, ids_of("yes<user>"), MORE)) == "more\n<assistant>"
    assert text_of(endless.follow(HELLO, ids_of("yes"), MORE)) == "\n<user>more\n<assistant>"


def test_reasoning_that_the_template_forgets_stays_or_forks() -> None:
    said = ids_of("<think>so</think>yes<end>")
    kept = renderer_with(FORGETTING).follow(HELLO, said, MORE)
    assert text_of(kept) == "\n<user>more<end>\n<assistant>"
    fork = renderer_with(FORGETTING, history=History.FORK).follow(HELLO, said, MORE)
    assert isinstance(fork, Fork)
    assert text_of(fork.token_ids) == "<user>hello<end>\n<assistant>yes<end>\n<user>more<end>\n<assistant>"
    assert "'assistant><think>so</think>yes' would now be 'assistant>yes<end>" in fork.why
    # Without reasoning there is nothing to forget.
    assert text_of(renderer_with(FORGETTING, history=History.FORK).follow(HELLO, ids_of("yes<end>"), MORE)) == text_of(
        kept
    )


def test_a_turn_that_stays_as_it_was_said_does_not_fork() -> None:
    # Of the last turn alone the template would have made something else, as Qwen3's does of one without reasoning.
    empty = FORGETTING.replace("message.reasoning_content and loop.last", "message.role == 'assistant' and loop.last")
    renderer = renderer_with(empty, history=History.FORK)
    assert text_of(renderer.follow(HELLO, ids_of("yes<end>"), MORE)) == "\n<user>more<end>\n<assistant>"
    assert isinstance(renderer.follow(HELLO, ids_of("<think></think>yes<end>"), MORE), Fork)


def test_a_way_of_writing_json_that_is_not_the_templates_does_not_fork() -> None:
    renderer = renderer_with(CALLING, history=History.FORK)
    said = ids_of('<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call><end>')
    answer = [{"role": "tool", "content": "2", "tool_call_id": "x"}]
    assert text_of(renderer.follow(HELLO, said, answer, [TOOL])) == "\n<tool>2<end>\n<assistant>"


def test_special_tokens_that_the_policy_spells_are_text() -> None:
    renderer, tokenizer = renderer_with(PLAIN), tokenizer_with(PLAIN)
    spelled = tokenizer("<end>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert renderer.parse([*spelled, end]).message["content"] == "<end>"
    assert renderer.parse([*spelled]).message["content"] == "<end>"
    fork = renderer_with(FORGETTING, history=History.FORK)
    found = fork.follow(HELLO, [*ids_of("<think>a</think>"), *spelled, end], MORE)
    assert isinstance(found, Fork) and found.token_ids.tolist().count(end) == 3


def test_a_call_whose_tokens_are_only_spelled_is_text() -> None:
    tokenizer = tokenizer_with(CALLING)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True, normalized=False)])
    renderer = Renderer(tokenizer, RenderingConfig(), data=DataConfig())
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    meant = tokenizer(call, add_special_tokens=False)["input_ids"]
    spelled = tokenizer(call, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert renderer.parse(meant, [TOOL]).message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert renderer.parse(spelled, [TOOL]).message == {"role": "assistant", "content": call}


def test_malformed_calls_stay_in_the_content_and_say_why() -> None:
    renderer = renderer_with(CALLING)
    reply = renderer.parse(ids_of('So: <tool_call>{"name": "sub", "arguments": {}}</tool_call><end>'), [TOOL])
    assert reply.message == {
        "role": "assistant",
        "content": 'So:<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
    }
    (malformed,) = reply.malformed
    assert malformed.why == "there is no tool 'sub'; there are: add"
    reply = renderer.parse(ids_of('<tool_call>{"name": "add", "arguments": {"b": 1}}</tool_call>'), [TOOL])
    assert [one.why for one in reply.malformed] == ["add needs the argument 'a'"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CALLING, 'So:\n<tool_call>{"name": "sub", "arguments": {}}</tool_call>\nwait'),
        (
            PLAIN + "{# [TOOL_CALLS] #}",
            '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]',
        ),
    ],
)
def test_without_tools_all_is_text(template: str, said: str) -> None:
    """As of an agent that has told the policy of its tools in words, and reads the calls by itself."""
    reply = renderer_with(template).parse(ids_of(said))
    assert (reply.message, reply.malformed) == ({"role": "assistant", "content": said}, ())


def test_a_turn_that_the_template_refuses_is_malformed() -> None:
    single = CALLING + (
        "{% for message in messages %}{% if message.tool_calls | length > 1 %}"
        "{{ raise_exception('one call at a time') }}{% endif %}{% endfor %}"
    )
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    reply = renderer_with(single).parse(ids_of(call + call), [TOOL])
    assert reply.message["content"] == call + call and "tool_calls" not in reply.message
    assert "one call at a time" in reply.malformed[0].why
    # One that refuses every conversation without a system's message says nothing about calls.
    formal = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CALLING
    assert renderer_with(formal).parse(ids_of(call), [TOOL]).message["tool_calls"]


def test_prompts_tell_whether_reasoning_has_begun() -> None:
    # Also where the template never writes the end of what it begins.
    begun = PLAIN.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}")
    renderer = renderer_with(begun)
    assert renderer.parse(ids_of("so</think>yes")).message["reasoning_content"] == "so"
    assert renderer.parse(ids_of("so")).message == {"role": "assistant", "content": "", "reasoning_content": "so"}
    after = ids_of("<user>x<end>\n<assistant>")
    assert renderer.parse(ids_of("so"), prompt=after).message == {"role": "assistant", "content": "so"}


def test_reasoning_of_a_chosen_form_stays_in_templates_that_know_none() -> None:
    fork = renderer_with(PLAIN, history=History.FORK, reasoning="think")
    said = ids_of("<think>\nso\n</think>\n\nyes<end>")
    assert fork.parse(said).message == {"role": "assistant", "content": "yes", "reasoning_content": "so"}
    assert text_of(fork.follow(HELLO, said, MORE)) == "\n<user>more<end>\n<assistant>"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (PLAIN.replace("<end>", "").replace("<{{", "[{{"), "expected a special token to end a turn"),
        (PLAIN.replace("{{ message.content }}", "{{ message.role }}"), "0 times, expected once"),
        (PLAIN.replace("{{ message.content }}", 2 * "{{ message.content }}"), "2 times, expected once"),
    ],
)
def test_templates_that_cannot_be_continued_are_refused(template: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        renderer_with(template).follow(HELLO, ids_of("yes<end>"), MORE)


def test_a_message_that_the_template_drops_is_refused() -> None:
    deaf = PLAIN.replace("{{ message.content }}", "{{ message.content if message.role != 'tool' }}")
    with pytest.raises(DataError, match="leaves out the content of role tool"):
        renderer_with(deaf).follow(HELLO, ids_of("yes<end>"), [{"role": "tool", "content": "17"}])


@pytest.mark.parametrize(
    ("template", "field", "sentence"),
    [
        (PLAIN + "{# tool_calls #}", "tool_calls", "has tools in a form that is not known"),
        (PLAIN + "{# <tool_call> [TOOL_CALLS] #}", "tool_calls", "reads like hermes and mistral"),
    ],
)
def test_a_form_that_cannot_be_told_is_refused_where_there_are_tools(template: str, field: str, sentence: str) -> None:
    renderer = renderer_with(template)
    assert renderer.parse(ids_of("[TOOL_CALLS]")).message["content"] == "[TOOL_CALLS]"
    for refused in (lambda: renderer.open(HELLO, [TOOL]), lambda: renderer.follow(HELLO, [], MORE, [TOOL])):
        with pytest.raises(SettingError, match=f"^{field} cannot be told.*{sentence}.*choose one of"):
            refused()


def test_a_form_of_reasoning_that_cannot_be_told_is_refused() -> None:
    with pytest.raises(SettingError, match="^reasoning cannot be told.*reads like think and brackets.*choose one of"):
        renderer_with(PLAIN + "{# </think> [/THINK] #}")
    assert renderer_with(PLAIN + "{# </think> [/THINK] #}", reasoning="none").parse(ids_of("x")).message


@pytest.mark.parametrize("field", ["tool_calls", "reasoning"])
def test_unknown_forms_are_refused(field: str) -> None:
    with pytest.raises(SettingError, match=f"^{field} must be one of auto, none, .*, got xml"):
        RenderingConfig(**{field: "xml"})
    assert getattr(RenderingConfig(**{field: "none"}), field) == "none"


def test_keyword_arguments_of_the_template_reach_it() -> None:
    brief = PLAIN + "{{ '<user>' if brief else '' }}"
    renderer = renderer_with(brief, data=DataConfig(chat_template_kwargs={"brief": True}))
    assert text_of(renderer.open(HELLO)) == "<user>hello<end>\n<assistant><user>"


def test_a_tokenizer_that_reads_parts_otherwise_than_the_whole_is_refused() -> None:
    tokenizer = tokenizer_with(PLAIN)
    # A special token in the middle of a word is none to this one: `yes<end>` is read, `Turn0x<end>` is not.
    tokenizer.add_tokens([AddedToken("<end>", special=True, single_word=True, normalized=False)])
    renderer = Renderer(tokenizer, RenderingConfig(), data=DataConfig())
    with pytest.raises(DataError, match="reads what follows '<end>', which ends a turn, otherwise than within"):
        renderer.follow(HELLO, ids_of("yes<end>"), MORE)


def test_tokens_that_no_vocabulary_has_are_no_error() -> None:
    # A model's vocabulary is often padded: the policy can sample what the tokenizer does not know.
    renderer = renderer_with(CALLING, history=History.FORK)
    unknown = len(tokenizer_with(PLAIN)) + 7
    said = [unknown, *ids_of("yes"), unknown]
    assert renderer.parse(said).message == {"role": "assistant", "content": "yes"}
    assert text_of(renderer.follow(HELLO, said, MORE)) == "<end>\n<user>more<end>\n<assistant>"


def test_an_end_of_turns_that_is_no_special_token_is_one_if_engines_stop_there() -> None:
    plain = PLAIN.replace("<end>", "<over>").replace("<{{ message.role }}>", "{{ message.role }}: ")
    tokenizer = tokenizer_with(plain.replace("<assistant>", "assistant: "))
    tokenizer.add_tokens([AddedToken("<over>", special=False, normalized=False)])
    end = tokenizer.convert_tokens_to_ids("<over>")
    with pytest.raises(DataError, match="expected a special token to end a turn"):
        Renderer(tokenizer, RenderingConfig(), data=DataConfig()).follow(HELLO, [*ids_of("yes"), end], MORE)
    # A config.json may name a token that its tokenizer has not, and one that is part of words.
    ends = [end, len(tokenizer) + 7, *ids_of("s")]
    renderer = Renderer(tokenizer, RenderingConfig(), data=DataConfig(), end_token_ids=ends)
    assert renderer.parse([*ids_of("yes"), end]).message["content"] == "yes"
    assert renderer.parse(ids_of("yes")).message["content"] == "yes"
    found = renderer.follow(HELLO, [*ids_of("yes"), end], MORE)
    assert tokenizer.decode(found) == "\nuser: more<over>\nassistant: "
