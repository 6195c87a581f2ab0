"""No loss makes the host wait for the device.

A host that reads a number of a GPU waits for it, in every micro-batch, and the GPU then waits for the host. A meta
tensor has no number to read. `Waits` sees one that is written from the host.
"""

from typing import Any

import pytest
import torch

from rlframe.types.results import Mean, Peak, merge, settled
from tests.contracts.algorithm_scenes import read_as, scene
from tests.contracts.test_algorithms import CASES, make
from tests.waits import Waits

pytestmark = pytest.mark.later
MARKS = {False: [], True: [pytest.mark.thorough]}
"""Of an algorithm with its defaults, and with options."""

READERS = {"reranker": "makes lists that are as long as queries have documents"}
"""Algorithms whose loss waits for the device, and why."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS[bool(case[1])]) for case in CASES], ids=str)
def test_a_loss_reads_no_number(case: tuple[str, dict[str, Any]]) -> None:
    algorithm = make(case)
    data = scene(algorithm, with_old=algorithm.online)
    weights = algorithm.token_weights(data.batch).to("meta")
    batch = data.batch.each(lambda value, _: value.to("meta"))
    logprobs, entropy = (values.to("meta").requires_grad_() for values in (data.logprobs, data.entropy))
    policy = read_as(algorithm.output, logprobs, entropy)
    if case[0] in READERS:
        with pytest.raises((RuntimeError, NotImplementedError)):
            algorithm.loss(policy, batch, weights)  # type: ignore[attr-defined]
        return
    with Waits() as waits:
        algorithm.loss(policy, batch, weights).loss.backward()  # type: ignore[attr-defined]
    assert waits.found == []


def test_numbers_are_fetched_by_kind_and_stay_in_their_places() -> None:
    shares = [
        {"a": Mean(torch.tensor(1.5), torch.tensor(2)), "b": Peak(torch.tensor(4.0, dtype=torch.float64))},
        {"a": Mean(3.0, torch.tensor(4)), "b": Peak(torch.tensor(-1.0, dtype=torch.float64))},
    ]
    assert settled(shares) == [{"a": Mean(1.5, 2.0), "b": Peak(4.0)}, {"a": Mean(3.0, 4.0), "b": Peak(-1.0)}]
    assert merge(shares) == {"a": Mean(4.5, 6.0), "b": Peak(4.0)}
