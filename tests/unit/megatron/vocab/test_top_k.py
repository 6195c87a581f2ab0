"""The divergence over a teacher's top k on one rank, by hand and against float64 torch. Two ranks: see multiprocess."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlframe.megatron.vocab import divergence, top_k, vocab_parallel
from rlframe.types.results import Rest
from tests.unit.megatron.vocab.test_divergence import BETAS, NUM_TOKENS, VOCAB_SIZE, models, plain
from tests.unit.megatron.vocab.test_vocab_parallel import LargestFloat32

RECORDED = json.loads((Path(__file__).parent / "reference_losses_top_k.json").read_text())
"""By examples/benchmarks/record_top_k_losses.py."""


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def coarse(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """[T, k + 1] log of the probabilities of `ids` and of what is left."""
    probabilities = torch.softmax(logits / temperature, 1)
    chosen = torch.zeros_like(probabilities).scatter(1, ids, 1.0) > 0
    rest = probabilities.masked_fill(chosen, 0.0).sum(1, keepdim=True)
    return torch.cat([probabilities.gather(1, ids), rest], 1).log()


def both(student: Tensor, teacher: Tensor, k: int, beta: float, temperature: float, group: dist.ProcessGroup) -> Tensor:
    """[T] from float32 logits, the teacher's word as its ranks would send it."""
    settings = {"vocab_size": VOCAB_SIZE, "group": group}
    ids = top_k.largest(teacher, k=k, **settings)
    theirs = top_k.logprobs_and_rest(teacher, ids, temperature=temperature, **settings)
    return top_k.divergence(student, ids, theirs, beta=beta, temperature=temperature, **settings)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # Of P_T = (1/8, 1/2, 1/4, 1/8) the top 2 are tokens 1 and 2: (1/2, 1/4) and the rest 1/4. P_S = (1/2, 1/4, 1/8,
        # 1/8) has (1/4, 1/8) and the rest 5/8.
        # KL(P_T || P_S) = 1/2 log 2 + 1/4 log 2 + 1/4 log 2/5.
        (0.0, 0.75 * math.log(2) + 0.25 * math.log(0.4)),
        # KL(P_S || P_T) = 1/4 log 1/2 + 1/8 log 1/2 + 5/8 log 5/2.
        (1.0, 0.375 * math.log(0.5) + 0.625 * math.log(2.5)),
        # M = (3/8, 3/16, 7/16): 1/2 (3/4 log 4/3 + 1/4 log 4/7) + 1/2 (3/8 log 2/3 + 5/8 log 10/7).
        (
            0.5,
            (0.75 * math.log(4 / 3) + 0.25 * math.log(4 / 7) + 0.375 * math.log(2 / 3) + 0.625 * math.log(10 / 7)) / 2,
        ),
    ],
)
def test_two_of_four_tokens_by_hand(group: dist.ProcessGroup, beta: float, expected: float) -> None:
    student = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    ids, teacher = torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.25, 0.25]]).log()
    value = top_k.divergence(student, ids, teacher, beta=beta, temperature=1.0, vocab_size=4, group=group)
    assert value.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("rest", "beta", "expected"),
    [
        # The same teacher, and P_S = (1/2, 1/8, 1/8, 1/4): (1/2, 1/4) against (1/8, 1/8), the rest not looked at.
        # 1/2 log 4 + 1/4 log 2.
        (Rest.LEFT_OUT, 0.0, 1.25 * math.log(2)),
        # 1/8 log 1/4 + 1/8 log 1/2: below 0.
        (Rest.LEFT_OUT, 1.0, -0.375 * math.log(2)),
        # M = (5/16, 3/16): 1/2 (1/2 log 8/5 + 1/4 log 4/3) + 1/2 (1/8 log 2/5 + 1/8 log 2/3).
        (
            Rest.LEFT_OUT,
            0.5,
            (0.5 * math.log(8 / 5) + 0.25 * math.log(4 / 3) + 0.125 * (math.log(2 / 5) + math.log(2 / 3))) / 2,
        ),
        # (2/3, 1/3) against (1/2, 1/2).
        (Rest.RENORMALIZED, 0.0, 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)),
        (Rest.RENORMALIZED, 1.0, 0.5 * math.log(3 / 4) + 0.5 * math.log(3 / 2)),
        # M = (7/12, 5/12): 1/2 (2/3 log 8/7 + 1/3 log 4/5) + 1/2 (1/2 log 6/7 + 1/2 log 6/5).
        (
            Rest.RENORMALIZED,
            0.5,
            (2 / 3 * math.log(8 / 7) + math.log(4 / 5) / 3 + (math.log(6 / 7) + math.log(6 / 5)) / 2) / 2,
        ),
    ],
)
def test_the_rest_may_be_left_out_or_renormalised_away(
    group: dist.ProcessGroup, rest: Rest, beta: float, expected: float
) -> None:
    student = torch.tensor([[0.5, 0.125, 0.125, 0.25]]).log()
    ids, teacher = torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.25, 0.25]]).log()
    settings = {"beta": beta, "temperature": 1.0, "vocab_size": 4, "group": group, "rest": rest}
    assert top_k.divergence(student, ids, teacher, **settings).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("beta", BETAS)
