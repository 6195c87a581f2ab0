"""From tokens to sequences."""

import torch

from rlframe.ops.sequences import last_outputs, last_tokens, sequence_sums, sequence_weights
from rlframe.types.batch import Sequences

BATCH = Sequences(
    token_ids=torch.arange(6),
    lengths=torch.tensor([3, 1, 2]),
    loss_mask=torch.tensor([False, True, True, False, False, True]),
)


def test_sums_are_over_the_tokens_in_the_loss() -> None:
    # Sequence 0 holds 2 and 3 (the first is masked), sequence 1 nothing, sequence 2 its last.
    values = torch.tensor([100.0, 2.0, 3.0, 100.0, torch.inf, 4.0])
    assert sequence_sums(values, BATCH).tolist() == [5.0, 0.0, 4.0]


def test_a_sequence_has_the_weight_of_its_tokens() -> None:
    weights = torch.tensor([0.0, 0.25, 0.25, 0.0, 0.0, 0.5])
    assert sequence_weights(weights, BATCH).tolist() == [0.25, 0.0, 0.5]


def test_the_last_output_is_at_the_last_token_in_the_loss() -> None:
    # A mask that ends early, as of a padded end of turn; a sequence without any token in the loss has its own last.
    batch = Sequences(
        token_ids=torch.arange(7),
        lengths=torch.tensor([4, 1, 2]),
        loss_mask=torch.tensor([False, True, True, False, False, True, False]),
    )
    assert last_tokens(batch).tolist() == [2, 4, 5]
    assert last_outputs(torch.arange(14.0).view(7, 2), batch).tolist() == [[4, 5], [8, 9], [10, 11]]
