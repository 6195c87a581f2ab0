"""Curricula: each prompt once per epoch, in an order worked out by hand, whatever is saved and restored."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlframe.attempts.account.leases import Leases
from rlframe.attempts.account.ledger import Dropped, Leased, Ledger, read_ledger
from rlframe.data.config import DataConfig
from rlframe.data.curriculum import By, CurriculumConfig
from rlframe.data.ordered import RatedCursor
from rlframe.data.prompts import PromptSource
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Rollout
from rlframe.utils.errors import DataError, SettingError

NAMES = "abcd"


def write(folder: Path, *fields: dict[str, Any]) -> str:
    """A file of the prompts a, b, c, ..., each with more fields."""
    file = folder / "prompts.jsonl"
    rows = [{"id": "abcdefgh"[index], "prompt": "question", "answer": "1"} | more for index, more in enumerate(fields)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def source(
    path: str | dict[str, float], tokenizer: PreTrainedTokenizerFast, *, shuffle: bool = False, **curriculum: Any
):
    config = DataConfig(
        path=path, evaluation_count=0, shuffle=shuffle, curriculum=CurriculumConfig(**curriculum), cache_folder=None
    )
    return PromptSource(config, tokenizer=tokenizer, seed=0)


def rollouts(*rewards: float) -> list[Rollout]:
    """Attempts of these rewards, whose part `right` is 1 less."""
    found = []
    for index, reward in enumerate(rewards):
        rollout = Rollout.begin(Prompt(id="p", text="", input=ModelInput((1,))), index)
        rollout.reward, rollout.reward_parts = reward, {"right": reward - 1}
        found.append(rollout)
    return found


def epoch(leases: Leases, stream: PromptSource, count: int, rates: dict[str, float]) -> str:
    """The prompts of the next leases, whose attempts are worth `rates`."""
    names = ""
    for _ in range(count):
        (lease,) = leases.take(1, step=1, version=0)
        names += lease.prompt.id
        if (rate := rates.get(lease.prompt.id)) is not None:
            leases.measure(lease, rollouts(*[1.0] * round(4 * rate), *[0.0] * round(4 * (1 - rate))))
    return names


def test_by_a_field_each_epoch_goes_from_the_least_to_the_greatest(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path, {"level": 3}, {"level": 1}, {"level": 2.5}, {"level": 1}, {"level": -4})
    up = source(path, tokenizer, by=By.FIELD, field="level")
    assert "".join(prompt.id for prompt in up.next(10)) == "ebdca" * 2
    down = source(path, tokenizer, by=By.FIELD, field="level", descending=True)
    assert "".join(prompt.id for prompt in down.next(5)) == "acbde"
    # Prompts of the same number have the random order of the epoch.
    shuffled = source(path, tokenizer, by=By.FIELD, field="level", shuffle=True)
    epochs = {"".join(prompt.id for prompt in shuffled.next(5)) for _ in range(20)}
    assert epochs == {"ebdca", "edbca"}
    state = json.loads(json.dumps(up.state()))
    expected = [prompt.id for prompt in up.next(7)]
    again = source(path, tokenizer, by=By.FIELD, field="level")
    again.restore(state)
    assert [prompt.id for prompt in again.next(7)] == expected
    with pytest.raises(DataError, match="is not that of the checkpoint"):
        down.restore(state)


def test_by_pass_rate_an_epoch_begins_with_what_is_nearest_to_the_target(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path, {}, {}, {}, {})
    stream = source(path, tokenizer, by=By.PASS_RATE, target=0.5, lowest=0.1, highest=0.9)
    leases = Leases(stream, Ledger(tmp_path), curriculum=stream)
    # Nothing is known in the first epoch: the order of the file.
    assert epoch(leases, stream, 4, {"a": 1.0, "b": 0.5, "c": 0.0, "d": 0.25}) == "abcd"
    # Distances from the target: a 0.5, b 0, c 0.5, d 0.25. a is too easy and c is too hard.
    assert epoch(leases, stream, 2, {"b": 1.0, "d": 0.5}) == "bd"
    saved = json.loads(json.dumps(leases.state()))
    # a and c are attempted again, as nobody is passed over twice in a row; b is too easy now. Distances: d 0, and
    # 0.5 of a, b and c, in the order of the file.
    assert epoch(leases, stream, 3, {"a": 0.75, "c": 0.0, "d": 0.5}) == "dac"
    # Distances: b 0.5, d 0, a 0.25, c 0.5. c is too hard and was attempted; b was passed over.
    assert epoch(leases, stream, 3, {}) == "dab"
    leases.ledger.write(1)
    events = read_ledger(tmp_path).events
    found = {(event.lease, event.epoch): event.prompt for event in events if isinstance(event, Leased)}
    assert ["".join(name for (_, at), name in found.items() if at == number) for number in range(4)] == [
        "abcd", "bdac", "dabc", "dab",
    ]  # fmt: skip
    passed = [event.lease for event in events if isinstance(event, Dropped) and event.reason == "passed_over"]
    assert [found[lease, at] for lease, at in found if lease in passed] == ["a", "c", "b"]
    assert all(event.tokens == 0 for event in events if isinstance(event, Dropped))
    # A resumed run deals the same.
    other = source(path, tokenizer, by=By.PASS_RATE, target=0.5, lowest=0.1, highest=0.9)
    resumed = Leases(other, Ledger(tmp_path / "other"), curriculum=other)
    resumed.restore(saved)
    assert epoch(resumed, other, 3, {"a": 0.75, "c": 0.0, "d": 0.5}) == "dac"
    assert epoch(resumed, other, 3, {}) == "dab"


def test_what_is_passed_over_is_counted_and_the_order_stays_without_a_target(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path, {}, {}, {}, {})
    stream = source(path, tokenizer, by=By.PASS_RATE, highest=0.9)
    leases = Leases(stream, Ledger(tmp_path), curriculum=stream)
    epoch(leases, stream, 4, {"a": 0.0, "b": 1.0, "d": 0.25})
    assert leases.metrics(2) == {"data/passed_over_prompts": 0.0}
    assert epoch(leases, stream, 3, {}) == "acd"
    assert leases.metrics(2) == {"data/passed_over_prompts": 1.0}
    assert epoch(leases, stream, 4, {}) == "abcd"


def test_what_a_step_passed_over_that_is_done_again_counts_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path, {}, {}, {}, {})
    stream = source(path, tokenizer, by=By.PASS_RATE, highest=0.9)
    leases = Leases(stream, Ledger(tmp_path), curriculum=stream)
    epoch(leases, stream, 4, {"b": 1.0})
    saved = leases.state()
    for _ in range(2):
        # A rank of the trainer dies in the step, in the first of the two.
        leases.restore(saved)
        assert epoch(leases, stream, 3, {}) == "acd"
    assert leases.metrics(2) == {"data/passed_over_prompts": 1.0}


def test_what_is_passed_over_takes_nothing_of_the_share_of_its_dataset(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    paths = {}
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        paths[write(tmp_path / name, {}, {}, {}, {})] = 1.0
    stream = source(paths, tokenizer, by=By.PASS_RATE, highest=0.9)
    leases = Leases(stream, Ledger(tmp_path), curriculum=stream)
    ids = [prompt.id for prompt in stream.first(8)]
    # In the first epoch all of the first dataset but one turn out too easy.
    epoch(leases, stream, 8, dict.fromkeys(ids[:3], 1.0))
    taken = [lease.prompt.id for lease in leases.take(8, step=2, version=1)]
    assert sum(name in ids[:4] for name in taken) == 4, taken
    assert leases.metrics(2) == {"data/passed_over_prompts": 3.0}


def test_a_pass_rate_is_the_mean_of_one_reward_between_0_and_1(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    stream = source(write(tmp_path, {}, {}), tokenizer, by=By.PASS_RATE, target=1.0, reward_part="right")
    cursor = stream._cursor
    assert isinstance(cursor, RatedCursor)
    first, second = stream.next(2)
    # The parts are 2, -1, 0.5 and 0, of which 1, 0, 0.5 and 0 count.
    stream.measure(first, rollouts(3.0, 0.0, 1.5, 1.0))
    unscored = rollouts(1.0)
    unscored[0].reward_parts = {}
    stream.measure(second, unscored)
    assert cursor.state()["rates"] == [0.375, None]


def test_stages_begin_at_their_steps_and_have_epochs_of_their_own(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(
        tmp_path, {"level": "hard"}, {"level": "easy"}, {"level": "hard"}, {"level": "easy"}, {"level": "easy"}
    )
    settings: dict[str, Any] = {"by": By.STAGE, "field": "level", "stages": {"hard": 3, "easy": 1}}
    stream = source(path, tokenizer, **settings)
    leases = Leases(stream, Ledger(tmp_path), curriculum=stream)
    dealt = [[lease.prompt.id for lease in leases.take(2, step=step, version=0)] for step in (1, 2, 3, 4)]
    assert dealt == [["b", "d"], ["e", "b"], ["a", "c"], ["a", "c"]]
    assert leases.metrics(4) == {"data/stage": 1.0}
    # Prompts are dealt ahead of the steps that train on them.
    assert leases.metrics(2) == {"data/stage": 0.0}
    leases.ledger.write(4)
    epochs = [event.epoch for event in read_ledger(tmp_path).events if isinstance(event, Leased)]
    assert epochs == [0, 0, 0, 1, 0, 0, 1, 1]
    other = source(path, tokenizer, **settings)
    resumed = Leases(other, Ledger(tmp_path / "other"), curriculum=other)
    resumed.restore(json.loads(json.dumps(leases.state())))
    assert [lease.prompt.id for lease in resumed.take(3, step=5, version=0)] == ["a", "c", "a"]
    # A group that is sampled again for an earlier step goes back to its stage, where that one was.
    assert [lease.prompt.id for lease in resumed.take(2, step=2, version=0)] == ["d", "e"]
    later = source(path, tokenizer, **(settings | {"stages": {"easy": 1, "hard": 4}}))
    with pytest.raises(DataError, match=r"data.curriculum.stages was \{'easy': 1, 'hard': 3\} and is now"):
        later.restore(stream.state())


def test_records_that_do_not_say_their_place_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, {"level": 1}, {"level": True}, {"level": "easy"})
    with pytest.raises(DataError, match="expected a number in the field 'level' .* found True in prompt 1"):
        source(path, tokenizer, by=By.FIELD, field="level")
    with pytest.raises(DataError, match="expected the name of a stage in the field 'level' .* easy.* found '1'"):
        source(path, tokenizer, by=By.STAGE, field="level", stages={"easy": 1})
    with pytest.raises(DataError, match="expected records of every stage .* found none of 'hard'"):
        source(write(tmp_path, {"level": "easy"}), tokenizer, by=By.STAGE, field="level", stages={"easy": 1, "hard": 2})


def test_each_of_several_weighted_datasets_has_its_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "other").mkdir()
    paths = {
        write(tmp_path, {"level": 2}, {"level": 1}): 1.0,
        write(tmp_path / "other", {"level": 5}, {"level": 4}): 1.0,
    }
    stream = source(paths, tokenizer, by=By.FIELD, field="level")
    assert [prompt.id[-1] for prompt in stream.next(4)] == ["b", "b", "a", "a"]


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"by": By.FIELD}, "field must name a field of the records with by=field"),
        ({"by": By.FIELD, "field": "x", "target": 0.5}, "target has no effect with by=field"),
        ({"by": By.PASS_RATE}, "by needs a target, or lowest or highest, with pass_rate"),
        ({"by": By.PASS_RATE, "target": 0.5, "field": "x"}, "field has no effect with by=pass_rate"),
        ({"by": By.PASS_RATE, "lowest": 0.5, "highest": 0.5}, "lowest must be below highest=0.5"),
        ({"by": By.PASS_RATE, "target": 1.5}, "target must be at most 1"),
        ({"by": By.STAGE, "field": "x", "stages": {"a": 0}}, "stages must be at least 1"),
        ({"by": By.STAGE, "field": "x"}, "stages must give each stage a first step of its own, and one of them step 1"),
        ({"by": By.STAGE, "field": "x", "stages": {"a": 2}}, "stages must give each stage a first step"),
        ({"by": By.STAGE, "field": "x", "stages": {"a": 1, "b": 1}}, "stages must give each stage a first step"),
    ],
)
def test_what_makes_no_curriculum_is_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(SettingError, match=fault):
        CurriculumConfig(**settings)


@pytest.mark.parametrize("more", [{"streaming": True}, {"path": {"arithmetic": 1.0, "arithmetic_carries": 1.0}}])
def test_what_has_no_order_of_its_own_takes_no_curriculum(more: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="curriculum"):
        DataConfig(**more, curriculum=CurriculumConfig(by=By.STAGE, field="x", stages={"a": 1}))