def test_all_tokens_give_the_whole_divergence_and_its_gradient(group: dist.ProcessGroup, beta: float) -> None:
    student, teacher = (each.float() for each in models())
    one, other = student.clone().requires_grad_(), student.clone().requires_grad_()
    slope = torch.linspace(-1, 2, NUM_TOKENS)
    found = both(one, teacher, VOCAB_SIZE, beta, 0.8, group)
    expected = divergence.divergence(
        other, teacher, beta=beta, temperature=0.8, vocab_size=VOCAB_SIZE, group=group
    )  # fmt: skip
    found.backward(slope)
    expected.backward(slope)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_elements", [1 << 24, 3 * VOCAB_SIZE + 5, 1])
@pytest.mark.parametrize("k", [1, 4, VOCAB_SIZE - 1])
@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_equal_torchs(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, chunk_elements: int, k: int, beta: float
) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk_elements)
    student, teacher = models(VOCAB_SIZE + 3)
    student[:, VOCAB_SIZE:], teacher[:, VOCAB_SIZE:] = 50.0, 70.0  # would be the teacher's likeliest
    slope = torch.linspace(-1, 2, NUM_TOKENS)

    exact = student[:, :VOCAB_SIZE].clone().requires_grad_()
    ids = teacher[:, :VOCAB_SIZE].topk(k, dim=1).indices
    # Equation 1 takes logits: logarithms of the coarse probabilities are as good.
    ours, theirs = coarse(exact, ids, 0.7), coarse(teacher[:, :VOCAB_SIZE], ids, 0.7)
    expected = plain(ours, theirs, beta, 1.0)
    expected.backward(slope.double())

    logits = student.float().requires_grad_()
    actual = both(logits, teacher.float(), k, beta, 0.7, group)
    actual.backward(slope)
    torch.testing.assert_close(actual.double(), expected.detach(), atol=2e-6, rtol=1e-5)
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(logits.grad[:, :VOCAB_SIZE].double(), exact.grad, atol=2e-6, rtol=1e-4)
    assert not logits.grad[:, VOCAB_SIZE:].any()


@pytest.mark.parametrize("beta", BETAS)
def test_more_tokens_never_make_the_divergence_smaller(group: dist.ProcessGroup, beta: float) -> None:
    student, teacher = (each.float() for each in models())
    values = torch.stack([both(student, teacher, k, beta, 1.0, group) for k in range(1, VOCAB_SIZE + 1)])
    assert (values > -1e-6).all() and (values.diff(dim=0) > -1e-6).all()


