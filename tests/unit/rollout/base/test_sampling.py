import math

import pytest
import torch

from rlframe.rollout.base.sampling import ONE_BLOCK, draw, keep_likely, sample, splitmix64, uniforms
from rlframe.rollout.base.seeds import request_seed
from rlframe.types.rollout import SamplingParams

UNUSED = torch.tensor([0.5], dtype=torch.float64)


def test_splitmix64_gives_the_published_sequence():
    # First five outputs of Vigna's splitmix64.c started at 1234567, as Rosetta Code lists them.
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    bits = splitmix64(torch.full((5,), 1234567), torch.arange(5))
    assert [int(value) % 2**64 for value in bits] == expected


def test_uniforms_are_the_top_53_bits():
    # 6457827717110365317 >> 11 = 3153236189995295; times 2^-53 = 0.35008...
    value = uniforms(torch.tensor([1234567]), torch.tensor([0]))
    assert float(value) == 3153236189995295 / 2**53


def test_request_seed_is_stable_and_sensitive_to_every_part():
    base = {"run_seed": 1, "prompt_id": "a:0", "sample_index": 2, "step": 3, "turn": 0}
    changes = [{"run_seed": 2}, {"prompt_id": "a:1"}, {"sample_index": 3}, {"step": 2}, {"turn": 1}, {"epoch": 1}]
    seeds = [request_seed(**base), *(request_seed(**(base | change)) for change in changes)]
    assert len(set(seeds)) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
    # blake2b-64 of b"1 3 2 0 a:0", little endian, shifted right by one: must never change, or runs do not repeat.
    assert seeds[0] == 2767852785356626844


def test_draw_picks_the_first_index_whose_cumulative_weight_exceeds_the_target():
    # Weights 1 2 0 1, sum 4, cumulative 1 3 3 4. Targets 0, .99, 1, 2.99, 3, just under 4.
    weights = torch.tensor([1.0, 2.0, 0.0, 1.0]).expand(6, 4)
    uniform = torch.tensor([0.0, 0.2475, 0.25, 0.7475, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, uniform).tolist() == [0, 0, 1, 1, 3, 3]


@pytest.mark.parametrize("vocabulary", [ONE_BLOCK, ONE_BLOCK + 1, 2116, 5000])
def test_draws_of_many_tokens_are_those_of_few(vocabulary: int):
    generator = torch.Generator().manual_seed(0)
    # Multiples of 2^-20, whose sums no format rounds; three in four are 0, all of the first and the last 100.
    weights = torch.randint(0, 1 << 10, (40, vocabulary), generator=generator).float() * 2.0**-20
    weights[torch.rand(weights.shape, generator=generator) < 0.75] = 0.0
    weights[:, :100] = weights[:, -100:] = 0.0
    uniform = torch.rand(40, dtype=torch.float64, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
    reached = weights.double().cumsum(1)
    sums = reached[:, -1].tolist()
    # Where the product is rounded to the sum, the last token with a weight.
    targets = [
        min(part * total, math.nextafter(total, 0.0)) for part, total in zip(uniform.tolist(), sums, strict=True)
    ]
    expected = [int((row > target).nonzero()[0]) for row, target in zip(reached, targets, strict=True)]
    tokens = draw(weights, uniform).tolist()
    assert tokens == expected
    assert all(weights[row, token] > 0 for row, token in enumerate(tokens))


def test_draw_never_takes_a_trailing_token_of_weight_zero():
    weights = torch.tensor([[0.1, 0.2, 0.0]])
    assert draw(weights, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [1]


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, [0.5, 0.25, 0.15, 0.1]),
        (2, 1.0, [0.5, 0.25, 0.0, 0.0]),
        # 0.5 + 0.25 = 0.75 does not reach 0.8, so the third token is needed and the fourth is not.
        (0, 0.8, [0.5, 0.25, 0.15, 0.0]),
        # Of the first two, summing to 0.75, the first alone reaches 0.6 * 0.75 = 0.45.
        (2, 0.6, [0.5, 0.0, 0.0, 0.0]),
        (0, 1e-9, [0.5, 0.0, 0.0, 0.0]),
        (9, 1.0, [0.5, 0.25, 0.15, 0.1]),
    ],
)
def test_keep_likely(top_k: int, top_p: float, expected: list[float]):
    kept = keep_likely(torch.tensor([[0.5, 0.25, 0.15, 0.1]]), top_k=top_k, top_p=top_p)
    torch.testing.assert_close(kept, torch.tensor([expected]))


def test_greedy_takes_the_likeliest_and_reports_its_plain_logprob():
    # Softmax of ln(1, 3) is 1/4, 3/4.
    # A draw at 0.1 would be token 0.
    low = torch.tensor([0.1], dtype=torch.float64)
    result = sample(torch.tensor([[1.0, 3.0]]).log(), sampling=SamplingParams(temperature=0.0), uniform=low)
    assert result.tokens.tolist() == [1]
    torch.testing.assert_close(result.logprobs, torch.tensor([0.75]).log())


def test_logprobs_are_at_the_temperature_and_before_any_filter():
    # At temperature 0.5 the logits ln(1, 3) double to ln(1, 9): probabilities 0.1 and 0.9. top_k=1 leaves token 1.
    sampling = SamplingParams(temperature=0.5, top_k=1)
    result = sample(torch.tensor([[1.0, 3.0]]).log(), sampling=sampling, uniform=UNUSED)
    assert result.tokens.tolist() == [1]
    torch.testing.assert_close(result.logprobs, torch.tensor([0.9]).log())


def test_forbidden_tokens_are_not_drawn_and_leave_the_logprobs_alone():
    # Probabilities 0.5 0.25 0.25 with the first forbidden: uniform 0.5 falls at the start of the third.
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    result = sample(logits, sampling=SamplingParams(), uniform=UNUSED, forbidden=torch.tensor([[True, False, False]]))
    assert result.tokens.tolist() == [2]
    torch.testing.assert_close(result.logprobs, torch.tensor([0.25]).log())


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (SamplingParams(), [0.1, 0.2, 0.3, 0.4]),
        # Logits halved: probabilities in proportion to the square roots.
        (SamplingParams(temperature=2.0), [0.16270, 0.23009, 0.28180, 0.32540]),
        # The three likeliest, over 0.9.
        (SamplingParams(top_k=3), [0.0, 2 / 9, 3 / 9, 4 / 9]),
        (SamplingParams(top_p=0.6), [0.0, 0.0, 3 / 7, 4 / 7]),
    ],
)
def test_frequencies_follow_the_distribution(sampling: SamplingParams, expected: list[float]):
    count = 20000
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().expand(count, 4)
    # Half the draws differ by seed, half by position: both must behave as random.
    seeds = torch.cat([torch.arange(count // 2), torch.full((count // 2,), 77)])
    positions = torch.cat([torch.full((count // 2,), 5), torch.arange(count // 2)])
    tokens = sample(logits, sampling=sampling, uniform=uniforms(seeds, positions)).tokens
    observed = torch.bincount(tokens, minlength=4).double()
    wanted = torch.tensor(expected, dtype=torch.float64) * count
    assert observed[wanted == 0].sum() == 0
    kept = wanted > 0
    chi_square = float(((observed - wanted)[kept] ** 2 / wanted[kept]).sum())
    # 99.9 % quantile of chi-square with 3 degrees of freedom.
    assert chi_square < 16.27
