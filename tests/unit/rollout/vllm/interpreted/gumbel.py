"""Seeded draws through Triton's interpreter, which tests/multiprocess/test_interpreted.py runs."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from rlframe.rollout.vllm.sampling import gumbel
from rlframe.rollout.vllm.sampling.draws import Draws

LANES, BLOCKS = 16, 2
"""Small ones: the interpreter takes as long for each."""
VOCABULARY = 4 * LANES * BLOCKS + 3 * LANES + 5
"""Two programs, of which the second has less than a block, and of that less than all quarters."""
SEEDS = torch.tensor([7, -3, 2**62 + 11, 7])
PLACES = torch.tensor([4, 4, 0, 4])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gumbel, "LANES", LANES)
    monkeypatch.setattr(gumbel, "BLOCKS", BLOCKS)


@triton.jit
def write_noise(out, seed, place, LANES: tl.constexpr, EXPONENTIAL: tl.constexpr):
    """[4 * LANES] the exponential numbers of a seed and a place by call of Philox, a quarter after the other."""
    counter = tl.arange(0, LANES).to(tl.uint32)
    none = counter * 0
    bits = tl.philox(seed, counter, none + place, none, none)
    for quarter in tl.static_range(4):
        tl.store(out + quarter * LANES + tl.arange(0, LANES), EXPONENTIAL(bits[quarter]))


def noise(seed: int, place: int, count: int) -> torch.Tensor:
    """[4, count] exponential numbers."""
    out = torch.empty(4, count)
    write_noise[(1,)](out, seed, place, LANES=count, EXPONENTIAL=gumbel.exponential)
    return out


def test_noise_is_exponentially_distributed() -> None:
    values = noise(11, 3, 1024).flatten().double().sort().values
    steps = torch.arange(1, len(values) + 1) / len(values)
    # Kolmogorov and Smirnov: beyond 1.95 / sqrt(count) once in a thousand seeds.
    assert float((1 - (-values).exp() - steps).abs().max()) < 1.95 / len(values) ** 0.5
    assert float(values[0]) > 0


def test_the_greatest_sum_of_all_programs_blocks_and_quarters_is_drawn() -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    expected = []
    for row, seed, place in zip(logits, SEEDS.tolist(), PLACES.tolist(), strict=True):
        # A block has a quarter of its tokens from each of the four numbers.
        whole = noise(seed, place, 4 * LANES)
        by_token = torch.cat([block.flatten() for block in whole.split(LANES, dim=1)])
        expected.append(int((row - by_token[:VOCABULARY].log()).argmax()))
    assert gumbel.draw(logits, SEEDS, PLACES).tolist() == expected
    # Rows alone.
    assert gumbel.draw(logits[1:2], SEEDS[1:2], PLACES[1:2]).tolist() == expected[1:2]


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((4, VOCABULARY), -math.inf)
    logits[:, 149] = 0.0
    assert gumbel.draw(logits, SEEDS, PLACES).tolist() == [149] * 4


def test_every_bit_of_a_seed_and_the_place_count() -> None:
    first = noise(1, 0, 8)
    assert torch.equal(first, noise(1, 0, 8))
    for seed, place in ((2, 0), (1, 1), (1 + 2**40, 0), (-1, 0)):
        assert not (first == noise(seed, place, 8)).any()


def request(name: str, *, seed: int | None, first: int = 0) -> Any:
    """As much of a new request as is read."""
    return SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(seed=seed, first=first))


def follow(draws: Draws, *new: Any, finished: tuple[str, ...] = ()) -> None:
    output = SimpleNamespace(scheduled_new_reqs=list(new), finished_req_ids=set(finished))
    draws.follow(output, lambda parameters: parameters.first)


def test_rows_are_drawn_by_the_seeds_and_places_of_their_requests() -> None:
    draws, own = Draws(torch.device("cpu")), object()
    choose: Any = draws.within(lambda *_: own)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    news = [request("a", seed=5), request("b", seed=2**64 - 1, first=7), request("c", seed=None)]
    follow(draws, *news)
    # vLLM makes no generators.
    assert [new.sampling_params.seed for new in news] == [None] * 3
    with draws.of(["a", "b", "c"], np.array([4, 0, 2])):
        tokens, logprobs = choose(logits, {}, None, None)
        # Rows of a warm-up are vLLM's own.
        assert choose(logits[:2], {}, None, None) is own
    assert logprobs is None and choose(logits, {}, None, None) is own
    assert tokens[:2].tolist() == gumbel.draw(logits[:2], torch.tensor([5, 2**63 - 1]), torch.tensor([4, 7])).tolist()
    # In other company and another order.
    follow(draws, finished=("a",))
    with draws.of(["c", "b"], np.array([2, 0])):
        assert choose(logits[[2, 1]], {}, None, None)[0].tolist() == tokens[[2, 1]].tolist()
    # Without a seed, ranks agree.
    again = Draws(torch.device("cpu"))
    follow(again, request("c", seed=None))
    with again.of(["c"], np.array([2])):
        assert again.within(lambda *_: own)(logits[2:], {}, None, None)[0].tolist() == tokens[2:].tolist()
