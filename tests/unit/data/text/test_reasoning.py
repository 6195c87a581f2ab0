"""Reasoning of the assistant's messages, and conversations that a template rewrites: learned as the model is served."""

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig
from rlframe.data.kinds import find_source
from rlframe.data.kinds.examples import ExampleSource, learnt_turns
from rlframe.data.prompts import PromptSource
from rlframe.data.text.conversations import text_of, understand
from rlframe.utils.errors import DataError
from tests.unit.attempts.rendering.families import FAMILIES, data_of, tokenizer_of
from tests.unit.data.marks import FORGETTING, TURNS, marked, record, with_template, write

KEEPING = FORGETTING.replace("and loop.last", "")
FIRST, SECOND = (
    "<user>a<end><assistant>[(][x][)][b][<end>]",
    "<user>a<end><assistant>b<end><user>c<end><assistant>[(][y][)][d][<end>]",
)


def source_of(kind: str, tokenizer: PreTrainedTokenizerFast, folder: Path, *rows: dict, **settings: Any) -> Any:
    path = write(folder / "a.jsonl", list(rows))
    config = DataConfig(path=path, cache_folder=None, evaluation_count=0, shuffle=False, **settings)
    return find_source(kind)(config, tokenizer=tokenizer, seed=0, max_tokens=200)


def test_a_conversation_that_is_rewritten_becomes_several_sequences_and_is_counted(
    forgetting: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"id": "two", "messages": TURNS}, {"id": "one", "messages": TURNS[:2]}]
    source = source_of("examples", forgetting, tmp_path, *rows)
    items = source.next(3)
    assert [item.id for item in items] == ["two#0", "two#1", "one"]
    assert [marked(item.parts[0], forgetting) for item in items] == [FIRST, SECOND, FIRST]
    assert source.metrics() == {
        "data/dropped": 0.0,
        "data/rewritten_conversations": 1.0,
        "data/rewritten_sequences": 2.0,
    }
    assert "rewrites earlier turns of 1 conversations so far, which become 2 sequences" in caplog.text


def test_the_cache_keeps_the_counts(forgetting: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": TURNS}])
    config = DataConfig(path=path, cache_folder=str(tmp_path / "cache"), evaluation_count=0)
    first, second = (ExampleSource(config, tokenizer=forgetting, seed=0, max_tokens=200) for _ in range(2))
    assert first.metrics() == second.metrics() and second.metrics()["data/rewritten_sequences"] == 2.0


def test_a_template_that_keeps_reasoning_makes_one_sequence(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    keeping = with_template(tokenizer, KEEPING)
    (item,) = source_of("examples", keeping, tmp_path, {"messages": TURNS}).next(1)
    assert marked(item.parts[0], keeping) == FIRST + "<user>c<end><assistant>[(][y][)][d][<end>]"


def test_reasoning_that_is_not_learned_is_left_out_as_when_served_and_counted(
    forgetting: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = source_of("examples", forgetting, tmp_path, {"messages": TURNS}, last_turn_only=True)
    assert [marked(item.parts[0], forgetting) for item in source.next(1)] == [SECOND]
    assert source.metrics()["data/reasoning_left_out"] == 1.0
    source = source_of("unpaired", forgetting, tmp_path, {"messages": TURNS, "label": True})
    assert [marked(item.parts[0], forgetting) for item in source.next(1)] == [SECOND]
    assert source.metrics()["data/reasoning_left_out"] == 1.0
    source = source_of("labelled", forgetting, tmp_path, {"messages": TURNS, "label": 1})
    assert forgetting.decode(source.next(1)[0].parts[0].token_ids).endswith(
        "<assistant>b<end><user>c<end><assistant>(y)d<end>"
    )
    prompts = PromptSource(
        DataConfig(path=write(tmp_path / "p.jsonl", [{"messages": TURNS[:3], "answer": "1"}]), evaluation_count=0),
        tokenizer=forgetting,
        seed=0,
    )
    assert prompts.next(1)[0].text == "<user>a<end><assistant>b<end><user>c<end><assistant>"
    assert prompts.counted == {"data/reasoning_left_out": 1}


def test_a_pair_reasons_and_must_be_two_sequences(forgetting: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    # They differ in their reasoning only.
    pair = {"prompt": TURNS[:1], "chosen": [TURNS[1]], "rejected": [TURNS[1] | {"reasoning_content": "z"}]}
    (item,) = source_of("preferences", forgetting, tmp_path, pair).next(1)
    assert [marked(part, forgetting) for part in item.parts] == [FIRST, FIRST.replace("[x]", "[z]")]
    several = pair | {"chosen": TURNS[1:]}
    with pytest.raises(
        DataError, match="a.jsonl:1: expected each response of a pair to be one sequence, found 2: the c"
    ):
        source_of("preferences", forgetting, tmp_path, several)
    assert len(source_of("preferences", with_template(forgetting, KEEPING), tmp_path, several)) == 1


def test_reasoning_that_no_template_writes_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for kind, row in (
        ("examples", {"messages": TURNS}),
        ("unpaired", {"messages": TURNS, "label": True}),
        ("labelled", {"messages": TURNS, "label": 1}),
    ):
        with pytest.raises(DataError, match="a.jsonl:1: the chat template of .* never reads reasoning_content, so the"):
            source_of(kind, tokenizer, tmp_path, row)
    prompts = write(tmp_path / "p.jsonl", [{"messages": TURNS[:3], "answer": "1"}])
    with pytest.raises(DataError, match="p.jsonl:1: the chat template of .* never reads reasoning_content"):
        PromptSource(DataConfig(path=prompts, evaluation_count=0), tokenizer=tokenizer, seed=0)
    # It reads the name and does nothing.
    silent = with_template(tokenizer, FORGETTING.replace("({{ m.reasoning_content }})", ""))
    with pytest.raises(DataError, match="a.jsonl:1: the chat template leaves out the reasoning_content of a turn that"):
        source_of("examples", silent, tmp_path, {"messages": TURNS})


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (
            {"role": "user", "content": "a", "thinking": "x"},
            r"expected messages\[1\].thinking to be on a message of the",
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": 1},
            r"expected messages\[1\].reasoning to be text, found int 1",
        ),
        (
            {"role": "assistant", "content": "a", "reasoning": "x", "reasoning_content": "y"},
            r"expected messages\[1\].reasoning_content to be the only reasoning .* found reasoning_content and",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            r"expected messages\[1\].content\[1\] to be {type: text, text: ...}, .* found the type 'image_url' in",
        ),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, r"content\[0\] to be {type: text, text: ...}"),
    ],
)
def test_what_is_no_reasoning_or_no_text_is_refused_by_name(turn: dict, message: str) -> None:
    with pytest.raises(DataError, match="s:1: .*" + message):
        understand(record(messages=[TURNS[0], turn, TURNS[1]]), DataConfig())


def test_names_of_reasoning_and_parts_of_text_are_read() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        turn = {
            "role": "assistant",
            "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}],
            name: "x",
        }
        said = understand(record(messages=[TURNS[0], turn]), DataConfig()).messages[-1]
        assert said == {"role": "assistant", "content": "bc", "reasoning_content": "x"}
    # Null, as columns of Parquet have it, and blank reasoning are none.
    bare = understand(record(messages=[TURNS[0], TURNS[1] | {"reasoning_content": None}]), DataConfig()).messages[-1]
    assert bare == {"role": "assistant", "content": "b"}
    assert text_of([bare]) != text_of([TURNS[1]])


TALK = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "Two.", "reasoning_content": "one and one"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "Four.", "reasoning_content": "two and two"},
]
SEQUENCES = dict.fromkeys(("qwen3", "qwen3.5", "glm4.5", "gpt-oss", "gemma4", "gemma4-off"), 2)
SEQUENCES |= dict.fromkeys(("qwen3.6-kept", "mistral-v13"), 1)
"""Sequences that TALK becomes. The other families do not read reasoning."""


