"""Tokenised items on disk: the same items, for the same records, settings, template and tokenizer only."""

import copy
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.data import cache
from rlframe.data.cache import PACKAGES, cache_file, read
from rlframe.data.config import DataConfig
from rlframe.data.items import Item
from rlframe.data.kinds import find_source
from rlframe.data.storage.folder import evict
from rlframe.data.training import TrainingSource
from tests.unit.data.marks import write

ROWS: dict[str, list[dict]] = {
    "examples": [{"prompt": f"q{i}", "response": "r"} for i in range(20)] + [{"prompt": "q", "response": "r" * 200}],
    "preferences": [{"prompt": f"q{i}", "chosen": "y", "rejected": "n", "margin": i} for i in range(20)],
    "unpaired": [{"prompt": f"q{i}", "response": "r", "label": i % 3 == 0} for i in range(20)],
    "labelled": [{"query": f"q{i}", "documents": ["a", "b"], "labels": [i, 0]} for i in range(20)],
    "contrasted": [{"query": f"q{i}", "positive": "p", "negative": "n"} for i in range(20)],
    "texts": [{"text": "abc" * i} for i in range(1, 20)],
}


def plain(item: Item) -> dict:
    return asdict(replace(item, parts=())) | {
        "parts": [(part.token_ids.tolist(), part.weights.tolist()) for part in item.parts]
    }


