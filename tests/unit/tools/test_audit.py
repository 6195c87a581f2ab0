"""The audit: a run whose every prompt is accounted for passes, and each way to lose or double one is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from msgspec import to_builtins
from msgspec.structs import replace

from rlframe.attempts.account.ledger import LEDGER, Carried, Dropped, Event, Leased, Trained
from rlframe.tools.audit import main

SETTINGS = {"steps": 3, "prompts_per_step": 2, "algorithm": {"group_size": 2}, "loop": {"max_policy_lag": 1}}
FINE = "every lease ended once or is in flight, and nothing was trained on twice or too late"


def leased(lease: int, step: int, *, prompt: str = "", epoch: int = 0) -> Leased:
    return Leased(step=step, lease=lease, prompt=prompt or f"p{lease}", epoch=epoch)


def trained(lease: int, step: int, *, behind: int = 0, tokens: tuple[int, ...] = (10, 20)) -> Trained:
    version = step - 1
    return Trained(
        step=step,
        lease=lease,
        trained_at=step,
        version=version,
        tokens=list(tokens),
        oldest=version - behind,
        newest=version,
        lag_sum=behind * tokens[0],
        lag_tokens=sum(tokens),
    )


def dropped(lease: int, step: int, reason: str, *lengths: int) -> Dropped:
    return Dropped(step=step, lease=lease, reason=reason, tokens=sum(lengths), lengths=list(lengths))


def good() -> list[Event]:
    """Two steps of three, the second on one group for which another was dropped, with a lease in flight after them."""
    return [
        leased(0, 1), leased(1, 1), leased(2, 1), trained(1, 1), trained(0, 1),
        leased(3, 2), leased(4, 2, prompt="p0", epoch=1), trained(2, 2, behind=1), dropped(3, 2, "timed_out", 90, 30),
    ]  # fmt: skip


def run_of(folder: Path, events: list[Event], **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS | settings))
    lines = [json.dumps(to_builtins(event)) for event in events]
    (folder / LEDGER).write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_a_run_that_lost_nothing_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_of(tmp_path / "run", good()))]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    # 60 tokens of responses were trained on... 90 in all, of which the first 10 of lease 2 are one behind.
    assert printed.out.splitlines() == [
        "steps: 2 of 3, 2 prompts each",
        "leases: 5, of which 3 trained on, 1 dropped, 1 in flight",
        "       1  dropped: timed_out",
        "in flight: lease 4 (prompt p0, epoch 1), since step 2",
        "lag of trained tokens: 0.111 on average, 1 at most, 1 allowed",
        "",
        "sampled tokens      responses      mean      10 %      50 %      90 %   longest",
        "trained on                  6      15.0      10.0      15.0      20.0      20.0",
        "thrown away                 2      60.0      36.0      60.0      84.0      90.0",
        "dropped: timed_out          2      60.0      36.0      60.0      84.0      90.0",
        "what was thrown away is 4.00 times as long as what was trained on; 120 tokens in all",
        FINE,
    ]


def edited(place: int, **changes: object) -> Callable[[], list[Event]]:
    """Returns the good run with another event at `place`."""
    return lambda: [replace(event, **changes) if at == place else event for at, event in enumerate(good())]


WRONG = {
    "a group is trained on twice": (
        lambda: [*good(), leased(5, 3, prompt="p1", epoch=1), trained(5, 3), trained(1, 3, behind=1)],
        ["lease 1 ended 2 times: trained on at step 1, trained on at step 3"],
    ),
    "a dropped group is trained on": (
        lambda: [*good(), trained(3, 2)],
        ["lease 3 ended 2 times: dropped in step 2 (timed_out), trained on at step 2"],
    ),
    "a lease is taken twice": (
        lambda: [*good(), leased(4, 2, prompt="p0", epoch=1)],
        ["lease 4 was taken 2 times: lease 4 (prompt p0, epoch 1), lease 4 (prompt p0, epoch 1)"],
    ),
    "a lease is never taken": (
        lambda: [*good(), dropped(7, 2, "failed")],
        ["lease 7 was dropped in step 2 (failed), but never taken"],
    ),
    "a prompt is dealt twice": (
        edited(2, prompt="p1"),
        ["prompt p1 of epoch 0 was leased 2 times: leases 1, 2"],
    ),
    "a prompt is skipped": (
        edited(6, prompt="lost"),
        ["prompt lost was skipped in epoch 0: lease 4 is of epoch 1"],
    ),
    "a token is too old": (
        edited(7, oldest=-1),
        ["lease 2 was trained on at step 2 with tokens of version -1, which are 2 behind; loop.max_policy_lag=1"],
    ),
    "a token is too new": (
        edited(7, newest=2),
        ["lease 2 was trained on at step 2 with tokens of version 2, which was published later"],
    ),
    "a version is read late": (
        edited(3, version=1),
        ["lease 1 was trained on at step 1 with weights of version 1, which that step does not begin with"],
    ),
    "a lease is forgotten": (
        lambda: [*good(), leased(5, 3), leased(6, 3), leased(7, 1), trained(5, 3), trained(6, 3)],
        [
            "lease 7 (prompt p7, epoch 0) was forgotten: taken in step 1, it had to end by step 2 with "
            "loop.max_policy_lag=1, and step 3 is done"
        ],
    ),
    "a step is too small": (
        lambda: [event for event in good() if not isinstance(event, Dropped)],
        ["step 2 trained on 1 groups, not on prompts_per_step=2, and none was dropped in that step, leases 2"],
    ),
    "one too many explains no step that is too small": (
        edited(8, reason="oversampled"),
        [
            "step 2 trained on 1 groups, not on prompts_per_step=2, and none was dropped in that step, leases 2",
            "step 2 threw 1 groups away because it had enough without them, leases 3; rollout.oversample=1, "
            "rollout.oversample_rest=carry allows 0",
        ],
    ),
    "a prompt that was passed over explains no step that is too small": (
        edited(8, reason="passed_over", tokens=0, lengths=[]),
        ["step 2 trained on 1 groups, not on prompts_per_step=2, and none was dropped in that step, leases 2"],
    ),
    "a step is missing": (
        edited(7, trained_at=3, version=2, oldest=1, newest=2, step=3),
        [
            "step 2 trained on 0 groups, not on prompts_per_step=2",
            "step 3 trained on 1 groups, not on prompts_per_step=2, and none was dropped in that step, leases 2",
        ],
    ),
    "a step is too large": (
        lambda: [*good(), leased(5, 1), trained(5, 1)],
        ["step 1 trained on 3 groups, not on prompts_per_step=2, leases 1, 0, 5"],
    ),
    "an attempt is lost": (
        edited(3, tokens=[10]),
        ["lease 1 was trained on at step 1 with 1 rollouts; nothing says what became of 1 of algorithm.group_size=2"],
    ),
}


CARRY = {"rollout": {"oversample": 1.5, "oversample_rest": "carry"}}
DROP = {"rollout": {"oversample": 1.5, "oversample_rest": "drop"}}


def carried(lease: int, step: int) -> Carried:
    return Carried(step=step, lease=lease, tokens=5)


def with_rest(*more: Event) -> list[Event]:
    """Two steps of two groups, each of which began a third one."""
    return [
        leased(0, 1), leased(1, 1), leased(2, 1), trained(0, 1), trained(1, 1),
        leased(3, 2), leased(4, 2), trained(2, 2), trained(3, 2), *more,
    ]  # fmt: skip


def test_groups_that_are_carried_over_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = with_rest(carried(2, 1), carried(4, 2))
    assert main([str(run_of(tmp_path / "run", events, **CARRY))]) == 0
    assert "       2  times that a step carried a group over, of 2 leases" in capsys.readouterr().out
    events = with_rest(dropped(4, 2, "oversampled", 3, 3))
    assert main([str(run_of(tmp_path / "drop", events, **DROP))]) == 0


@pytest.mark.parametrize(
    ("settings", "more", "sentence"),
    [
        (CARRY, [carried(2, 2)], "lease 2 was trained on at step 2, and yet carried over from step 2"),
        (CARRY, [carried(4, 2), carried(4, 2)], "lease 4 was carried over 2 times from step 2"),
        (
            CARRY,
            [dropped(4, 1, "flat_other"), carried(4, 2)],
            "lease 4 was dropped in step 1 (flat_other), and yet carried over from step 2",
        ),
        (
            DROP,
            [carried(4, 2)],
            "lease 4 was carried over from step 2 with rollout.oversample=1.5, rollout.oversample_rest=drop",
        ),
        (
            CARRY,
            [dropped(4, 2, "oversampled")],
            "step 2 threw 1 groups away because it had enough without them, leases 4; rollout.oversample=1.5, "
            "rollout.oversample_rest=carry allows 0",
        ),
        (
            DROP,
            [leased(5, 2), dropped(4, 2, "oversampled"), dropped(5, 2, "oversampled")],
            "step 2 threw 2 groups away because it had enough without them, leases 4, 5; rollout.oversample=1.5, "
            "rollout.oversample_rest=drop allows 1",
        ),
    ],
)
def test_what_is_wrong_with_groups_that_a_step_did_not_wait_for(
    tmp_path: Path, settings: dict, more: list[Event], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_of(tmp_path / "run", with_rest(*more), **settings))]) == 1
    assert capsys.readouterr().err.splitlines() == [f"wrong: {sentence}"]


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    events, sentences = WRONG[case]
    assert main([str(run_of(tmp_path / "run", events()))]) == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"wrong: {sentence}" for sentence in sentences]
    assert FINE not in printed.out


def test_an_attempt_that_is_accounted_for_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = edited(3, tokens=[10], lost={"failed": [3]})()
    assert main([str(run_of(tmp_path / "run", events))]) == 0
    assert "lost to a trained group: failed          1       3.0" in capsys.readouterr().out


def test_a_run_of_before_the_setting_may_not_lag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {key: value for key, value in SETTINGS.items() if key != "loop"}
    folder = run_of(tmp_path / "run", good())
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main([str(folder)]) == 1
    assert "which are 1 behind; loop.max_policy_lag=0" in capsys.readouterr().err


def test_streamed_records_may_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_of(tmp_path / "run", edited(2, prompt="p1")(), data={"streaming": True})
    assert main([str(folder)]) == 0
    said = "1 prompts came more than once in an epoch, as repeated records do with data.streaming=true"
    assert said in capsys.readouterr().out.splitlines()


def test_a_ledger_that_ends_before_the_newest_checkpoint_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_of(tmp_path / "run", good())
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    assert main([str(folder)]) == 0
    (folder / "checkpoints" / "step-00000003").mkdir()
    assert main([str(folder)]) == 1
    assert "ledger.jsonl ends in step 2, but there is a checkpoint of step 3" in capsys.readouterr().err


def test_a_half_written_line_is_said_and_is_not_held_against_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_of(tmp_path / "run", good())
    written = (folder / LEDGER).read_bytes()
    (folder / LEDGER).write_bytes(written[:-20])
    assert main([str(folder)]) == 0
    assert "the last line of ledger.jsonl is half-written: events of step 2 or later" in capsys.readouterr().out


def test_many_faults_of_a_kind_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = [dropped(lease, 1, "failed") for lease in range(100)]
    assert main([str(run_of(tmp_path / "run", events))]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "wrong: and 80 more like the last one"


def test_a_folder_without_a_ledger_is_said_to_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.endswith("absent is not a folder\n")
    assert main([str(tmp_path)]) == 2
    assert "is not the folder of a run: it has no config.yaml" in capsys.readouterr().err
    folder = run_of(tmp_path / "run", [])
    (folder / LEDGER).unlink()
    assert main([str(folder)]) == 2
    told = capsys.readouterr().err
    assert "the run ended before its first step, samples nothing, or was made by a version of rlframe that kept" in told


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (LEDGER, "{}\n", "ledger.jsonl:1 is damaged"),
        ("config.yaml", "a: [", "config.yaml is not readable YAML"),
        ("config.yaml", "a: 1", "config.yaml is not the configuration of a run"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, name: str, content: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_of(tmp_path / "run", good())
    (folder / name).write_text(content)
    assert main([str(folder)]) == 1
    assert sentence in capsys.readouterr().err
