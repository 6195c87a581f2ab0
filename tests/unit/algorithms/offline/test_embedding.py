"""InfoNCE over the whole step against losses and gradients worked by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.base import ForwardModel
from rlframe.algorithms.embedding import Embedding, EmbeddingConfig
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, Mean, StateOutput
from rlframe.types.supervised import Contrasted, Role

# In the order hard negative of query 6, positive of 2, query 6, positive of 6, query 2; two tokens each. Cosines:
#   query 6 (1, 0): 0.6 with its positive, 0.8 with the other's, 0 with the negative
#   query 2 (0, 1): 0.6 with its positive, 0.8 with the other's, -1 with the negative
STATES = torch.tensor([[0.0, -1.0], [0.8, 0.6], [1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
BATCH = {
    "token_ids": torch.arange(10),
    "lengths": torch.full((5,), 2),
    "loss_mask": torch.tensor([False, True] * 5),
    "group": torch.tensor([6, 2, 6, 6, 2]),
    "role": torch.tensor([Role.NEGATIVE, Role.POSITIVE, Role.QUERY, Role.POSITIVE, Role.QUERY]),
}


class Given(ForwardModel):
    """A ForwardModel whose states are those above, each times the length of its text's vector."""

    def __init__(self, lengths: Tensor):
        self.whole = STATES * lengths[:, None]

    def states(self, batch: Sequences) -> Tensor:
        """[R, H]"""
        return self.whole


def outcome(
    batch: dict[str, Tensor], *, lengths: tuple[float, ...] = (1.0,) * 5, **settings: Any
) -> tuple[LossOutput, Tensor]:
    """The loss, and its gradient at the states of the last tokens; there is none at the others."""
    algorithm, model = Embedding(EmbeddingConfig(temperature=0.5, **settings)), Given(torch.tensor(lengths))
    prepared = algorithm.prepare(Contrasted(**batch), model)
    states = torch.zeros(10, 2)
    states[1::2] = model.whole
    states.requires_grad_()
    result = algorithm.loss(StateOutput(states=states), prepared, algorithm.token_weights(prepared))
    result.loss.backward()
    assert states.grad is not None and not states.grad[0::2].any()
    return replace(result, loss=result.loss.detach()), states.grad[1::2]


def test_info_nce_is_over_all_texts_of_the_step() -> None:
    # At temperature 0.5 the logits are 1.2, 1.6, 0: log(3.320117 + 4.953032 + 1) - 1.2 = 2.227123 - 1.2,
    # and 1.2, 1.6, -2: log(3.320117 + 4.953032 + 0.135335) - 1.2 = 2.129242 - 1.2.
    result, gradient = outcome(BATCH, cosine=False)
    assert float(result.loss) == pytest.approx((1.027123 + 0.929242) / 2, abs=1e-6)
    # Of the positive of query 6: [(P - 1) (1, 0) + P' (0, 1)] / 0.5 / 2 with P = 0.358036, P' = 0.589051.
    torch.testing.assert_close(gradient[3], torch.tensor([-0.641964, 0.589051]), atol=1e-5, rtol=0)
    assert result.metrics["train/accuracy"] == Mean(0.0, 2.0)
    assert result.metrics["train/reciprocal_rank"] == Mean(1.0, 2.0)


def test_cosines_do_not_see_lengths() -> None:
    result, gradient = outcome(BATCH, lengths=(2.0, 5.0, 1.0, 0.5, 3.0))
    assert float(result.loss) == pytest.approx((1.027123 + 0.929242) / 2, abs=1e-6)
    # The same gradient without its part along the vector, over the vector's length: g - (g.s) s with g.s = 0.086062.
    wanted = (torch.tensor([-0.641964, 0.589051]) - 0.086062 * STATES[3]) / 0.5
    torch.testing.assert_close(gradient[3], wanted, atol=1e-5, rtol=0)


def test_a_text_that_reads_like_the_positive_is_no_negative() -> None:
    alike = BATCH | {"token_ids": torch.tensor([0, 1, 2, 3, 4, 5, 2, 3, 8, 9])}
    # Query 6 chooses from logits 1.2 and 0: log(1 + e^-1.2) = 0.263282; query 2 from 1.2 and -2: log(1 + e^-3.2).
    result, _ = outcome(alike)
    assert float(result.loss) == pytest.approx((0.263282 + 0.039953) / 2, abs=1e-6)
    assert result.metrics["train/accuracy"] == Mean(2.0, 2.0)


def test_another_positive_of_the_same_query_is_no_negative() -> None:
    alike = BATCH | {"token_ids": torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 4, 5])}
    # As above: what query 2 is near to, query 6, which asks the same, is not far from.
    result, _ = outcome(alike)
    assert float(result.loss) == pytest.approx((0.263282 + 0.039953) / 2, abs=1e-6)


def test_matryoshka_adds_the_loss_of_the_first_dimensions_alone() -> None:
    # Of the first dimension the cosines are signs: query 6 has 1, 1, 0, logits 2, 2, 0: log(2 e^2 + 1) - 2 = 0.758624;
    # query 2 has nothing there, log 3 = 1.098612.
    result, _ = outcome(BATCH, matryoshka_dimensions=[1])
    whole, first = (1.027123 + 0.929242) / 2, (0.758624 + 1.098612) / 2
    assert float(result.loss) == pytest.approx(whole + first, abs=1e-6)


def test_a_text_much_nearer_than_the_positive_is_taken_for_an_unmarked_answer() -> None:
    # The other's positive is 0.2 nearer than the own one. Without it: logits 1.2 and 0; 1.2 and -2, as above.
    result, _ = outcome(BATCH, fake_negative_margin=0.1)
    assert float(result.loss) == pytest.approx((0.263282 + 0.039953) / 2, abs=1e-6)
    result, _ = outcome(BATCH, fake_negative_margin=0.25)
    assert float(result.loss) == pytest.approx((1.027123 + 0.929242) / 2, abs=1e-6)


def test_a_query_counts_only_with_its_positive() -> None:
    mask = BATCH["loss_mask"].clone()
    mask[3] = False
    # Query 2 has lost its positive: query 6 alone is left, with logits 1.2 and 0, over the step's two queries.
    result, _ = outcome(BATCH | {"loss_mask": mask})
    assert float(result.loss) == pytest.approx(0.263282 / 2, abs=1e-6)


def test_bad_settings_are_refused() -> None:
    for settings, message in (
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": float("nan")}, "temperature must be above 0, got nan"),
        ({"fake_negative_margin": float("inf")}, "fake_negative_margin must be at most 10000.0, got inf"),
        ({"matryoshka_dimensions": [4, 4]}, "matryoshka_dimensions must be different numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            EmbeddingConfig(**settings)
    (fault,) = map(str, Embedding(EmbeddingConfig(matryoshka_dimensions=[4, 64])).faults(hidden_size=64))
    assert fault.startswith("algorithm.matryoshka_dimensions must be below the model's 64")
