"""Datasets that are read as they are needed: the same items as from memory, in bounded windows, resumed exactly."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.algorithms.sft import Sft, SftConfig
from rlframe.data.config import DataConfig
from rlframe.data.kinds import find_source
from rlframe.data.training import TrainingSource
from rlframe.run.check.data import read_all
from rlframe.utils.errors import DataError
from tests.unit.data.marks import write
from tests.unit.data.test_cache import ROWS, plain

pytestmark = pytest.mark.later


def stream_of(
    config: DataConfig, tokenizer: PreTrainedTokenizerFast, kind: str = "examples", **settings: int
) -> TrainingSource:
    return find_source(kind)(config, tokenizer=tokenizer, **{"seed": 0, "max_tokens": 100} | settings)


def numbered(folder: Path, count: int, name: str = "a") -> str:
    """A file of short examples whose ids are their numbers; its path."""
    rows = [{"id": str(index), "prompt": f"{name}{index}", "response": "r"} for index in range(count)]
    return write(folder / f"{name}.jsonl", rows)


def streamed(path: str | list[str] | dict[str, float], buffer: int, **settings: object) -> DataConfig:
    return DataConfig(path=path, streaming=True, shuffle_buffer=buffer, **settings)  # type: ignore[arg-type]


def ids(stream: TrainingSource, count: int) -> list[str]:
    return [item.id for item in stream.next(count)]


@pytest.mark.parametrize("kind", sorted(ROWS))
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_window_that_holds_all_deals_what_a_dataset_in_memory_deals(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kind: str, shuffle: bool
) -> None:
    path = write(tmp_path / "a.jsonl", ROWS[kind])
    whole = stream_of(DataConfig(path=path, evaluation_count=0, shuffle=shuffle, cache_folder=None), tokenizer, kind)
    stream = stream_of(streamed(path, 100, shuffle=shuffle), tokenizer, kind)
    assert len(stream) == len(whole)
    count = 2 * len(whole) + 3
    assert [plain(item) for item in stream.next(count)] == [plain(item) for item in whole.next(count)]
    assert stream.epoch == whole.epoch == 2


def test_windows_follow_the_file_each_record_once_an_epoch_and_shuffled_within(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    stream = stream_of(streamed(numbered(tmp_path, 23), 5), tokenizer)
    first, second = ids(stream, 23), ids(stream, 23)
    for epoch in (first, second):
        windows = [epoch[start : start + 5] for start in range(0, 23, 5)]
        expected = [{str(index) for index in range(start, min(start + 5, 23))} for start in range(0, 23, 5)]
        assert [set(window) for window in windows] == expected
    assert first != second and first != [str(index) for index in range(23)]
    assert ids(stream_of(stream.config, tokenizer), 46) == first + second
    assert ids(stream_of(stream.config, tokenizer, seed=1), 23) != first


def test_no_more_than_a_window_is_read_ahead(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = Path(numbered(tmp_path, 12))
    path.write_text(path.read_text() + "no record\n")
    stream = stream_of(streamed(str(path), 4), tokenizer)
    assert len(stream) == 4
    assert len(ids(stream, 12)) == 12
    with pytest.raises(DataError, match="a.jsonl:13: expected one JSON object per line"):
        stream.next(1)
    # Before a run starts as much is looked at.
    read_all(stream.config, Sft(SftConfig()), seed=0)
    with pytest.raises(DataError, match="a.jsonl:13: expected one JSON object per line"):
        read_all(replace(stream.config, shuffle_buffer=13), Sft(SftConfig()), seed=0)


@pytest.mark.parametrize("kind", [*sorted(ROWS), "a mixture", "a list"])
def test_a_resumed_stream_deals_what_would_have_come(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    path: str | list[str] | dict[str, float]
    if kind in ROWS:
        path = write(tmp_path / "a.jsonl", ROWS[kind])
    else:
        files = [numbered(tmp_path, 11), numbered(tmp_path, 7, "b")]
        path = files if kind == "a list" else dict(zip(files, (0.7, 0.3), strict=True))
    config, kind = streamed(path, 4), kind if kind in ROWS else "examples"
    whole = [plain(item) for item in stream_of(config, tokenizer, kind).next(65)]
    stream, dealt = stream_of(config, tokenizer, kind), []
    for count in (1, 7, 4, 13, 5, 11, 24):
        state = json.loads(json.dumps(stream.state()))
        stream.next(3)  # what a crash loses
        stream = stream_of(config, tokenizer, kind)
        stream.restore(state)
        dealt += [plain(item) for item in stream.next(count)]
    assert dealt == whole


def test_other_data_is_refused_on_resume(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    config = streamed(numbered(tmp_path, 20), 4)
    stream = stream_of(config, tokenizer)
    stream.next(10)
    state = stream.state()
    with pytest.raises(DataError, match="the seed was 0 and is now 1"):
        stream_of(config, tokenizer, seed=1).restore(state)
    with pytest.raises(DataError, match="data.shuffle_buffer was 4 and is now 5"):
        stream_of(replace(config, shuffle_buffer=5), tokenizer).restore(state)
    with pytest.raises(DataError, match="the fingerprint of its ids and tokens"):
        stream_of(replace(config, system_prompt="S"), tokenizer).restore(state)
    numbered(tmp_path, 6)
    with pytest.raises(DataError, match="the number of records before the window was 8 and is now 6"):
        stream_of(config, tokenizer).restore(state)
    with pytest.raises(DataError, match="data.shuffle_buffer was None and is now 4"):
        stream_of(config, tokenizer).restore(stream_of(DataConfig(path="arithmetic#5"), tokenizer).state())


def test_datasets_come_in_their_shares_or_one_after_the_other(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    one, other = numbered(tmp_path, 9), numbered(tmp_path, 6, "b")
    mixed = stream_of(streamed({one: 3, other: 1}, 4), tokenizer)
    items = mixed.next(80)
    assert Counter(mixed.channels[item.channel] for item in items) == {"a": 60, "b": 20}
    for start in range(0, 54, 9):
        assert len({item.id for item in [item for item in items if item.channel == 0][start : start + 9]}) == 9
    # 60 of 9 are epochs 0..6, 20 of 6 are 0..3.
    assert mixed.epoch == 3
    listed = stream_of(streamed([one, other], 4), tokenizer)
    items = listed.next(15)
    assert {item.id for item in items[:8]} == {f"a/{index}" for index in range(8)}
    # The third window spans the border.
    assert {item.id for item in items[8:12]} == {"a/8", "b/0", "b/1", "b/2"}
    assert all(item.id.startswith(listed.channels[item.channel]) for item in items)


def test_text_is_joined_within_a_window(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "de"}, {"text": "fghi"}])
    stream = stream_of(streamed(path, 2, shuffle=False), tokenizer, "texts", max_tokens=5)
    # abc<end>de<end> is 5 and 2 tokens, fghi<end> 5.
    texts = [tokenizer.decode(item.parts[0].token_ids) for item in stream.next(3)]
    assert texts == ["abc<end>d", "e<end>", "fghi<end>"]


def test_what_is_left_out_is_counted_across_a_resume(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"id": str(index), "prompt": f"q{index}", "response": "r" * (200 if index % 3 else 1)} for index in range(9)
    ]
    held_out = write(tmp_path / "b.jsonl", [{"prompt": "q3", "response": "s"}])
    config = streamed(write(tmp_path / "a.jsonl", rows), 3, evaluation_path=held_out)
    stream = stream_of(config, tokenizer)
    assert caplog.text.count("left out") == 1 and "'example is too long': 2" in caplog.text
    assert [item.channel for item in stream.held_out()] == [1]
    assert ids(stream, 2) == ["0", "6"]  # 3 is held out, and its window empty
    counted = {"example is too long": 6, "prompt is held out": 1}
    assert stream.dropped == counted and caplog.text.count("left out") == 2
    again = stream_of(config, tokenizer)
    again.restore(json.loads(json.dumps(stream.state())))
    assert again.dropped == counted and ids(again, 1) == ["0"] and again.epoch == 1


def test_data_without_a_usable_record_ends_instead_of_going_round(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = streamed(numbered(tmp_path, 9), 2)
    with pytest.raises(DataError, match="found none that can be used in the whole of the data"):
        stream_of(config, tokenizer, max_tokens=3)


def test_parquet_and_folders_stream_and_json_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"id": str(index), "prompt": "q", "response": "r"} for index in range(1040)]
    (tmp_path / "d").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:1030]), tmp_path / "d" / "a.parquet")
    write(tmp_path / "d" / "b.jsonl", rows[1030:])
    stream = stream_of(streamed(str(tmp_path / "d"), 600, shuffle=False), tokenizer)
    assert len(stream) == 600 and ids(stream, 1041) == [row["id"] for row in [*rows, rows[0]]]
    (tmp_path / "c.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"c.json: expected .jsonl, .parquet or .txt with data.streaming=true, as a"):
        stream_of(streamed(str(tmp_path / "c.json"), 5), tokenizer)


def test_a_dataset_of_the_hub_streams(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package takes a folder `owner/name` of the working directory for the hub's dataset of that name.
    (tmp_path / "owner" / "name").mkdir(parents=True)
    numbered(tmp_path / "owner" / "name", 20)
    monkeypatch.chdir(tmp_path)
    stream = stream_of(streamed("owner/name:default:train", 6), tokenizer)
    first = ids(stream, 9)
    assert {*first[:6]} == {str(index) for index in range(6)}
    again = stream_of(stream.config, tokenizer)
    again.restore(stream.state())
    assert ids(again, 11) == ids(stream, 11)


def test_names_of_classes_must_be_given(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "a", "label": "ham"}, {"text": "b", "label": "spam"}])
    with pytest.raises(DataError, match="a.jsonl:1: expected data.labels to list the names of the classes"):
        stream_of(streamed(path, 5), tokenizer, "labelled")
    stream = stream_of(streamed(path, 1, labels=["ham", "spam"]), tokenizer, "labelled")
    assert stream.batch(stream.next(2)).label.tolist() == [0.0, 1.0]