@pytest.mark.parametrize("beta", BETAS)
def test_mass_moved_outside_the_top_k_counts(group: dist.ProcessGroup, beta: float) -> None:
    # Renormalised over tokens 0 and 1 the two models agree to the last digit; the student's mass is on token 2.
    student, teacher = torch.tensor([[2.0, 1.0, 9.0]]), torch.tensor([[2.0, 1.0, -9.0]])
    value = both_of_three(student, teacher, beta, group)
    assert value.item() > 0.2
    assert both_of_three(teacher, teacher, beta, group).item() == pytest.approx(0, abs=1e-6)


def both_of_three(student: Tensor, teacher: Tensor, beta: float, group: dist.ProcessGroup) -> Tensor:
    """`both` for a vocabulary of three and k = 2."""
    settings = {"vocab_size": 3, "group": group, "temperature": 1.0}
    ids = torch.tensor([[0, 1]])
    return top_k.divergence(
        student, ids, top_k.logprobs_and_rest(teacher, ids, **settings), beta=beta, **settings
    )  # fmt: skip


def test_a_rest_far_below_rounding_is_known_to_its_last_digit(group: dist.ProcessGroup) -> None:
    # 1 - (P(0) + P(1)) is 0 in float32; the rest is two tokens of exp(-60) each against exp(0) + exp(0).
    logits = torch.tensor([[0.0, 0.0, -60.0, -60.0]], requires_grad=True)
    found = top_k.logprobs_and_rest(logits, torch.tensor([[0, 1]]), temperature=1.0, vocab_size=4, group=group)
    expected = torch.tensor([[-math.log(2), -math.log(2), -60.0]])
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)
    # d log p(rest) / d x: a half for each of its tokens, less p, which is a half for each of the others.
    found[0, 2].backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, -0.5, 0.5, 0.5]]), atol=1e-6, rtol=0)


def test_no_tokens_give_no_divergence(group: dist.ProcessGroup) -> None:
    student, teacher = torch.zeros(0, VOCAB_SIZE, requires_grad=True), torch.zeros(0, VOCAB_SIZE)
    value = both(student, teacher, 3, 0.5, 1.0, group)
    value.sum().backward()
    assert value.shape == (0,) and student.grad is not None and student.grad.shape == (0, VOCAB_SIZE)


def test_bfloat16_logits_are_never_copied_whole(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_elements = 4 * VOCAB_SIZE
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk_elements)
    student, teacher = (each.bfloat16() for each in models())
    ids = teacher.topk(2, dim=1).indices
    exact = student.double().requires_grad_()
    plain(coarse(exact, ids, 0.9), coarse(teacher.double(), ids, 0.9), 0.3, 1.0).sum().backward()
    ours = student.clone().requires_grad_()
    with LargestFloat32() as made:
        both(ours, teacher, 2, 0.3, 0.9, group).sum().backward()
    # A chunk has one column more, for ids that live elsewhere.
    assert NUM_TOKENS * VOCAB_SIZE > chunk_elements + 4 >= made.largest > NUM_TOKENS
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize(
    ("expected", "rest", "beta", "temperature"),
    [
        *(
            (recorded, Rest.RENORMALIZED, float(beta), RECORDED["temperature"])
            for beta, recorded in RECORDED["ms-swift"].items()
        ),
        (RECORDED["verl"], Rest.LEFT_OUT, 0.0, 1.0),
    ],
    ids=["ms-swift 0", "ms-swift 0.3", "ms-swift 1", "verl"],
)
def test_other_rests_are_those_of_ms_swift_and_verl(
    group: dist.ProcessGroup, expected: dict, rest: Rest, beta: float, temperature: float
) -> None:
    student, teacher = (torch.tensor(RECORDED[name]) for name in ("student", "teacher"))
    settings = {"vocab_size": student.shape[1], "group": group}
    ids = top_k.largest(teacher, k=RECORDED["k"], **settings)
    theirs = top_k.logprobs_and_rest(teacher, ids, temperature=temperature, **settings)
    logits = student.requires_grad_()
    loss = top_k.divergence(logits, ids, theirs, beta=beta, temperature=temperature, rest=rest, **settings).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    torch.testing.assert_close(logits.grad, torch.tensor(expected["gradient"]), atol=2e-6, rtol=1e-5)