def test_the_remedy_for_deepseek_r1_is_one() -> None:
    tokenizer, config = copy.copy(tokenizer_of("deepseek-r1")), data_of("deepseek-r1")
    answer = {"role": "assistant", "content": "Two."}
    reasoned, plain = (understand(record(messages=[TALK[0], said]), config) for said in (TALK[1], answer))
    with pytest.raises(DataError, match="would be lost; remove it from the data, or set data.chat_template to a templ"):
        learnt_turns(reasoned, tokenizer, config=config)
    with pytest.raises(DataError, match="reads [^;]*; set data.chat_template to a template that writes a reasoning_co"):
        learnt_turns(plain, tokenizer, config=config)
    reading = "<think>\\n' + (message['reasoning_content'] or '') + '\\n</think>\\n\\n' + content + '"
    tokenizer.chat_template = tokenizer.chat_template.replace("' + content + '", reading)
    (tokens,) = learnt_turns(reasoned, tokenizer, config=config).sequences
    said = str(tokenizer.decode(tokens.token_ids[tokens.weights > 0]))
    assert said.startswith("one and one\n</think>\n\nTwo.")


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_learned_as_its_template_serves_it(name: str) -> None:
    tokenizer, config = tokenizer_of(name), data_of(name)
    conversation = understand(record(messages=TALK), config)
    if name not in SEQUENCES:
        with pytest.raises(DataError, match="s:1: the chat template"):
            learnt_turns(conversation, tokenizer, config=config)
        return
    encoded = learnt_turns(conversation, tokenizer, config=config)
    assert len(encoded.sequences) == SEQUENCES[name]
    learned = ""
    for sequence, last in zip(encoded.sequences, [2, 4] if len(encoded.sequences) == 2 else [4], strict=True):
        messages = [dict(turn) for turn in TALK[:last]]
        for message in messages:
            if name == "gpt-oss" and "reasoning_content" in message:
                message["thinking"] = message.pop("reasoning_content")
        served = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **FAMILIES[name].kwargs)
        if name == "glm4.5":  # Ends no turn: its models sample the token of the next one.
            assert sequence.weights[-1]
            served.append(tokenizer.convert_tokens_to_ids("<|user|>"))
        assert served[: len(sequence.token_ids)] == sequence.token_ids.tolist()
        assert not tokenizer.decode(served[len(sequence.token_ids) :]).strip()
        learned += tokenizer.decode(sequence.token_ids[sequence.weights > 0])
    # Each turn once, reasoning first.
    places = [learned.index(words) for turn in TALK[1::2] for words in (turn["reasoning_content"], turn["content"])]
    assert places == sorted(places)
    assert all(learned.count(turn["content"]) == 1 for turn in TALK[1::2])
