import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig
from rlframe.data.items import Item
from rlframe.data.kinds.examples import ExampleSource, learnt_turns
from rlframe.data.kinds.unpaired import UnpairedSource
from rlframe.data.prompts import PromptSource
from rlframe.data.records import Record
from rlframe.data.text.conversations import understand
from rlframe.data.text.turns import Tokens
from rlframe.utils.errors import DataError
from tests.unit.data.marks import marked, with_template


def examples_of(tokenizer: PreTrainedTokenizerFast, fields: dict, **settings: Any) -> tuple[Tokens, ...]:
    config = DataConfig(**settings)
    conversation = understand(Record(fields=fields, source="s", where="s:1"), config)
    return learnt_turns(conversation, tokenizer, config=config).sequences


def example_of(tokenizer: PreTrainedTokenizerFast, fields: dict, **settings: Any) -> Tokens:
    (example,) = examples_of(tokenizer, fields, **settings)
    return example


def test_the_assistant_and_the_token_that_ends_its_turn_are_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    example = example_of(tokenizer, {"prompt": "Hi", "response": "ok"})
    # The newline the template puts after <end> is never generated: not trained on, and cut off.
    assert marked(example, tokenizer) == "<user>Hi<end>\n<assistant>[o][k][<end>]"


def test_every_assistant_turn_is_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "de")]
    example = example_of(tokenizer, {"messages": [{"role": role, "content": text} for role, text in turns]})
    assert marked(example, tokenizer) == (
        "<system>S<end>\n<user>a<end>\n<assistant>[b][<end>]\n<user>c<end>\n<assistant>[d][e][<end>]"
    )


def test_a_conversation_that_begins_with_a_learned_turn_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    messages = [*turns, {"role": "assistant", "content": "c"}]
    with pytest.raises(DataError, match=r"^s:1: expected a message before the first turn that is learned, found that "):
        examples_of(tokenizer, {"messages": messages})
    messages[0]["weight"] = 0  # type: ignore[assignment]
    example = example_of(tokenizer, {"messages": messages})
    assert marked(example, tokenizer) == "<assistant>a<end>\n<user>b<end>\n<assistant>[c][<end>]"


ENDLESS = (
    "{% for m in messages %}<{{ 'system' if m.role == 'tool' else m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}={{ call.function.arguments.x }};{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Ends no turn, as GLM's. Tools answer in turns of their own."""


def test_a_turn_that_the_template_does_not_end_is_ended_by_the_next_one(tokenizer: PreTrainedTokenizerFast) -> None:
    endless = with_template(tokenizer, ENDLESS)
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d\n")]
    messages: list[dict] = [{"role": role, "content": text} for role, text in turns]
    said = "<user>a<assistant>[b][<user>]c<assistant>[d][\n][<user>]"
    assert marked(example_of(endless, {"messages": messages}), endless) == said
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "y"}}}]}
    waits = {"messages": [messages[0], call]}
    assert marked(example_of(endless, waits), endless) == "<user>a<assistant>[f][=][y][;][<system>]"
    answered = {"messages": [messages[0], call, {"role": "tool", "content": "z"}, messages[1]]}
    assert marked(example_of(endless, answered), endless) == (
        "<user>a<assistant>[f][=][y][;][<system>]z<assistant>[b][<user>]"
    )


TALK = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")]


def test_the_last_turn_alone_is_learnt_when_asked(tokenizer: PreTrainedTokenizerFast) -> None:
    messages: list[dict] = [{"role": role, "content": text} for role, text in TALK]
    last = example_of(tokenizer, {"messages": messages}, last_turn_only=True)
    assert marked(last, tokenizer) == (
        "<user>a<end>\n<assistant>b<end>\n<user>c<end>\n<assistant>d<end>\n<user>e<end>\n<assistant>[f][<end>]"
    )
    # A message that says its weight has it all the same.
    messages[1]["weight"], messages[5]["weight"] = 0.5, 0
    told = example_of(tokenizer, {"messages": messages}, last_turn_only=True)
    assert marked(told, tokenizer) == "<user>a<end>\n<assistant>[b][<end>]"
    assert told.weights[told.weights > 0].tolist() == [0.5, 0.5]
    apart = {"prompt": messages[:1], "completion": [{**messages[1], "weight": None}, *messages[2:4]]}
    assert marked(example_of(tokenizer, apart, last_turn_only=True), tokenizer).count("[") == len("d") + 1


def test_a_message_counts_by_its_weight_and_a_weight_of_zero_masks_it(tokenizer: PreTrainedTokenizerFast) -> None:
    messages: list[dict] = [{"role": role, "content": text} for role, text in TALK]
    messages[1]["weight"], messages[3]["weight"], messages[0]["weight"] = 0, 0.25, 0
    tokens = example_of(tokenizer, {"messages": messages, "system": "S"})
    assert marked(tokens, tokenizer).replace("\n", "") == (
        "<system>S<end><user>a<end><assistant>b<end><user>c<end><assistant>[d][<end>]<user>e<end><assistant>[f][<end>]"
    )
    assert tokens.weights[tokens.weights > 0].tolist() == [0.25, 0.25, 1.0, 1.0]


