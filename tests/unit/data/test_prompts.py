import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig
from rlframe.data.cursor import Cursor, tell_of_repeats
from rlframe.data.prompts import PromptSource
from rlframe.data.storage import tables
from rlframe.utils.errors import DataError
from tests.unit.data.marks import FORGETTING, TURNS, with_template

pytestmark = pytest.mark.later


def write(file: Path, rows: list[dict]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def numbered(count: int) -> list[dict]:
    return [{"id": str(index), "prompt": f"question {index}", "answer": str(index)} for index in range(count)]


def stream_of(count: int, *, seed: int = 0, shuffle: bool = True) -> Cursor[int]:
    return Cursor(
        list(range(count)),
        ids=[str(index) for index in range(count)],
        tokens=[[index] for index in range(count)],
        seed=seed,
        shuffle=shuffle,
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 17), st.integers(0, 5), st.booleans(), st.lists(st.tuples(st.integers(1, 40), st.booleans())))
def test_every_item_comes_exactly_once_per_epoch_whatever_is_saved_and_restored(
    size: int, seed: int, shuffle: bool, calls: list[tuple[int, bool]]
) -> None:
    whole = stream_of(size, seed=seed, shuffle=shuffle)
    stream, dealt = stream_of(size, seed=seed, shuffle=shuffle), []
    for count, crash in calls:
        state = json.loads(json.dumps(stream.state()))
        stream.next(count)  # what a crash loses
        if crash:
            stream = stream_of(size, seed=seed, shuffle=shuffle)
        stream.restore(state)
        dealt += stream.next(count)
    assert not dealt or dealt == whole.next(len(dealt))
    for epoch in range(math.ceil(len(dealt) / size)):
        part = dealt[epoch * size : (epoch + 1) * size]
        assert max(Counter(part).values()) == 1
        assert len(part) < size or set(part) == set(range(size))


def test_seed_and_epoch_decide_the_order() -> None:
    stream = stream_of(50, seed=1)
    first, second = stream.next(50), stream.next(50)
    assert first != second and first != list(range(50))
    assert stream_of(50, seed=1).next(100) == first + second
    assert stream_of(50, seed=2).next(50) != first
    assert stream_of(3, shuffle=False).next(7) == [0, 1, 2, 0, 1, 2, 0]


def test_the_order_is_the_documented_one_so_that_old_checkpoints_stay_valid() -> None:
    # printf "0:0:$i" | sha256sum for i = 0..3: e8ca2bd5, 5bbc4bd6, b052aa24, ca6905f3
    assert stream_of(4, seed=0).next(4) == [1, 2, 3, 0]


def test_restore_refuses_other_data_or_another_seed() -> None:
    state = stream_of(5).state()
    with pytest.raises(DataError, match="the seed was 0 and is now 1"):
        stream_of(5, seed=1).restore(state)
    with pytest.raises(DataError, match="number of items after filtering was 5 and is now 6"):
        stream_of(6).restore(state)
    changed = Cursor([0] * 5, ids=list("01234"), tokens=[[9]] * 5, seed=0, shuffle=True)
    with pytest.raises(DataError, match="fingerprint of ids and tokens"):
        changed.restore(state)


