"""Which attempts a run keeps token by token, with which numbers, and until when."""

import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from rlframe.loops.config import Keep, SamplesConfig
from rlframe.loops.reporting.samples import Chosen, SampleFiles, choose, in_digits, read_samples, sample_files
from rlframe.ops.advantages import rewards_by_sequence
from rlframe.ops.packing import pack
from rlframe.types.batch import TrainBatch
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import OFFLINE_VERSION, FinishReason, Group, Rollout, members
from rlframe.utils.errors import OutputError, SettingError


def attempt(index: int, reward: float, *, sequence: int = 0) -> Rollout:
    """An attempt with a prompt of two tokens and a response of two, sampled by versions 3 and 4."""
    return Rollout(
        prompt=Prompt(id="p", text="2+2=", input=ModelInput((1, 2)), answer="4"),
        sample_index=index,
        input=ModelInput([1, 2, 5, 6]),
        loss_mask=[False, False, True, True],
        rollout_logprobs=[0.0, 0.0, -0.5, -0.1234567891],
        versions=[OFFLINE_VERSION, OFFLINE_VERSION, 3, 4],
        finish_reason=FinishReason.STOP,
        text="four",
        reward=reward,
        reward_parts={"match": reward},
        reward_weights={"match": 1.0},
        sequence=sequence,
    )


def trained(rewards: list[list[float]]) -> tuple[list[Rollout], TrainBatch]:
    """Groups of attempts and their batch, in which every token's advantage is its rollout's reward minus 0.5."""
    groups = [
        Group(id=str(number), prompt=attempt(0, 0.0).prompt, rollouts=[attempt(*pair) for pair in enumerate(own)])
        for number, own in enumerate(rewards)
    ]
    batch = pack(groups)
    advantages = torch.repeat_interleave((batch.rewards - 0.5).nan_to_num(0.0), batch.lengths) * batch.loss_mask
    return members(groups), batch.with_advantages(advantages)


def write(folder: Path, chosen: Chosen, decode: Callable[[Sequence[int]], list[str]] = in_digits) -> None:
    """Writes the file of a step."""
    files = SampleFiles(folder, decode)
    files.write(chosen)
    files.close()


@pytest.mark.parametrize(
    ("keep", "places"),
    [
        ([Keep.FIRST], {0: ["first"], 1: ["first"]}),
        ([Keep.BEST], {1: ["best"], 4: ["best"]}),
        ([Keep.WORST], {2: ["worst"], 3: ["worst"]}),
        ([Keep.BEST, Keep.FIRST], {0: ["first"], 1: ["best", "first"], 4: ["best"]}),
        ([Keep.ALL], {place: ["all"] for place in range(6)}),
        ([], {}),
    ],
)
def test_each_choice_keeps_its_attempts(keep: list[Keep], places: dict[int, list[str]]) -> None:
    rollouts, batch = trained([[0.5, 1.0, 0.0], [0.1, 0.9, float("nan")]])
    assert choose(SamplesConfig(keep=keep), 1, rollouts, batch).places == places


def test_among_equal_rewards_the_advantage_decides() -> None:
    rollouts, batch = trained([[1.0, 1.0], [1.0, 0.0]])
    batch.advantages[8:12] *= 3
    assert list(choose(SamplesConfig(keep=[Keep.BEST], of_each=1), 1, rollouts, batch).places) == [2]


def test_random_ones_are_the_same_when_a_step_is_done_again_and_others_in_another_step() -> None:
    rollouts, batch = trained([[0.0] * 50])
    config = SamplesConfig(keep=[Keep.RANDOM], of_each=5)
    first, again, later = (list(choose(config, step, rollouts, batch).places) for step in (1, 1, 2))
    assert first == again != later and len(first) == 5


def test_an_attempt_is_kept_with_all_of_its_sequences() -> None:
    rollouts = [attempt(0, 0.0), attempt(1, 1.0), attempt(1, 1.0, sequence=1)]
    assert list(choose(SamplesConfig(keep=[Keep.BEST], of_each=1), 0, rollouts).places) == [1, 2]


def test_each_sequence_of_an_attempt_has_the_rewards_at_the_tokens_of_all(tmp_path: Path) -> None:
    rollouts = [attempt(0, 1.0), attempt(0, 1.0, sequence=1), attempt(1, 0.5)]
    rollouts[0].credit(0.25)
    rollouts[1].credit(2.0)
    batch = pack([Group(id="0", prompt=rollouts[0].prompt, rollouts=rollouts)])
    write(tmp_path, choose(SamplesConfig(keep=[Keep.ALL]), 1, rollouts, batch.with_advantages(torch.zeros(12))))
    records = list(read_samples(sample_files(tmp_path)[0][2]))
    assert [each["reward"] for each in records] == rewards_by_sequence(batch).tolist() == [3.25, 3.25, 0.5]
    assert all(each["group_rewards"] == [3.25, 3.25, 0.5] and each["group_attempts"] == 2 for each in records)


