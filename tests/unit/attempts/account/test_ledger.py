"""The ledger: what is noted of each lease, and what a resumed run finds of it."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rlframe.attempts.account.ledger import LEDGER, Dropped, DropReason, Leased, Ledger, Trained, read_ledger
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, Group, Rollout
from rlframe.utils.errors import CheckpointError

PROMPT = Prompt(id="p", text="", input=ModelInput(np.array([7])))


INDICES = itertools.count()


def attempt(*versions: int) -> Rollout:
    """Returns an attempt with a response of one token for each version, and one token of the environment after it."""
    rollout = Rollout.begin(PROMPT, next(INDICES))
    count = len(versions)
    rollout.append(
        Completion(
            token_ids=np.ones(count),
            logprobs=np.zeros(count),
            versions=np.array(versions),
            finish_reason=FinishReason.STOP,
        )
    )
    rollout.observe([5])
    return rollout


def group(*attempts: Rollout) -> Group:
    return Group(id="g", prompt=PROMPT, rollouts=list(attempts))


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]


def test_a_lease_is_told_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.leased(0, prompt="a", epoch=0)
    ledger.leased(1, prompt="b", epoch=0)
    assert not (tmp_path / LEDGER).exists()
    ledger.write(1)
    # Step 5 begins with version 4: of its tokens two are 2 behind, one is 1 behind, three are new.
    ledger.trained(0, group(attempt(2, 2, 3), attempt(4, 4, 4)), step=5, lost={DropReason.TIMED_OUT: [attempt(1, 2)]})
    ledger.dropped(1, DropReason.FLAT_ALL_WRONG, [attempt(4), attempt(4, 4)])
    ledger.write(5)
    assert lines(tmp_path) == [
        {"step": 1, "event": "leased", "lease": 0, "prompt": "a", "epoch": 0},
        {"step": 1, "event": "leased", "lease": 1, "prompt": "b", "epoch": 0},
        {
            "step": 5, "event": "trained", "lease": 0, "trained_at": 5, "version": 4, "tokens": [3, 3], "oldest": 2,
            "newest": 4, "lag_sum": 5, "lag_tokens": 6, "lost": {"timed_out": [2]},
        },
        {"step": 5, "event": "dropped", "lease": 1, "reason": "flat_all_wrong", "tokens": 3, "lengths": [1, 2]},
    ]  # fmt: skip
    assert [type(event) for event in read_ledger(tmp_path).events] == [Leased, Leased, Trained, Dropped]


def test_tokens_that_no_policy_sampled_have_no_lag(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.trained(0, group(attempt(-1, -1), attempt()), step=3)
    ledger.trained(1, group(attempt(-1, 1)), step=3)
    ledger.write(3)
    first, second = lines(tmp_path)
    assert (first["tokens"], first["oldest"], first["newest"], first["lag_tokens"]) == ([2, 0], None, None, 0)
    assert (second["tokens"], second["oldest"], second["newest"], second["lag_sum"]) == ([2], 1, 1, 1)


def told(folder: Path, steps: Sequence[int]) -> Ledger:
    """Returns the ledger of a run that has leased a prompt in each step, and trains in each on that of the one
    before."""
    ledger = Ledger(folder)
    for step in steps:
        ledger.leased(step, prompt=f"p{step}", epoch=0)
        if step > 1:
            ledger.trained(step - 1, group(attempt(step - 1)), step=step)
        ledger.write(step)
    return ledger


def test_a_resumed_run_has_the_open_leases_of_its_checkpoint(tmp_path: Path) -> None:
    ledger = told(tmp_path, [1, 2, 3, 4])
    ledger.leased(5, prompt="p5", epoch=0)
    assert list(ledger.open_leases()) == [4]
    # The run dies in step 5, and its newest checkpoint is of step 2. Lease 2 has not ended there.
    resumed = Ledger(tmp_path, done_steps=2)
    assert resumed.open_leases() == {2: Leased(step=2, lease=2, prompt="p2", epoch=0)}
    assert {line["step"] for line in lines(tmp_path)} == {1, 2}
    # What the dead run did not write is not written by the one that goes on.
    ledger.rewind(2)
    ledger.write(3)
    assert {line["step"] for line in lines(tmp_path)} == {1, 2}


def test_a_run_that_begins_again_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    told(tmp_path, [1, 2])
    assert Ledger(tmp_path).open_leases() == {}
    assert (tmp_path / LEDGER).read_bytes() == b""


def test_a_line_that_a_crash_left_half_written_is_cut_off(tmp_path: Path) -> None:
    told(tmp_path, [1, 2])
    whole = (tmp_path / LEDGER).read_bytes()
    told_later = Ledger(tmp_path, done_steps=2)
    told_later.leased(3, prompt="\u4e8c\u2028", epoch=0)
    told_later.write(3)
    written = (tmp_path / LEDGER).read_bytes()
    for end in range(len(whole) + 1, len(written) - 1):
        (tmp_path / LEDGER).write_bytes(written[:end])
        account = read_ledger(tmp_path)
        assert account.torn and len(account.events) == 3
        Ledger(tmp_path, done_steps=9)
        assert (tmp_path / LEDGER).read_bytes() == whole


def test_what_a_step_writes_is_on_the_disk_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(
        "rlframe.attempts.account.ledger.sync", lambda file: synced.append(file.read_bytes().count(b"\n"))
    )
    ledger = Ledger(tmp_path)
    for lease in range(1000):
        ledger.leased(lease, prompt="p" * 100, epoch=0)
    ledger.write(1)
    ledger.write(2)
    assert synced == [1000]


@pytest.mark.parametrize(
    "line", ["7", "{}", '{"step":1,"event":"eaten"}', '{"step":1,"event":"leased","lease":1}', "{"]
)
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    told(tmp_path, [1])
    with (tmp_path / LEDGER).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(CheckpointError, match=r"ledger.jsonl:2 is damaged, or was not written by this version"):
        read_ledger(tmp_path)


def test_later_versions_may_say_more(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text('{"step":1,"event":"leased","lease":1,"prompt":"p","epoch":0,"new":true}\n')
    assert read_ledger(tmp_path).events == [Leased(step=1, lease=1, prompt="p", epoch=0)]
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_ledger(tmp_path / "absent")