@pytest.mark.parametrize("key", ["train", "loss"])
def test_a_message_that_says_whether_it_is_trained_on_is_heard(tokenizer: PreTrainedTokenizerFast, key: str) -> None:
    # The first is axolotl's word for it, the second ms-swift's.
    messages: list[dict] = [{"role": role, "content": text} for role, text in TALK]
    messages[0][key], messages[1][key], messages[3][key] = False, False, True
    tokens = example_of(tokenizer, {"messages": messages})
    assert marked(tokens, tokenizer).count("[") == len("df") + 2
    messages[0][key] = True
    with pytest.raises(DataError, match=rf"s:1: expected messages\[0\].{key} to be on a message of the assistant"):
        understand(Record(fields={"messages": messages}, source="s", where="s:1"), DataConfig())


@pytest.mark.parametrize(("key", "value"), [("loss_scale", [0.5]), ("train_detail", [{"begin_offset": 0}])])
def test_a_weight_of_a_part_of_a_message_is_refused(key: str, value: object) -> None:
    messages: list[dict] = [{"role": role, "content": text} for role, text in TALK]
    messages[1][key] = value
    with pytest.raises(DataError, match=rf"s:1: expected messages\[1\] to say its weight as 'weight', found '{key}'"):
        understand(Record(fields={"messages": messages}, source="s", where="s:1"), DataConfig())


@pytest.mark.parametrize("key", ["weight", "reasoning", "thinking"])
def test_what_stands_beside_the_response_of_a_record_and_would_be_left_out_is_refused(key: str) -> None:
    def understood(fields: dict, **settings: Any) -> None:
        ExampleSource.understand(
            Record(fields={"question": "q", **fields}, source="s", where="s:1"), DataConfig(**settings)
        )

    answered = {"answer": "so 4"}
    if key == "weight":
        understood({**answered, key: 1.0})
        with pytest.raises(
            DataError, match="s:1: expected no weight of a whole record, .*found the field 'weight' 0.5"
        ):
            understood({**answered, key: 0.5})
        return
    understood({**answered, key: "so"})
    understood({**answered, key: "2 and 2"}, answer_key="answer")
    # Prompts have no response to learn.
    understand(Record(fields={"question": "q", **answered, key: "2 and 2"}, source="s", where="s:1"), DataConfig())
    with pytest.raises(DataError, match=f"s:1: expected the whole response in 'answer', found '{key}' beside it"):
        understood({**answered, key: "2 and 2"})


def test_responses_beside_the_answer_are_refused_in_place_of_being_left_out() -> None:
    """As mode=generate writes them: the answer of the data alone was learnt."""
    asked = {"messages": [{"role": "user", "content": "2+2="}], "answer": "4"}
    record = Record(fields={**asked, "responses": [{"text": "4"}, {"text": "5"}]}, source="s", where="s:1")
    with pytest.raises(DataError, match="s:1: expected one response, found 'answer' beside 'responses', a list of 2"):
        ExampleSource.understand(record, DataConfig())
    assert ExampleSource.understand(record, DataConfig(answer_key="answer")).messages[-1]["content"] == "4"
    # As prompts its records are whole.
    assert understand(record, DataConfig()).answer == "4"


@pytest.mark.parametrize(
    ("weight", "on", "message"),
    [
        (-1, 1, r"expected messages\[1\].weight to be a number of at least 0, found -1"),
        ("0.5", 1, r"expected messages\[1\].weight to be a number of at least 0, found '0.5'"),
        (1, 0, r"expected messages\[0\].weight to be on a message of the assistant, who alone is learnt, found 1"),
    ],
)
def test_a_bad_weight_is_refused(weight: object, on: int, message: str) -> None:
    messages: list[dict] = [{"role": role, "content": text} for role, text in TALK]
    messages[on]["weight"] = weight
    with pytest.raises(DataError, match="s:1: " + message):
        understand(Record(fields={"messages": messages}, source="s", where="s:1"), DataConfig())


def test_a_conversation_without_a_weight_is_dropped_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    silent = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": silent}) + "\n" + '{"prompt": "a", "response": "b"}\n')
    config = DataConfig(path=str(file), evaluation_count=0)
    stream = ExampleSource(config, tokenizer=tokenizer, seed=0, max_tokens=100)
    assert len(stream) == 1 and stream.dropped == {"no turn has a weight": 1}


def test_the_whole_worked_answer_of_gsm8k_is_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    example = example_of(tokenizer, {"question": "?", "answer": "1+1=2\n#### 2"})
    trained = [token for token, flag in zip(example.token_ids, example.weights, strict=True) if flag]
    assert tokenizer.decode(trained) == "1+1=2\n#### 2<end>"