def test_every_token_has_its_numbers(tmp_path: Path) -> None:
    rollouts, batch = trained([[0.0, 1.0]])
    batch.loss_mask[7] = False
    chosen = choose(SamplesConfig(keep=[Keep.BEST], of_each=1), 3, rollouts, batch)
    chosen.take_trainer_logprobs(torch.tensor([0.0, 0.0, -0.5, -0.25]))
    write(tmp_path, chosen, lambda tokens: [f"<{token}>" for token in tokens])
    [(step, evaluation, path)] = sample_files(tmp_path)
    [record] = read_samples(path)
    assert (step, evaluation, record["evaluation"], record["reward"], record["answer"]) == (3, "", "", 1.0, "4")
    assert (record["group_rewards"], record["group_advantages"], record["group_place"]) == ([0.0, 1.0], [-0.5, 0.5], 1)
    assert record["tokens"] == {
        "ids": [1, 2, 5, 6],
        "pieces": ["<1>", "<2>", "<5>", "<6>"],
        "sampled": [0, 0, 1, 1],
        "in_loss": [0, 0, 1, 0],
        "turns": [-1, -1, 0, 0],
        "versions": [-1, -1, 3, 4],
        "rollout_logprobs": [0.0, 0.0, -0.5, -0.123457],
        "trainer_logprobs": [0.0, 0.0, -0.5, -0.25],
        "advantages": [0.0, 0.0, 0.5, 0.5],
    }


def test_numbers_that_are_not_finite_and_halves_of_characters_are_written(tmp_path: Path) -> None:
    rollouts, batch = trained([[0.0, 1.0]])
    rollouts[0].text, rollouts[0].rollout_logprobs[2] = "half \ud800", float("nan")
    chosen = choose(SamplesConfig(keep=[Keep.ALL]), 1, rollouts, batch)
    write(tmp_path, chosen)
    one, other = read_samples(sample_files(tmp_path)[0][2])
    assert one["response"] == "half \ud800" and one["tokens"]["rollout_logprobs"] == [0.0, 0.0, None, -0.123457]
    assert other["tokens"]["rollout_logprobs"] == [0.0, 0.0, -0.5, -0.123457]


def test_logprobs_of_the_step_are_used_where_it_has_some(tmp_path: Path) -> None:
    rollouts, batch = trained([[0.0, 1.0]])
    batch.old_logprobs = torch.arange(8) / -8
    write(tmp_path, choose(SamplesConfig(keep=[Keep.BEST], of_each=1), 3, rollouts, batch))
    [record] = read_samples(sample_files(tmp_path)[0][2])
    assert record["tokens"]["trainer_logprobs"] == [-0.5, -0.625, -0.75, -0.875]


def test_a_resumed_run_keeps_the_steps_that_it_does_not_do_again(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path, in_digits)
    for step in (1, 2, 3):
        files.write(Chosen(step=step, rollouts=[attempt(0, 0.0)], places={0: ["first"]}))
    (tmp_path / "samples" / "notes.txt").write_text("mine")
    files.rewind(2)
    assert [step for step, _, _ in sample_files(tmp_path)] == [1, 2]
    files.rewind(None)
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["notes.txt"]


def test_a_file_that_cannot_be_written_is_told_at_the_next(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("not a folder")
    files = SampleFiles(tmp_path, in_digits)
    chosen = Chosen(step=1, rollouts=[attempt(0, 0.0)], places={0: ["first"]})
    files.write(chosen)
    with pytest.raises(OutputError, match="samples"):
        files.write(chosen)
    files.close()


def test_only_kept_rollouts_are_marked_and_none_where_the_step_has_logprobs() -> None:
    rollouts, batch = trained([[0.0, 1.0]])
    chosen = choose(SamplesConfig(keep=[Keep.BEST], of_each=1), 3, rollouts, batch)
    kept = chosen.marked(batch).kept
    assert kept is not None and kept.tolist() == [False, True] and batch.kept is None
    batch.old_logprobs = torch.zeros(8)
    assert chosen.marked(batch) is batch


def test_nothing_kept_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, choose(SamplesConfig(keep=[]), 1, [attempt(0, 0.0)]))
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_file_is_read_until_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "step-00000001.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"step": 1}\n{"ste'))
    assert list(read_samples(path)) == [{"step": 1}]
    path.write_bytes(gzip.compress(b'{"step": 1}\n')[:-9])
    assert list(read_samples(path)) in ([], [{"step": 1}])
    path.write_bytes(b"not compressed")
    assert list(read_samples(path)) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep": [Keep.ALL, Keep.BEST]}, "keep must be \\[all\\] alone"),
        ({"keep": [Keep.BEST, Keep.BEST]}, "keep must name each choice once"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        SamplesConfig(**settings)
