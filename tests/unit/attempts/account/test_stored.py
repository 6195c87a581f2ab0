"""Groups in files: what is read is what was written, in few bytes, and damage is refused."""

import math
import string
from dataclasses import fields, replace
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from rlframe.attempts.account.stored import ARRAYS, GROUPS, read_groups, write_groups
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, Group, Rollout, members
from rlframe.types.turn import TurnRecord
from rlframe.utils.errors import CheckpointError
from rlframe.utils.files import whole
from rlframe.utils.files.sealed import read_sealed, write_sealed


def prompt_of(number: int, random: np.random.Generator) -> Prompt:
    text = "".join(random.choice(list(string.printable + "\u00e9\u2028"), 7))
    return Prompt(
        id=f"p{number}",
        text=text,
        input=ModelInput(random.integers(0, 2**31 - 1, random.integers(1, 6))),
        answer=None if number % 2 else text,
        source="a.jsonl",
        dataset="a",
        fields={"level": number, "tags": ["x", None, {"deep": 0.1}]},
    )


def rollout_of(prompt: Prompt, index: int, random: np.random.Generator, *, routes: str | None) -> Rollout:
    """Returns an attempt of up to three turns: none is one that has not begun."""
    rollout = Rollout.begin(prompt, index)
    for turn in range(random.integers(0, 4)):
        length = int(random.integers(1, 5))
        shape = (rollout.num_tokens + length - 1, 2, 3)
        rollout.append(
            Completion(
                token_ids=random.integers(0, 1000, length),
                logprobs=-random.exponential(size=length),
                versions=np.full(length, turn + index),
                finish_reason=FinishReason.STOP,
                routes=None if routes is None else random.integers(0, 100, shape).astype(routes),
            )
        )
        if index % 2:
            rollout.credit(0.1 * turn)
        if turn % 2:
            rollout.observe([1, 2])
    rollout.text, rollout.reward, rollout.reward_failed = "said \ud800 \x00", random.normal(), bool(index % 2)
    rollout.reward_parts = {"exact": 0.1 + 0.2, "length": -1e-300}
    rollout.reward_weights = {"exact": 1.0, "length": 0.5, "judge": 1 / 3}
    if index % 2:
        record = TurnRecord(
            finish_reason="stop",
            malformed=("no \ud800",),
            calls=("done", "failed"),
            reward=0.1,
            state="a",
            leads_to="b",
        )
        rollout.records, rollout.first_turn, rollout.ending = (record, TurnRecord(finish_reason="length")), 1, "no_room"
        rollout.first_sampled = 7
        rollout.turn_parts, rollout.reward_troubles = {"judge": [0.1, None]}, {"judge": "unparsable"}
    return rollout


def groups_of(seed: int) -> list[Group]:
    random = np.random.default_rng(seed)
    groups = []
    for number in range(random.integers(1, 5)):
        prompt, routes = prompt_of(number, random), [None, "uint8", "int16"][number % 3]
        rollouts = [rollout_of(prompt, index, random, routes=routes) for index in range(random.integers(0, 5))]
        groups.append(Group(id=f"{seed}-{number}", prompt=prompt, rollouts=rollouts))
    return groups


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_every_size_and_state_are_read_back_equal(tmp_path: Path, seed: int) -> None:
    groups = groups_of(seed)
    write_groups(tmp_path / "groups", groups)
    there = read_groups(tmp_path / "groups")
    assert there == groups
    for mine, theirs in zip(members(groups), members(there), strict=True):
        for each in fields(Rollout):
            value, read = getattr(mine, each.name), getattr(theirs, each.name)
            assert type(read) is type(value) or not isinstance(value, np.ndarray)
            assert not isinstance(value, np.ndarray) or read.dtype == value.dtype
    assert all(rollout.prompt is group.prompt for group in there for rollout in group.rollouts)


def test_every_field_is_one_that_is_stored() -> None:
    """A new field joins `stored.py`, then this list, and gets a value in `rollout_of`."""
    known = {
        Group: "id prompt rollouts",
        Prompt: "id messages tools text input answer source dataset fields",
        ModelInput: "token_ids",
        Rollout: "prompt sample_index input loss_mask rollout_logprobs versions finish_reason routes text "
        "messages numbers sequence records first_turn first_sampled ending token_rewards turn_parts reward "
        "reward_parts reward_weights reward_failed reward_troubles",
    }
    for kind, names in known.items():
        assert [each.name for each in fields(kind)] == names.split()


def test_no_groups_at_all_are_read_back(tmp_path: Path) -> None:
    write_groups(tmp_path / "groups", [])
    assert read_groups(tmp_path / "groups") == []