def test_a_template_without_an_end_token_trains_on_the_whole_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    plain.chat_template = (
        "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    assert marked(example_of(plain, {"prompt": "Hi", "response": "ok"}), plain) == "u:Hi\na:[o][k][\n]"


def test_where_a_template_rewrites_earlier_turns_each_turn_is_learnt_as_it_is_served(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    forgetful = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    # Shows only the last assistant turn, as templates do that drop earlier reasoning.
    forgetful.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}<end>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert [marked(example, forgetful) for example in examples_of(forgetful, {"messages": messages})] == [
        "<user>a<end><assistant>[b][<end>]",
        "<user>a<end><assistant><end><user>c<end><assistant>[d][<end>]",
    ]


def test_a_template_that_opens_a_turn_otherwise_than_it_writes_it_is_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    other.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>Hm: {% endif %}"
    )
    with pytest.raises(DataError, match=r"s:1: the chat template opens a turn .*at token 4 .*<assistant>Hm: .*>b<"):
        example_of(other, {"prompt": "a", "response": "b"})


@pytest.mark.parametrize("kind", [ExampleSource, UnpairedSource])
@pytest.mark.parametrize(("name", "key"), [("completion", None), ("response", None), ("best", "best")])
def test_a_response_beside_a_whole_conversation_is_its_last_turn(
    kind: type[ExampleSource | UnpairedSource], name: str, key: str | None
) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so: 5"}]
    fields = {"messages": turns, "label": True}
    config = DataConfig(answer_key=key)
    with pytest.raises(DataError, match=f"s:1: expected one response, .* and that '{name}' says another: '6'"):
        kind.understand(Record(fields={**fields, name: "6"}, source="s", where="s:1"), config)
    kind.understand(Record(fields={**fields, name: " 5\n"}, source="s", where="s:1"), config)
    # An answer to compare with is none to learn.
    kind.understand(Record(fields={**fields, "answer": "6", name: None}, source="s", where="s:1"), config)


def test_a_conversation_must_end_with_the_assistant() -> None:
    record = Record(fields={"prompt": "Hi"}, source="s", where="s:1")
    with pytest.raises(DataError, match="s:1: expected the last message from the assistant, found 'user'"):
        ExampleSource.understand(record, DataConfig())
    pair = Record(fields={"prompt": "Hi", "chosen": "a", "rejected": "b"}, source="s", where="s:1")
    with pytest.raises(DataError, match="found 'user', in a record with the fields prompt, chosen, rejected; name the"):
        ExampleSource.understand(pair, DataConfig())


def test_examples_are_dealt_once_per_epoch_and_hold_out_what_prompts_hold_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{index}", "answer": str(index)}) + "\n" for index in range(50)))
    config = DataConfig(path=str(file))
    stream = ExampleSource(config, tokenizer=tokenizer, seed=3, max_tokens=100)
    prompts = PromptSource(config, tokenizer=tokenizer, seed=3)
    assert len(stream) == 45
    ids = [example.id for example in stream.next(45)]
    assert len(set(ids)) == 45
    assert ids == [prompt.id for prompt in prompts.next(45)]
    held_out = [prompt.id for prompt in prompts.evaluation_prompts()]
    assert [example.id for example in stream.held_out()] == held_out and len(held_out) == 5


def test_too_long_examples_are_dropped_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": "bbbbbbbbbb"}\n')
    config = DataConfig(path=str(file), evaluation_count=0)
    stream = ExampleSource(config, tokenizer=tokenizer, seed=0, max_tokens=10)
    assert len(stream) == 1 and stream.dropped == {"example is too long": 1}
    # <user> a <end> newline <assistant> b <end>
    with pytest.raises(DataError, match=r"at most 6 tokens .*the shortest has 7"):
        ExampleSource(config, tokenizer=tokenizer, seed=0, max_tokens=6)


@pytest.mark.parametrize("name", ["alpaca_en_demo", "identity", "kto_en_demo"])
def test_public_demo_files_become_examples(shared_data: Path, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    path = str(shared_data / "llamafactory" / f"{name}.json")
    stream = ExampleSource(DataConfig(path=path), tokenizer=tokenizer, seed=0, max_tokens=100_000)
    for example in stream.next(len(stream)):
        (tokens,) = example.parts
        assert len(tokens.token_ids) == len(tokens.weights)
        assert tokens.weights[-1] and not tokens.weights[0]


def test_examples_pack_end_to_end(tokenizer: PreTrainedTokenizerFast) -> None:
    def item(identity: str, token_ids: list[int], weights: list[float]) -> Item:
        tokens = Tokens(token_ids=np.array(token_ids, dtype=np.int32), weights=np.array(weights, dtype=np.float32))
        return Item(id=identity, parts=(tokens,))

    config = DataConfig(path="arithmetic#1", evaluation_count=0)
    stream = ExampleSource(config, tokenizer=tokenizer, seed=0, max_tokens=100)
    batch = stream.batch([item("a", [7, 8, 5], [0, 0, 1]), item("b", [9, 4], [0, 0.5])])
    assert batch.importance.tolist() == [0, 0, 1, 0, 0.5]
    assert batch.token_ids.tolist() == [7, 8, 5, 9, 4]
    assert batch.lengths.tolist() == [3, 2]
    assert batch.loss_mask.tolist() == [False, False, True, False, True]
