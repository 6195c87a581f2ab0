"""Steps from which nothing is learned: counted every time, announced once, remembered by checkpoints."""

from dataclasses import replace

import pytest
import torch

from rlframe.loops.reporting.advantage_stats import EMPTY, FLAT, AdvantageStats
from rlframe.types.batch import Batch, TrainBatch


def batch(*, advantages: list[float], mask: list[bool]) -> TrainBatch:
    """One rollout of three tokens."""
    made = Batch(
        token_ids=torch.zeros(3).long(),
        lengths=torch.tensor([3]),
        loss_mask=torch.tensor(mask),
        rollout_logprobs=torch.zeros(3),
        group=torch.tensor([0]),
        rewards=torch.zeros(1),
        versions=torch.zeros(3).long(),
    )
    return made.with_advantages(torch.tensor(advantages))


GOOD = batch(advantages=[0.0, 0.5, 0.0], mask=[False, True, True])
WITHOUT_ADVANTAGE = batch(advantages=[0.0] * 3, mask=[False, True, True])
WITHOUT_TOKENS = batch(advantages=[0.0] * 3, mask=[False] * 3)


def test_steps_in_vain_are_counted_by_reason_and_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    results: dict[str, float] = {}
    signal = AdvantageStats(results)
    assert signal.of(1, GOOD) == {FLAT: 0.0, EMPTY: 0.0}
    assert caplog.records == []
    assert signal.of(2, WITHOUT_ADVANTAGE) == {FLAT: 1.0, EMPTY: 0.0}
    assert signal.of(3, WITHOUT_ADVANTAGE) == {FLAT: 2.0, EMPTY: 0.0}
    assert signal.of(4, WITHOUT_TOKENS) == {FLAT: 2.0, EMPTY: 1.0}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith("step 2: every advantage of the 1 rollouts is 0")
    assert messages[1].startswith("step 4: no token of the 1 rollouts is in the loss")
    # A run that is resumed goes on counting, and does not announce again.
    assert AdvantageStats(results).of(5, WITHOUT_ADVANTAGE) == {FLAT: 3.0, EMPTY: 1.0}
    assert len(caplog.records) == 2


def test_a_loss_that_reads_no_advantage_does_not_miss_it(caplog: pytest.LogCaptureFixture) -> None:
    signal = AdvantageStats({}, by_advantages=False)
    assert signal.of(1, WITHOUT_ADVANTAGE) == {EMPTY: 0.0} and caplog.records == []
    assert signal.of(2, WITHOUT_TOKENS) == {EMPTY: 1.0} and len(caplog.records) == 1


def test_a_reward_that_returns_nothing_is_announced_as_that(caplog: pytest.LogCaptureFixture) -> None:
    unscored = replace(WITHOUT_ADVANTAGE, rewards=torch.full((1,), torch.nan))
    assert AdvantageStats({}).of(1, unscored) == {FLAT: 1.0, EMPTY: 0.0}
    assert [record.getMessage() for record in caplog.records] == [
        "step 1: no attempt of the 1 rollouts has a reward: every part returned None, so only KL and entropy train; a "
        "function that ends without `return` gives None. Further such steps are only counted, in "
        "train/steps_without_advantage"
    ]
