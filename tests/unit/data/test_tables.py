"""Records in mapped files come out as they were read, however strange; and a second run finds them."""

import datetime
import decimal
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig
from rlframe.data.kinds import find_source
from rlframe.data.prompts import PromptSource
from rlframe.data.records import read
from rlframe.data.storage import tables
from rlframe.data.storage.tables import Records, is_plain, records
from rlframe.utils.errors import DataError
from tests.unit.data.marks import write
from tests.unit.data.test_cache import ROWS, content

pytestmark = pytest.mark.later

STRANGE = [
    '{"a": 1}',
    '{"a": "x"}',
    '{"b": null, "a": 1.0}',
    '{"a": 1.5, "b": []}',
    f'{{"a": {10**400}}}',
    f'{{"a": {2**63}, "b": -0.0}}',
    '{"a": true, "b": {}}',
    '{"a": {"c": [1, "x", null, {"d": 2.0}]}}',
    '{"a": "2020-01-01T00:00:00", "": "empty name"}',
    '{"z": "\\u0000\\u2028\\ud83d\\ude00", "a": "\\"\\\\"}',
    '{"a": 1e-320, "b": 0.1, "c": 1e22, "d": 123456789012345678901234567890.5}',
    "{}",
    '{"id": "own", "a": [[[[]]]]}',
]
"""Lines whose fields agree in no type."""
PARQUET: dict[str, Any] = {
    "text": ["a", None],
    "whole": [2**62, -1],
    "unsigned": pyarrow.array([2**64 - 1, 0], pyarrow.uint64()),
    "fraction": [float("inf"), -0.0],
    "turns": [[{"role": "user", "content": "x"}], []],
}
OTHERS: dict[str, Any] = {
    "bytes": [b"\xff", b""],
    "date": [datetime.date(2020, 1, 1), None],
    "time": [datetime.datetime(2020, 1, 1, 2, 3, 4, 5), None],
    "decimal": [decimal.Decimal("1.50"), None],
    "map": pyarrow.array([[("k", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
}
"""What JSON cannot say."""


@pytest.fixture(autouse=True)
def every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has files of any size stored, in batches of two rows."""
    monkeypatch.setattr(tables, "SMALL_BYTES", 0)
    monkeypatch.setattr(tables, "BATCH_ROWS", 2)


def config_of(tmp_path: Path, path: object, **settings: Any) -> DataConfig:
    """Returns settings that keep records in `cache`."""
    return DataConfig(**{"path": str(path), "cache_folder": str(tmp_path / "cache"), "evaluation_count": 0} | settings)


def kept(tmp_path: Path) -> list[Path]:
    """Returns the files of the cache."""
    return sorted((tmp_path / "cache").iterdir()) if (tmp_path / "cache").exists() else []


def file_of(tmp_path: Path, ending: str) -> Path:
    """Returns a file of that format with strange records."""
    file = tmp_path / f"data{ending}"
    if ending == ".jsonl":
        file.write_text("\n\n".join(STRANGE))
    elif ending == ".json":
        file.write_text("[" + ",".join(STRANGE) + "]")
    elif ending == ".txt":
        file.write_text("one text\nof two lines")
    else:
        pyarrow.parquet.write_table(pyarrow.table(PARQUET), file)
    return file


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".txt", ".parquet"])
def test_every_record_comes_out_as_it_was_read(tmp_path: Path, ending: str) -> None:
    file = file_of(tmp_path, ending)
    expected = read(str(file), max_bytes=1e6)
    # `repr` tells 1 from 1.0 and from True, -0.0 from 0.0, and the order of fields.
    for _ in range(2):
        found = records(str(file), config_of(tmp_path, file))
        assert isinstance(found, Records) and len(found) == len(expected)
        assert repr(list(found)) == repr(expected)
        assert repr([found[place] for place in range(len(found))]) == repr(expected)
        assert repr(found[-1]) == repr(expected[-1]) and repr(found[1:3]) == repr(expected[1:3])
        assert [record.id for record in found] == [record.id for record in expected]
    assert len(kept(tmp_path)) == 1
    with pytest.raises(IndexError):
        found[len(expected)]


def test_a_folder_is_its_files_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("b.jsonl", "a.jsonl"):
        write(tmp_path / "folder" / name, [{"text": name}])
    found = records(str(tmp_path / "folder"), config_of(tmp_path, "x"))
    assert [(record.source, record.where) for record in found] == [
        (name, f"{tmp_path / 'folder' / name}:1") for name in ("a.jsonl", "b.jsonl")
    ]


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_json_cannot_say_is_held_as_it_is_and_not_kept(tmp_path: Path, name: str) -> None:
    file = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table(PARQUET | {name: OTHERS[name]}), file)
    expected = read(str(file), max_bytes=1e6)
    assert not is_plain(expected[0].fields)
    found = records(str(file), config_of(tmp_path, file))
    assert isinstance(found, Records) and repr(list(found)) == repr(expected) and repr(found[0]) == repr(expected[0])
    assert kept(tmp_path) == []


def test_a_second_run_reads_what_the_first_has_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path, ".jsonl")
    config = config_of(tmp_path, file)
    expected = repr(list(records(str(file), config)))
    monkeypatch.setattr(tables, "iterate", None)
    assert repr(list(records(str(file), config))) == expected
    monkeypatch.undo()


def test_whatever_decides_the_records_makes_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path, ".jsonl")
    monkeypatch.chdir(tmp_path)

    def count(path: str, **settings: Any) -> int:
        list(records(path, config_of(tmp_path, path, **settings)))
        return len(kept(tmp_path))

    assert count(str(file)) == count(str(file)) == 1
    assert count(file.name) == 2  # messages name the path as it was given
    assert count(str(file), max_record_mb=1) == 3
    file.write_text(file.read_text().replace('"x"', '"y"'))
    assert count(str(file)) == 4


def test_a_damaged_file_is_noticed_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = file_of(tmp_path, ".jsonl")
    config = config_of(tmp_path, file)
    expected = repr(list(records(str(file), config)))
    (stored,) = kept(tmp_path)
    whole = stored.read_bytes()
    for damaged in (whole[:-1], b"", whole[:900] + bytes([whole[900] ^ 1]) + whole[901:]):
        stored.write_bytes(damaged)
        caplog.clear()
        assert repr(list(records(str(file), config))) == expected
        assert "the stored records are damaged; they are stored anew" in caplog.text
        assert kept(tmp_path) == [stored] and stored.read_bytes() == whole


def test_the_bound_of_the_folder_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (tmp_path / name for name in ("1.jsonl", "2.jsonl"))
    write(first, [{"text": "x" * 5000}]), write(second, [{"text": "y" * 5000}])
    list(records(str(first), config_of(tmp_path, first)))
    (size,) = (file.stat().st_size for file in kept(tmp_path))
    list(records(str(second), config_of(tmp_path, second, cache_gb=1.5 * size / 1e9)))
    (left,) = kept(tmp_path)
    assert left.read_bytes().count(b"y") > 4000, "the older one made room"
    found = records(str(first), config_of(tmp_path, first, cache_gb=0.5 * size / 1e9))
    assert len(found) == 1 and "are more than data.cache_gb" in caplog.text
    assert kept(tmp_path) == [left]


@pytest.mark.parametrize("cannot", ["null", "a file in its place"])
def test_without_a_folder_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cannot: str) -> None:
    aside = tmp_path / "temporary"
    aside.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(aside))
    file = file_of(tmp_path, ".jsonl")
    (tmp_path / "blocked").write_text("")
    folder = None if cannot == "null" else str(tmp_path / "blocked" / "cache")
    found = records(str(file), config_of(tmp_path, file, cache_folder=folder))
    assert list(aside.iterdir()) == []
    assert repr(list(found)) == repr(read(str(file), max_bytes=1e6))


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (['{"a": 1}', '{"a": '], ":2: expected one JSON object per line"),
        (['{"a": 1}', "", '{"a": 1, "a": 2}'], ":3: .* has the key 'a' twice"),
        (['{"a": NaN}'], ":1: .*NaN is no number"),
        (['{"a": 1e999}'], ":1: .*1e999 is no number"),
        (['{"a": 1}', "[1]"], ":2: expected a JSON object, found list"),
        (['{"a": "\\ud800"}'], ":1: expected text, found .*half of a surrogate pair"),
        (["", " "], "expected records, found an empty file"),
    ],
)
def test_what_is_refused_is_refused_in_the_same_words(tmp_path: Path, lines: list[str], sentence: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match=f"a.jsonl{sentence}" if sentence[0] == ":" else sentence) as stored:
        list(records(str(file), config_of(tmp_path, file)))
    with pytest.raises(DataError) as held:
        read(str(file), max_bytes=1e6)
    assert str(stored.value) == str(held.value)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_stored_records_make_the_same_items(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rows = [*ROWS[kind], ROWS[kind][0]]
    config = DataConfig(path=[f"{write(tmp_path / 'a.jsonl', rows)}#9", write(tmp_path / "b.jsonl", rows)])
    config.cache_folder, config.evaluation_count = None, 4

    def made() -> tuple:
        return content(find_source(kind)(config, tokenizer=tokenizer, seed=0, max_tokens=100))

    stored = made()
    monkeypatch.setattr(tables, "SMALL_BYTES", 10**9)
    assert stored == made()


@pytest.mark.parametrize("weighted", [False, True])
def test_stored_records_make_the_same_prompts_and_resume(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, weighted: bool
) -> None:
    rows = [{"prompt": f"{index}+1=", "answer": str(index + 1), "extra": {"n": index}} for index in range(60)]
    rows += [rows[3], {"prompt": "x" * 300, "answer": "y"}]
    paths = [f"{write(tmp_path / 'a.jsonl', rows)}#20", write(tmp_path / "b.jsonl", rows[::-1])]
    path = dict(zip(paths, (1.0, 3.0), strict=True)) if weighted else paths
    config = DataConfig(path=path, evaluation_count=5, max_prompt_tokens=100, cache_folder=str(tmp_path / "cache"))
    stored = PromptSource(config, tokenizer=tokenizer, seed=1)
    monkeypatch.setattr(tables, "SMALL_BYTES", 10**9)
    held = PromptSource(config, tokenizer=tokenizer, seed=1)
    assert stored.dropped == held.dropped and len(stored) == len(held)
    assert stored.first(7) == held.first(7) and stored.evaluation_prompts() == held.evaluation_prompts()
    assert stored.next(70) == held.next(70) and stored.state() == held.state()
    monkeypatch.setattr(tables, "SMALL_BYTES", 0)
    again = PromptSource(config, tokenizer=tokenizer, seed=1)
    again.restore(held.state())
    assert again.next(50) == held.next(50)


@pytest.mark.later
def test_few_records_and_built_in_data_do_not_import_datasets(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "answer": "a"}])
    program = (
        "import sys; from rlframe.data.sources import load; from rlframe.data.text.conversations import understand; "
        "from rlframe.data.config import DataConfig; import rlframe.data.prompts, rlframe.data.training; "
        f"[load(DataConfig(path=path), seed=0, understand=understand) for path in ('arithmetic', {path!r})]; "
        "sys.exit('datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("lines", "changed"),
    [
        (['{"a":1}', '{"b":"x"}'], "a missing field becomes null"),
        (['{"a":1}', '{"a":1.5}'], "a whole number becomes a fraction"),
        ([f'{{"a":{2**63}}}'], "large numbers lose digits"),
        (['{"a":"2020-01-01T00:00:00"}'], "text that reads like a date becomes one"),
        (['{"a":1,"b":2}', '{"b":1,"a":2}'], "the order of fields is that of the first record"),
        (["[1]"], "what is no object becomes one"),
    ],
)
def test_the_json_reader_of_datasets_changes_records(tmp_path: Path, lines: list[str], changed: str) -> None:
    # docs/data.md says so. Where this fails, `datasets` has become more exact, and may do more here.
    import datasets

    logging.disable(logging.ERROR)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    try:
        rows = datasets.load_dataset(
            "json", data_files=str(tmp_path / "a.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
        )
    finally:
        logging.disable(logging.NOTSET)
    assert repr([dict(row) for row in rows]) != repr([json.loads(line) for line in lines]), changed


@pytest.mark.parametrize("what", ["maps", "no rows", "metadata of others"])
def test_the_parquet_reader_of_datasets_refuses_files(tmp_path: Path, what: str) -> None:
    # As docs/data.md says; ours reads the first and the last, and says what is wrong with the second.
    import datasets

    columns: dict[str, Any] = {"map": OTHERS["map"]} if what == "maps" else {"text": pyarrow.array(["a"])}
    table = pyarrow.table(columns).slice(0, 0 if what == "no rows" else 2)
    if what == "metadata of others":
        table = table.replace_schema_metadata({"huggingface": "{"})
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, file)
    logging.disable(logging.ERROR)
    try:
        with pytest.raises((ValueError, datasets.exceptions.DatasetsError)):
            datasets.load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    finally:
        logging.disable(logging.NOTSET)
    if what == "no rows":
        with pytest.raises(DataError, match="expected records, found an empty file"):
            read(str(file), max_bytes=1e6)
    else:
        assert len(read(str(file), max_bytes=1e6)) == table.num_rows