def content(stream: TrainingSource) -> tuple:
    dealt = [plain(item) for item in stream.next(2 * len(stream))]
    return dealt, [plain(item) for item in stream.held_out()], stream.dropped, stream.state()


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_items_from_the_cache_are_those_that_were_made(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = DataConfig(path=write(tmp_path / "a.jsonl", ROWS[kind]), cache_folder=str(tmp_path / "cache"))

    def stream() -> TrainingSource:
        return find_source(kind)(config, tokenizer=tokenizer, seed=0, max_tokens=100)

    made = content(stream())
    (file,) = (tmp_path / "cache").iterdir()
    assert file.suffix == ".items"
    expected = content(
        find_source(kind)(replace(config, cache_folder=None), tokenizer=tokenizer, seed=0, max_tokens=100)
    )
    assert made == expected
    # From here on nothing can be tokenised: what comes, comes from the file.
    monkeypatch.setattr(type(tokenizer), "__call__", None)
    assert content(stream()) == expected


def test_a_damaged_file_is_noticed_and_made_anew(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", ROWS["examples"])
    config = DataConfig(path=path, cache_folder=str(tmp_path / "cache"))

    def stream() -> TrainingSource:
        return find_source("examples")(config, tokenizer=tokenizer, seed=0, max_tokens=100)

    expected = content(stream())
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"", whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        file.write_bytes(damaged)
        caplog.clear()
        assert content(stream()) == expected
        assert "the cached items are damaged; they are made anew" in caplog.text
        assert file.read_bytes() == whole


def test_whatever_decides_the_items_makes_another_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = tmp_path / "cache"
    path = write(tmp_path / "a.jsonl", ROWS["examples"])
    config = DataConfig(path=path, cache_folder=str(folder))

    def count(config: DataConfig, *, template: str | None = None, seed: int = 0, most: int = 100) -> int:
        own = copy.deepcopy(tokenizer)
        own.chat_template = template or tokenizer.chat_template
        find_source("examples")(config, tokenizer=own, seed=seed, max_tokens=most)
        return len(list(folder.iterdir()))

    assert count(config) == count(config) == 1
    assert count(config, seed=1) == count(replace(config, shuffle=False)) == 1  # the order is not in the file
    assert count(replace(config, system_prompt="S")) == 2
    assert count(config, template=str(tokenizer.chat_template).replace("<end>\n", "<end>")) == 3
    assert count(config, most=99) == 4
    assert count(replace(config, path=f"{path}#5")) == 5
    assert count(replace(config, path=f"{path}#5"), seed=1) == 6
    write(tmp_path / "a.jsonl", [*ROWS["examples"], {"prompt": "new", "response": "r"}])
    assert count(config) == 7
    assert count(replace(config, cache_folder=None)) == 7


def test_a_file_that_is_moved_or_renamed_makes_another_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = tmp_path / "data"
    (folder / "aside").mkdir(parents=True)
    for name, rows in (("a", ROWS["texts"][:5]), ("b", ROWS["texts"][5:10])):
        write(folder / f"{name}.jsonl", rows)
    config = DataConfig(path=str(folder), cache_folder=str(tmp_path / "cache"), evaluation_count=0)

    def count() -> int:
        return sum(
            item.num_tokens
            for stream in [find_source("texts")(config, tokenizer=tokenizer, seed=0, max_tokens=100)]
            for item in stream.next(len(stream))
        )

    both = count()
    (folder / "b.jsonl").rename(folder / "aside" / "b.jsonl")
    assert count() < both
    (folder / "aside" / "b.jsonl").rename(folder / "c.jsonl")
    assert count() == both and len(list((tmp_path / "cache").iterdir())) == 3


def test_files_belong_to_their_dataset(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    train, held_out = tmp_path / "train", tmp_path / "held out"
    for folder, names in ((train, "ab"), (held_out, "c")):
        folder.mkdir()
        for name in names:
            write(folder / f"{name}.jsonl", [{"prompt": name, "response": "r"}])
    config = DataConfig(path=str(train), evaluation_path=str(held_out), cache_folder=str(tmp_path / "cache"))

    def count() -> tuple[int, int]:
        stream = find_source("examples")(config, tokenizer=tokenizer, seed=0, max_tokens=100)
        return len(stream), len(stream.held_out())

    assert count() == (2, 1)
    # The same names and contents in the same order, of which one is held out now.
    (train / "b.jsonl").rename(held_out / "b.jsonl")
    assert count() == (1, 2)


@pytest.mark.thorough
def test_datasets_of_a_mixture_keep_their_shares(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    mine = write(tmp_path / "mine.jsonl", [{"prompt": f"q{i}", "response": "r"} for i in range(100)])
    for path in ({mine: 9.0, "arithmetic#30": 1.0}, {"arithmetic#30": 1.0, mine: 9.0}):
        config = DataConfig(path=path, cache_folder=str(tmp_path / "cache"), evaluation_count=0)
        stream = find_source("examples")(config, tokenizer=tokenizer, seed=0, max_tokens=100)
        channels = [stream.channels[item.channel] for item in stream.next(100)]
        assert channels.count("mine") == 90, path


def test_another_version_of_a_package_makes_another_file(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DataConfig(path=write(tmp_path / "a.jsonl", ROWS["texts"]), cache_folder=str(tmp_path / "cache"))
    settings = {"kind": "TextSource", "tokenizer": tokenizer, "seed": 0, "max_tokens": 9}
    files = [cache_file(config, **settings)]
    for package in PACKAGES:
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_version", lambda name, newer=package: "9" if name == newer else None)
            files.append(cache_file(config, **settings))
    assert len(set(files)) == 1 + len(PACKAGES)
    turned = [{str(config.path): 9.0, "arithmetic": 1.0}, {"arithmetic": 1.0, str(config.path): 9.0}]
    assert len({cache_file(replace(config, path=path), **settings) for path in turned}) == 2, "and another order"
    assert cache_file(replace(config, path="verifiers:mine"), **settings) is None, "nobody knows what it gives"


def test_a_folder_that_cannot_be_written_to_costs_a_warning(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    config = DataConfig(path=write(tmp_path / "a.jsonl", ROWS["texts"]), cache_folder=str(tmp_path / "file" / "cache"))
    assert len(find_source("texts")(config, tokenizer=tokenizer, seed=0, max_tokens=100))
    assert "could not be cached" in caplog.text and "data.cache_folder=null" in caplog.text


def test_the_files_not_read_for_longest_make_room(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    for index in range(4):
        write(tmp_path / f"{index}.jsonl", [{"text": str(index) * 500}])

    def made(index: int, files: float = 3.5) -> Path:
        """The file of the dataset, after a stream of it, in a folder that has room for so many."""
        path = str(tmp_path / f"{index}.jsonl")
        config = DataConfig(path=path, evaluation_count=0, cache_folder=str(folder), cache_gb=files * size / 1e9)
        known = {"kind": "TextSource", "tokenizer": tokenizer, "seed": 0, "max_tokens": 600}
        file = cache_file(config, **known)
        assert file is not None
        age(file, index)
        find_source("texts")(config, tokenizer=tokenizer, seed=0, max_tokens=600)
        return file

    def age(file: Path, order: int) -> None:
        """As if it had been read long ago, the later the greater the order."""
        if file.exists():
            os.utime(file, (order + 1, order + 1))

    size = 1e6
    first = made(0)
    size = first.stat().st_size
    strange, torn = folder / "mine.items", folder / f"{'0' * 64}.abc.partial"
    strange.write_bytes(b"x" * 10 * size)
    torn.write_bytes(b"x" * size)
    age(torn, -1)
    second, third = made(1), made(2)
    # Room for three, and what a crash has left is the oldest.
    assert set(folder.iterdir()) == {strange, first, second, third}
    age(second, 1), age(third, 2)
    # Read just now, so that the second is the oldest.
    made(0)
    fourth = made(3)
    assert set(folder.iterdir()) == {strange, first, third, fourth}
    # Too large by itself: the others stay, and it is not written.
    fourth.unlink()
    made(3, files=0.5)
    assert set(folder.iterdir()) == {strange, first, third}


def test_a_file_that_another_run_removes_meanwhile_is_no_reason_not_to_store(tmp_path: Path) -> None:
    # A link to nowhere is listed, and then not there.
    gone, old = (tmp_path / f"{digit * 64}.items" for digit in "01")
    gone.symlink_to(tmp_path / "nowhere")
    old.write_bytes(b"x" * 10)
    evict(tmp_path, 5)
    assert list(tmp_path.iterdir()) == [gone]


def test_a_file_that_is_removed_while_it_is_read_is_made_anew(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert read(tmp_path / "gone.items", Item) is None