def test_a_reward_that_nobody_gave_is_read_back(tmp_path: Path) -> None:
    (rollout,) = Group.begin("g", prompt_of(0, np.random.default_rng(0)), 1).rollouts
    rollout.reward, rollout.reward_parts = math.nan, {"judge": math.inf}
    write_groups(tmp_path / "groups", [Group(id="g", prompt=rollout.prompt, rollouts=[rollout])])
    (again,) = members(read_groups(tmp_path / "groups"))
    assert math.isnan(again.reward) and again.reward_parts == {"judge": math.inf}


def test_a_rollout_may_have_another_prompt_than_its_group(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    first, second = prompt_of(0, random), prompt_of(1, random)
    groups = [Group(id="g", prompt=first, rollouts=[Rollout.begin(second, 0), Rollout.begin(first, 1)])]
    write_groups(tmp_path / "groups", groups)
    assert read_groups(tmp_path / "groups") == groups


def test_of_the_record_what_no_reader_of_data_makes_is_left_out(tmp_path: Path) -> None:
    known = {
        "image": b"\x00\xff",
        "when": datetime(2024, 2, 29, 12, 0, 0, 5, tzinfo=timezone(timedelta(hours=-3))),
        "days": [{"day": date(2024, 2, 29), "at": time(1, 2), "for": timedelta(days=-1, microseconds=1)}, 1, None],
        "price": Decimal("0.10"),
        "map": [("a", b"1"), ("b", (1, 2))],
        "kept": [1],
    }
    fields_of_record = known | {"deep": [{"at": {1: 2}}], "array": np.zeros(2)}
    prompt = replace(prompt_of(0, np.random.default_rng(0)), fields=fields_of_record)
    write_groups(tmp_path / "groups", [Group.begin("g", prompt, 1)])
    (group,) = read_groups(tmp_path / "groups")
    assert group.prompt.fields == known and str(group.prompt.fields["price"]) == "0.10"
    assert replace(group.prompt, fields=fields_of_record) == prompt


def test_a_token_takes_thirteen_bytes(tmp_path: Path) -> None:
    prompt = Prompt(id="p", text="", input=ModelInput(np.array([1])))
    rollouts = [Rollout.begin(prompt, index) for index in range(64)]
    for rollout in rollouts:
        rollout.append(
            Completion(
                token_ids=np.arange(999),
                logprobs=np.zeros(999),
                versions=np.zeros(999),
                finish_reason=FinishReason.STOP,
            )
        )
    write_groups(tmp_path / "groups", [Group(id="g", prompt=prompt, rollouts=rollouts)])
    size = sum(file.stat().st_size for file in (tmp_path / "groups").iterdir())
    assert 13 * 64_000 < size < 13.3 * 64_000


def test_what_is_written_again_replaces_what_was_there(tmp_path: Path) -> None:
    write_groups(tmp_path / "groups", groups_of(1))
    write_groups(tmp_path / "groups", groups_of(2))
    assert read_groups(tmp_path / "groups") == groups_of(2)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["groups", GROUPS, ARRAYS]


def test_a_crash_on_the_way_leaves_the_former_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_groups(tmp_path / "groups", groups_of(1))

    def die(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(whole.os, "fsync", die)
        write_groups(tmp_path / "groups", groups_of(2))
    # The new folder was not put in place before its files were on the disk.
    assert not (tmp_path / "groups").exists() or read_groups(tmp_path / "groups") == groups_of(1)


@pytest.mark.parametrize("name", [GROUPS, ARRAYS])
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "groups"
    write_groups(folder, groups_of(3))
    content = (folder / name).read_bytes()
    for damaged in (content[:-1], b"", content[:40] + bytes([content[40] ^ 1]) + content[41:], content + b"\n"):
        (folder / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
            read_groups(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: No such file"):
        read_groups(folder)


def test_files_of_another_folder_or_format_are_refused(tmp_path: Path) -> None:
    write_groups(tmp_path / "a", groups_of(4))
    write_groups(tmp_path / "b", groups_of(5))
    (tmp_path / "a" / ARRAYS).write_bytes((tmp_path / "b" / ARRAYS).read_bytes())
    with pytest.raises(CheckpointError, match="not that of groups.json"):
        read_groups(tmp_path / "a")
    write_sealed(tmp_path / "b" / GROUPS, read_sealed(tmp_path / "b" / GROUPS) | {"format": 2})
    with pytest.raises(CheckpointError, match="has format 2, this version of rlframe reads groups of format 1"):
        read_groups(tmp_path / "b")
    write_sealed(tmp_path / "b" / GROUPS, [])
    with pytest.raises(CheckpointError, match="has format None"):
        read_groups(tmp_path / "b")
