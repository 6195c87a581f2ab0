"""Several datasets: as one, or dealt in shares."""

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.data.config import DataConfig
from rlframe.data.cursor import Cursor, Mixture
from rlframe.data.kinds.examples import ExampleSource
from rlframe.data.prompts import PromptSource
from rlframe.utils.errors import DataError
from tests.unit.data.marks import write


def mixture(sizes: dict[str, int], weights: list[float], *, seed: int = 0, shuffle: bool = True) -> Mixture[str]:
    streams = []
    for letter, size in sizes.items():
        items = [f"{letter}{index}" for index in range(size)]
        streams.append(Cursor(items, ids=items, tokens=[[0]] * size, seed=seed, shuffle=shuffle))
    return Mixture(streams, weights=weights)


def test_the_stream_furthest_behind_its_share_comes_next() -> None:
    # Shares 2/3 and 1/3. Behind after n items: n=1: 2/3, 1/3 -> a; n=2: 4/3-1, 2/3 -> b; n=3: 2-1, 1-1 -> a; again.
    stream = mixture({"a": 3, "b": 2}, [4.0, 2.0], shuffle=False)
    assert stream.next(9) == ["a0", "b0", "a1", "a2", "b1", "a0", "a1", "b0", "a2"]


def test_each_dataset_comes_once_per_epoch_of_its_own_and_in_its_share_throughout() -> None:
    stream = mixture({"a": 10, "b": 7, "c": 3}, [0.5, 0.3, 0.2])
    dealt = stream.next(200)
    for letter, size, share in (("a", 10, 0.5), ("b", 7, 0.3), ("c", 3, 0.2)):
        own = [item for item in dealt if item[0] == letter]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size
        for count in range(1, 201):
            assert abs(sum(item[0] == letter for item in dealt[:count]) - share * count) <= 1.0
    # a: 100 items are epochs 0..9, b: 60 are 0..8, c: 40 are 0..13.
    assert stream.epoch == 8


def test_a_mixture_resumes_exactly_wherever_it_was_saved() -> None:
    whole = mixture({"a": 5, "b": 4}, [0.7, 0.3]).next(60)
    stream, dealt = mixture({"a": 5, "b": 4}, [0.7, 0.3]), []
    for count in (1, 7, 2, 13, 5, 11, 21):
        state = json.loads(json.dumps(stream.state()))
        stream.next(3)  # what a crash loses
        stream = mixture({"a": 5, "b": 4}, [0.7, 0.3])
        stream.restore(state)
        dealt += stream.next(count)
    assert dealt == whole


def test_another_mixture_is_refused() -> None:
    state = mixture({"a": 5, "b": 4}, [0.7, 0.3]).state()
    with pytest.raises(DataError, match=r"the shares of data.path were \[0.7, 0.3\] and are now \[0.5, 0.5\]"):
        mixture({"a": 5, "b": 4}, [1, 1]).restore(state)
    with pytest.raises(DataError, match="number of items after filtering was 4 and is now 6"):
        mixture({"a": 5, "b": 6}, [0.7, 0.3]).restore(state)
    with pytest.raises(DataError, match="number of items after filtering was None and is now 5"):
        Cursor(list("abcde"), ids=list("abcde"), tokens=[[0]] * 5, seed=0, shuffle=True).restore(state)


def two_files(folder: Path) -> tuple[str, str]:
    """Forty and twenty records, numbered alike; question 5 is in both."""
    one = [{"id": str(index), "prompt": f"first {index}", "answer": "1"} for index in range(40)]
    other = [{"id": str(index), "prompt": f"second {index}", "answer": "2"} for index in range(20)]
    return write(folder / "one.jsonl", one), write(folder / "other.jsonl", other)


