"""Token weights of every aggregation, worked by hand."""

import pytest
import torch

from rlframe.ops.aggregation import Aggregation, token_weights
from rlframe.types.batch import Batch, Sequences


def batch_of(masks: list[list[int]], group: list[int]) -> Batch:
    """Sequences with these loss masks."""
    flat = [flag for mask in masks for flag in mask]
    return Batch(
        token_ids=torch.zeros(len(flat), dtype=torch.int64),
        lengths=torch.tensor([len(mask) for mask in masks]),
        loss_mask=torch.tensor(flat).bool(),
        rollout_logprobs=torch.zeros(len(flat)),
        group=torch.tensor(group),
        rewards=torch.zeros(len(masks)),
        versions=torch.zeros(len(flat), dtype=torch.int64),
    )


MASKS = [[0, 1, 1], [0, 0], [0, 1, 1, 1]]
"""B = 3 sequences with 2, 0 and 3 tokens in the loss: N = 5."""
GOLDEN = {
    Aggregation.TOKEN_MEAN: (1 / 5, 1 / 5),
    Aggregation.TOKEN_SUM: (1, 1),
    # The fully masked sequence has no numerator, but is one of the three.
    Aggregation.SEQ_MEAN_TOKEN_SUM: (1 / 3, 1 / 3),
    # 3 sequences * 10
    Aggregation.SEQ_MEAN_TOKEN_SUM_NORM: (1 / 30, 1 / 30),
    # 3 * 2 and 3 * 3
    Aggregation.SEQ_MEAN_TOKEN_MEAN: (1 / 6, 1 / 9),
    # Two prompts; sequences 0 and 1 share one, with 2 tokens in all, sequence 2 has the other, with 3.
    Aggregation.PROMPT_MEAN: (1 / 4, 1 / 6),
}


@pytest.mark.parametrize("mode", Aggregation)
@pytest.mark.parametrize("group", [[0, 0, 1], [4, 4, 9], [1, 1, 0]])
def test_weights_of_each_mode(mode: Aggregation, group: list[int]) -> None:
    length = 10 if mode is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM else None
    first, last = GOLDEN[mode]
    expected = torch.tensor([0.0, first, first, 0, 0, 0, last, last, last])
    torch.testing.assert_close(token_weights(batch_of(MASKS, group), mode, constant_length=length), expected)


def test_prompt_mean_counts_all_rollouts_of_a_prompt() -> None:
    # Prompt 7 has sequences 0 and 2 with 1 + 3 tokens, prompt 2 has sequence 1 with 2: 1 / (2 * 4) and 1 / (2 * 2).
    batch = batch_of([[0, 1], [1, 1], [1, 1, 1]], [7, 2, 7])
    expected = torch.tensor([0, 1 / 8, 1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8])
    torch.testing.assert_close(token_weights(batch, Aggregation.PROMPT_MEAN), expected)


@pytest.mark.parametrize("mode", Aggregation)
def test_a_step_without_any_token_in_the_loss_weighs_nothing(mode: Aggregation) -> None:
    assert token_weights(batch_of([[0, 0], [0]], [0, 1]), mode, constant_length=5).tolist() == [0.0] * 3


@pytest.mark.parametrize("mode", [mode for mode in Aggregation if mode is not Aggregation.PROMPT_MEAN])
def test_offline_sequences_have_weights_too(mode: Aggregation) -> None:
    online = batch_of(MASKS, [0, 0, 1])
    offline = Sequences(token_ids=online.token_ids, lengths=online.lengths, loss_mask=online.loss_mask)
    weights = token_weights(offline, mode, constant_length=10)
    assert torch.equal(weights, token_weights(online, mode, constant_length=10))


def test_importance_counts_in_numerators_and_denominators() -> None:
    # Tokens in the loss count 0.5 and 1.5 in one sequence, 3 in the other: 2 and 3 together, 5 in all.
    batch = batch_of([[0, 1, 1], [0, 1]], [0, 1])
    importance = torch.tensor([9.0, 0.5, 1.5, 9.0, 3.0])
    by_sequence = token_weights(batch, Aggregation.SEQ_MEAN_TOKEN_MEAN, importance=importance)
    torch.testing.assert_close(by_sequence, torch.tensor([0, 0.5 / 4, 1.5 / 4, 0, 3 / 6]))
    by_token = token_weights(batch, Aggregation.TOKEN_MEAN, importance=importance)
    torch.testing.assert_close(by_token, torch.tensor([0, 0.5 / 5, 1.5 / 5, 0, 3 / 5]))
    # Three quarters of a token are the whole mean of their sequence, 1 / 2.
    few = token_weights(batch, Aggregation.SEQ_MEAN_TOKEN_MEAN, importance=torch.full((5,), 0.375))
    torch.testing.assert_close(few, torch.tensor([0, 0.25, 0.25, 0, 0.5]))