def test_a_prompt_is_the_rendered_chat_and_its_tokens(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.jsonl", [{"id": "x", "question": "Hi", "answer": "So\n#### 7,001"}])
    stream = PromptSource(DataConfig(path=path, evaluation_count=0, system_prompt="S"), tokenizer=tokenizer, seed=0)
    (prompt,) = stream.next(1)
    assert prompt.text == "<system>S<end>\n<user>Hi<end>\n<assistant>"
    byte = {text: tokenizer.convert_tokens_to_ids(text) for text in ["S", "H", "i", "\u010a"]}  # byte-level newline
    newline = byte["\u010a"]
    assert tuple(prompt.input.token_ids) == (1, byte["S"], 0, newline, 2, byte["H"], byte["i"], 0, newline, 3)
    assert (prompt.id, prompt.answer, prompt.source) == ("x", "7001", "a.jsonl")
    assert prompt.fields["answer"] == "So\n#### 7,001"


def test_gsm8k_loads_whole_and_its_held_out_prompts_do_not_depend_on_the_seed(
    shared_data: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = DataConfig(path=str(shared_data / "gsm8k" / "train.jsonl"), evaluation_count=100)
    stream = PromptSource(config, tokenizer=tokenizer, seed=0)
    again = PromptSource(config, tokenizer=tokenizer, seed=1)
    held_out = stream.evaluation_prompts()
    assert [prompt.id for prompt in held_out] == [prompt.id for prompt in again.evaluation_prompts()]
    assert len(held_out) == 100
    assert len(stream) + 100 + sum(stream.dropped.values()) == 7473
    epoch = stream.next(len(stream))
    assert not {prompt.id for prompt in epoch} & {prompt.id for prompt in held_out}
    assert len({prompt.id for prompt in epoch}) == len(stream)
    assert all(float(prompt.answer or "") is not None for prompt in epoch)
    natalia = next(prompt for prompt in epoch + held_out if "Natalia sold clips to 48" in prompt.text)
    assert natalia.answer == "72"


def test_a_held_out_prompt_is_never_trained_on_even_under_another_id(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    train = write(tmp_path / "train.jsonl", numbered(10))
    test = write(tmp_path / "test.jsonl", [{"id": "0", "prompt": "other"}, {"id": "t", "prompt": "question 3"}])
    stream = PromptSource(DataConfig(path=train, evaluation_path=test), tokenizer=tokenizer, seed=0)
    assert {prompt.id for prompt in stream.next(9)} == set("012456789")  # id 0 is another prompt here, 3 is the same
    assert {prompt.id for prompt in stream.evaluation_prompts()} == {"0", "t"}
    assert stream.dropped == {"prompt is held out": 1}


@pytest.mark.parametrize(("count", "kept", "dropped"), [(256, 10, 0), (2, 2, 8)])
def test_prompts_of_several_records_are_held_out_whole_and_cost_a_tenth_at_most(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, count: int, kept: int, dropped: int
) -> None:
    rows = [{"id": str(index), "prompt": f"question {index % 20}", "answer": str(index)} for index in range(100)]
    config = DataConfig(path=write(tmp_path / "a.jsonl", rows), evaluation_count=count)
    stream = PromptSource(config, tokenizer=tokenizer, seed=0)
    held_out = {prompt.text for prompt in stream.evaluation_prompts()}
    # Of 100 records 10 at most: two prompts of five.
    assert (len(held_out), len(stream.evaluation_prompts()), len(stream)) == (2, kept, 90)
    assert stream.dropped.total() == dropped
    assert not {prompt.text for prompt in stream.next(len(stream))} & held_out


def test_dropped_records_are_counted_by_reason(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [*numbered(5), numbered(5)[3], {"id": "long", "prompt": "x" * 500}]
    config = DataConfig(path=write(tmp_path / "a.jsonl", rows), evaluation_count=0, max_prompt_tokens=100)
    stream = PromptSource(config, tokenizer=tokenizer, seed=0)
    assert len(stream) == 5
    assert stream.dropped == {"duplicate id": 1, "prompt is too long": 1}


@pytest.mark.parametrize("way", ["held", "stored", "streamed"])
def test_records_of_one_id_that_say_different_things_are_all_trained_on(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(tables, "SMALL_BYTES", 0 if way == "stored" else 1 << 30)
    (tmp_path / "data").mkdir()
    others = [row | {"prompt": f"another {row['prompt']}"} for row in numbered(3)]
    write(tmp_path / "data" / "a.jsonl", numbered(3))
    write(tmp_path / "data" / "b.jsonl", [*others, others[1], numbered(3)[0]])
    settings: dict[str, Any] = {"streaming": True} if way == "streamed" else {"cache_folder": None}
    config = DataConfig(path=str(tmp_path / "data"), evaluation_count=0, **settings)
    stream = PromptSource(config, tokenizer=tokenizer, seed=0)
    dealt = {prompt.id: prompt.messages[0]["content"] for prompt in stream.next(6)}
    assert sorted(dealt.values()) == sorted(row["prompt"] for row in [*numbered(3), *others])
    assert {"0", "1", "2"} < dealt.keys() and all(dealt[each] == f"question {each}" for each in "012")
    assert stream.dropped == {"duplicate id": 2} and stream.epoch == 0


def test_all_prompts_too_long_says_how_long_they_are(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = DataConfig(path=write(tmp_path / "a.jsonl", numbered(1)), evaluation_count=0, max_prompt_tokens=5)
    # <user> + "question 0" + <end> + newline + <assistant> = 1 + 10 + 1 + 1 + 1
    with pytest.raises(DataError, match="max_prompt_tokens=5 tokens, found none; the shortest has 14"):
        PromptSource(config, tokenizer=tokenizer, seed=0)


def test_a_count_suffix_keeps_that_many_chosen_by_the_seed(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.jsonl", numbered(100))
    chosen = {}
    for seed in (0, 1):
        stream = PromptSource(DataConfig(path=path + "#20"), tokenizer=tokenizer, seed=seed)
        assert len(stream.evaluation_prompts()) == 10  # a tenth of the file
        chosen[seed] = {prompt.id for prompt in stream.next(20)}
        assert len(chosen[seed]) == len(stream) == 20
        assert not chosen[seed] & {prompt.id for prompt in stream.evaluation_prompts()}
    assert chosen[0] != chosen[1]


def test_arithmetic_is_built_in_with_256_held_out(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = PromptSource(DataConfig(path="arithmetic#1000"), tokenizer=tokenizer, seed=0)
    held_out = stream.evaluation_prompts()
    assert len(stream) == 1000 and len(held_out) == 256
    assert not {prompt.id for prompt in stream.next(1000)} & {prompt.id for prompt in held_out}
    (prompt,) = stream.next(1)
    assert prompt.text == f"<user>{prompt.id}<end>\n<assistant>"


def test_a_tokenizer_without_chat_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="has no chat template"):
        PromptSource(DataConfig(path="arithmetic#1"), tokenizer=bare, seed=0)


def test_a_template_that_refuses_a_conversation_names_the_record(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    strict = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    strict.chat_template = "{{ raise_exception('no system message please') }}"
    config = DataConfig(path=write(tmp_path / "a.jsonl", numbered(1)), system_prompt="S", evaluation_count=0)
    with pytest.raises(
        DataError, match="a.jsonl:1: the chat template of '' refuses turns of system, user: no system message"
    ):
        PromptSource(config, tokenizer=strict, seed=0)


def streamed(path: str, buffer: int, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> PromptSource:
    config = DataConfig(path=path, streaming=True, shuffle_buffer=buffer, **settings)
    return PromptSource(config, tokenizer=tokenizer, seed=0)


def test_prompts_that_fit_one_window_come_as_from_memory(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.jsonl", numbered(9))
    config = DataConfig(path=path, evaluation_count=0, cache_folder=None)
    whole, stream = PromptSource(config, tokenizer=tokenizer, seed=0), streamed(path, 100, tokenizer)
    assert stream.next(22) == whole.next(22) and stream.epoch == whole.epoch == 2
    assert stream.evaluation_prompts() == []


def test_streamed_prompts_come_once_an_epoch_and_a_resumed_run_goes_on_with_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path / "a.jsonl", numbered(23))
    stream = streamed(path, 5, tokenizer)
    dealt = [prompt.id for prompt in stream.next(9)]
    state = json.loads(json.dumps(stream.state()))
    expected = [prompt.id for prompt in stream.next(37)]
    resumed = streamed(path, 5, tokenizer)
    resumed.restore(state)
    assert [prompt.id for prompt in resumed.next(37)] == expected
    epochs = [(dealt + expected)[start : start + 23] for start in (0, 23)]
    assert [sorted(map(int, each)) for each in epochs] == [list(range(23))] * 2 and epochs[0] != epochs[1]
    changed = streamed(write(tmp_path / "b.jsonl", numbered(22)[::-1]), 5, tokenizer)
    with pytest.raises(DataError, match="the data is not that of the checkpoint"):
        changed.restore(state)


def test_streamed_prompts_that_are_held_out_repeated_or_too_long_are_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = numbered(6)
    rows[3]["prompt"] = "long " * 200
    path = write(tmp_path / "a.jsonl", [*rows[:3], rows[0], *rows[3:]])
    held_out = write(tmp_path / "b.jsonl", [{"id": "x", "prompt": "question 5", "answer": "5"}])
    stream = streamed(path, 100, tokenizer, evaluation_path=held_out, max_prompt_tokens=64)
    assert sorted(prompt.id for prompt in stream.next(4)) == ["0", "1", "2", "4"]
    assert [prompt.id[-1] for prompt in stream.evaluation_prompts()] == ["x"]
    assert stream.dropped == {"prompt is held out": 1, "duplicate id": 1, "prompt is too long": 1}


def test_what_a_later_window_leaves_out_is_told_once_for_each_reason(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = with_template(tokenizer, FORGETTING)
    rows = numbered(10)
    rows[4]["prompt"] = rows[8]["prompt"] = "long " * 200
    rows[6] = {"id": "6", "messages": TURNS, "answer": "1"}
    stream = streamed(write(tmp_path / "a.jsonl", rows), 2, tokenizer, max_prompt_tokens=64)
    assert caplog.text == ""
    assert len(stream.next(8)) == 8
    assert caplog.text.count("left out so far: {'prompt is too long': 1}") == caplog.text.count("left out") == 1
    assert caplog.text.count("leaves out the reasoning of 1 earlier turns so far") == 1
    assert stream.dropped == {"prompt is too long": 2} and stream.counted == {"data/reasoning_left_out": 1}
    resumed = streamed(str(tmp_path / "a.jsonl"), 2, tokenizer, max_prompt_tokens=64)
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert (resumed.dropped, resumed.counted) == (stream.dropped, stream.counted)


def test_a_step_of_more_prompts_than_there_are_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    config = DataConfig(path="a.jsonl")
    for count, told in ((4, ""), (5, "prompts_per_step=5 is more than the 4 that a.jsonl has to train on")):
        tell_of_repeats(stream_of(4), config, prompts_per_step=count)
        assert told in caplog.text and bool(caplog.text) == bool(told)