@pytest.mark.parametrize("kind", ["online", "offline"])
def test_files_in_shares_for_prompts_and_for_examples(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    one, other = two_files(tmp_path)
    config = DataConfig(path={one: 3, f"{other}#6": 1})
    if kind == "online":
        prompts = PromptSource(config, tokenizer=tokenizer, seed=0)
        size, dealt, held_out = len(prompts), [prompt.id for prompt in prompts.next(80)], prompts.evaluation_prompts()
    else:
        examples = ExampleSource(config, tokenizer=tokenizer, seed=0, max_tokens=100)
        items = examples.next(80)
        size, dealt, held_out = len(examples), [item.id for item in items], examples.held_out()
        assert all(item.id.startswith(examples.channels[item.channel] + "/") for item in items)
        batch = examples.batch(items[:4])
        assert batch.channels == ("one", "other") and batch.channel.tolist() == [0, 0, 1, 0]
    # Six of the 60 records are held out, whichever file they are in; six of the second file's rest are kept.
    assert len(held_out) == 6 and size == 40 - sum(item.id.startswith("one/") for item in held_out) + 6
    assert not {item.id for item in held_out} & set(dealt)
    counts = Counter(identity.split("/")[0] for identity in dealt)
    assert counts == {"one": 60, "other": 20}


def test_an_epoch_to_look_at_has_the_shares_in_which_training_deals(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    one, other = two_files(tmp_path)
    config = DataConfig(path={one: 1, other: 3}, evaluation_count=0)
    looked, trained = (ExampleSource(config, tokenizer=tokenizer, seed=0, max_tokens=100) for _ in range(2))
    seen = looked.of_an_epoch()
    assert Counter(item.channel for item in seen) == {0: 15, 1: 45}
    dealt = [item.id for item in trained.next(60)]
    assert [item.id for item in seen] == dealt == [item.id for item in looked.next(60)], "nothing was dealt before"
    plain = ExampleSource(
        DataConfig(path=[one, other], evaluation_count=0), tokenizer=tokenizer, seed=0, max_tokens=100
    )
    assert Counter(item.channel for item in plain.of_an_epoch()) == {0: 40, 1: 20}


@pytest.mark.parametrize("shares", [True, False])
def test_held_out_examples_belong_to_the_dataset_they_come_from(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, shares: bool
) -> None:
    one, other = two_files(tmp_path)
    config = DataConfig(path={one: 1, other: 1} if shares else [one, other], evaluation_count=6)
    stream = ExampleSource(config, tokenizer=tokenizer, seed=0, max_tokens=100)
    batch = stream.batch(stream.held_out())
    assert batch.channels == ("one", "other")
    names = [batch.channels[channel] for channel in batch.channel.tolist()]
    assert names == [item.id.split("/")[0] for item in stream.held_out()] and set(names) == {"one", "other"}
    # One dataset alone has no name to tell apart.
    alone = ExampleSource(DataConfig(path=one), tokenizer=tokenizer, seed=0, max_tokens=100)
    assert alone.channels == ("one",) and {item.channel for item in alone.held_out()} == {0}


def test_held_out_examples_of_a_file_of_their_own_belong_to_that(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    one, other = two_files(tmp_path)
    config = DataConfig(path=one, evaluation_path=other)
    stream = ExampleSource(config, tokenizer=tokenizer, seed=0, max_tokens=100)
    assert stream.channels == ("one", "other")
    assert {item.channel for item in stream.next(40)} == {0} and {item.channel for item in stream.held_out()} == {1}


def test_a_list_is_one_dataset(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    one, other = two_files(tmp_path)
    stream = PromptSource(DataConfig(path=[one, other], evaluation_count=0), tokenizer=tokenizer, seed=0)
    assert len({prompt.id for prompt in stream.next(60)}) == len(stream) == 60
    state = stream.state()
    with pytest.raises(DataError, match="the shares of data.path were none and are now"):
        config = DataConfig(path={one: 1, other: 1}, evaluation_count=0)
        PromptSource(config, tokenizer=tokenizer, seed=0).restore(state)


def test_both_built_in_datasets_hold_out_their_problems_once(tokenizer: PreTrainedTokenizerFast) -> None:
    config = DataConfig(path={"arithmetic#50": 1, "arithmetic_homework#50": 1}, evaluation_count=100_000)
    held_out = PromptSource(config, tokenizer=tokenizer, seed=0).evaluation_prompts()
    assert len({prompt.text for prompt in held_out}) == len(held_out) > 1400


def test_a_record_of_a_file_beside_a_built_in_dataset_is_trained_on_or_held_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    # Of the 20 held out some are problems of arithmetic; the file's records in their places are trained on.
    fields = [{"prompt": f"question {index}", "answer": "1"} for index in range(300)]
    one = write(tmp_path / "one.jsonl", fields)
    config = DataConfig(path=["arithmetic#1", one], evaluation_count=20)
    source = PromptSource(config, tokenizer=tokenizer, seed=0)
    held_out = [prompt for prompt in source.evaluation_prompts() if prompt.source == "one.jsonl"]
    assert 0 < len(held_out) < len(source.evaluation_prompts()) == 20
    assert source.dropped == {} and len(source) - 1 + len(held_out) == 300


def test_held_out_prompts_tell_their_dataset_where_files_have_one_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    for name in ("sums", "words"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.jsonl", [{"prompt": f"{name} {index}", "answer": "1"} for index in range(100)])
    path = [str(tmp_path / "sums"), str(tmp_path / "words" / "a.jsonl")]
    held_out = PromptSource(DataConfig(path=path), tokenizer=tokenizer, seed=0).evaluation_prompts()
    assert {prompt.source for prompt in held_out} == {"a.jsonl"}
    assert all(prompt.dataset == {"s": "sums", "w": "a"}[prompt.messages[0]["content"][0]] for prompt in held_out)
    assert {prompt.dataset for prompt in held_out} == {"sums", "a"}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], r"path must name a dataset, got \[\]"),
        ({"a.jsonl": 0}, "path must be above 0 .the weight of a dataset., got 0 for 'a.jsonl'"),
        ({"a.jsonl": float("nan")}, "path must be above 0 .the weight of a dataset., got nan"),
        (["a.jsonl", "a.jsonl#5"], "path must name each dataset once, got 'a.jsonl' twice"),
        (["a.jsonl", "b.jsonl#0"], "path must keep at least 1 record, got 'b.jsonl#0'"),
    ],
)
def test_a_bad_mixture_is_refused(path: list | dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(path=path)


def test_datasets_have_short_names_unless_two_would_have_the_same() -> None:
    entries = DataConfig(path=["data/a.jsonl#5", "b/train.json", "c/train.json"]).entries()
    assert [entry.name for entry in entries] == ["a", "b/train.json", "c/train.json"]
    assert [entry.count for entry in entries] == [5, None, None]
