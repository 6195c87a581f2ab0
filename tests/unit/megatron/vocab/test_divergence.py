"""The divergence on one rank against float64 torch, and by hand. Two ranks: see multiprocess."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlframe.megatron.vocab import vocab_parallel
from rlframe.megatron.vocab.divergence import divergence, renyi_entropies
from tests.unit.megatron.vocab.test_vocab_parallel import LargestFloat32

NUM_TOKENS, VOCAB_SIZE = 13, 29
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def plain(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """The same by torch's softmax, spelled out from the paper's equation."""
    ours, theirs = torch.softmax(student / temperature, 1), torch.softmax(teacher / temperature, 1)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one / other).log()).sum(1)

    if beta in (0, 1):
        return kl(theirs, ours) if beta == 0 else kl(ours, theirs)
    middle = (1 - beta) * ours + beta * theirs
    return beta * kl(theirs, middle) + (1 - beta) * kl(ours, middle)


def models(width: int = VOCAB_SIZE) -> tuple[Tensor, Tensor]:
    """Random logits of both in float64."""
    generator = torch.Generator().manual_seed(5)
    return tuple(2 * torch.randn(NUM_TOKENS, width, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("chunk_elements", [1 << 24, 3 * VOCAB_SIZE + 5, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_equal_torchs(
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    chunk_elements: int,
    temperature: float,
    padding: int,
    beta: float,
) -> None:
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk_elements)
    student, teacher = models(VOCAB_SIZE + padding)
    student[:, VOCAB_SIZE:], teacher[:, VOCAB_SIZE:] = 50.0, 70.0  # would dominate every sum if it took part
    slope = torch.linspace(-1, 2, NUM_TOKENS)

    exact = student[:, :VOCAB_SIZE].clone().requires_grad_()
    expected = plain(exact, teacher[:, :VOCAB_SIZE], beta, temperature)
    expected.backward(slope.double())

    ours, theirs = student.float().requires_grad_(), teacher.float()
    actual = divergence(ours, theirs, beta=beta, temperature=temperature, vocab_size=VOCAB_SIZE, group=group)
    actual.backward(slope)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected.detach(), atol=2e-6, rtol=1e-5)
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.grad[:, :VOCAB_SIZE].double(), exact.grad, atol=2e-6, rtol=1e-4)
    assert not ours.grad[:, VOCAB_SIZE:].any()
    assert torch.equal(ours.detach(), student.float()) and torch.equal(theirs, teacher.float())


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # P_S = (1/2, 1/4, 1/4), P_T = (1/4, 1/4, 1/2).
        # KL(P_T || P_S) = 1/4 log 1/2 + 0 + 1/2 log 2 = 1/4 log 2, and by symmetry so is KL(P_S || P_T).
        (0.0, math.log(2) / 4),
        (1.0, math.log(2) / 4),
        # M = (3/8, 1/4, 3/8): KL(P_S || M) = 1/2 log 4/3 + 0 + 1/4 log 2/3 = KL(P_T || M), and half of each.
        (0.5, math.log(4 / 3) / 2 + math.log(2 / 3) / 4),
        # M = 3/4 P_S + 1/4 P_T = (7/16, 1/4, 5/16):
        # 1/4 (1/4 log 4/7 + 1/2 log 8/5) + 3/4 (1/2 log 8/7 + 1/4 log 4/5).
        (
            0.25,
            (math.log(4 / 7) / 4 + math.log(8 / 5) / 2) / 4 + 3 * (math.log(8 / 7) / 2 + math.log(4 / 5) / 4) / 4,
        ),
    ],
)
def test_three_tokens_by_hand(group: dist.ProcessGroup, beta: float, expected: float) -> None:
    student, teacher = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.25, 0.5]]).log()
    value = divergence(student, teacher, beta=beta, temperature=1.0, vocab_size=3, group=group)
    assert value.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_ends_are_the_limits_of_the_scaled_divergence(group: dist.ProcessGroup, beta: float) -> None:
    student, teacher = models()
    near = 1e-6 if beta == 0 else 1 - 1e-6
    at_end = divergence(student.float(), teacher.float(), beta=beta, temperature=1.0, vocab_size=29, group=group)
    torch.testing.assert_close(plain(student, teacher, near, 1.0) / 1e-6, at_end.double(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("beta", BETAS)
def test_extreme_logits_stay_finite(group: dist.ProcessGroup, beta: float) -> None:
    # Each is sure of another token: exp(300) is infinite in float32, and exp(-600) is 0.
    student = torch.tensor([[300.0, 0.0, -300.0]], requires_grad=True)
    teacher = torch.tensor([[-300.0, 0.0, 300.0]])
    value = divergence(student, teacher, beta=beta, temperature=1.0, vocab_size=3, group=group)
    value.sum().backward()
    assert student.grad is not None
    if beta in (0, 1):
        # All mass of one where the other has exp(-600).
        assert value.item() == 600.0
        assert student.grad.tolist() == ([[1.0, 0.0, -1.0]] if beta == 0 else [[0.0, 0.0, 0.0]])
    else:
        # M is 1 - beta and beta on the two tokens: the entropy of the coin, and nothing that moves the student.
        coin = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert value.item() == pytest.approx(coin, rel=1e-6)
        torch.testing.assert_close(student.grad, torch.zeros(1, 3), atol=1e-7, rtol=0)


@pytest.mark.parametrize("beta", BETAS)
def test_a_student_that_is_the_teacher_has_nothing_to_learn(group: dist.ProcessGroup, beta: float) -> None:
    student = models()[0].float().requires_grad_()
    teacher = student.detach().clone()
    value = divergence(student, teacher, beta=beta, temperature=0.7, vocab_size=VOCAB_SIZE, group=group)
    value.sum().backward()
    assert student.grad is not None
    torch.testing.assert_close(value, torch.zeros(NUM_TOKENS), atol=1e-6, rtol=0)
    torch.testing.assert_close(student.grad, torch.zeros(NUM_TOKENS, VOCAB_SIZE), atol=1e-6, rtol=0)


def test_no_tokens_give_no_divergence(group: dist.ProcessGroup) -> None:
    student, teacher = torch.zeros(0, VOCAB_SIZE, requires_grad=True), torch.zeros(0, VOCAB_SIZE)
    value = divergence(student, teacher, beta=0.5, temperature=1.0, vocab_size=VOCAB_SIZE, group=group)
    value.sum().backward()
    assert value.shape == (0,) and student.grad is not None and student.grad.shape == (0, VOCAB_SIZE)


def test_bfloat16_logits_are_never_copied_whole(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_elements = 4 * VOCAB_SIZE
    monkeypatch.setattr(vocab_parallel, "CHUNK_ELEMENTS", chunk_elements)
    student, teacher = (each.bfloat16() for each in models())
    exact = student.double().requires_grad_()
    plain(exact, teacher.double(), 0.3, 0.9).sum().backward()
    ours = student.clone().requires_grad_()
    kept = teacher.clone()
    with LargestFloat32() as made:
        divergence(
            ours, teacher, beta=0.3, temperature=0.9, vocab_size=VOCAB_SIZE, group=group, reuse_teacher=True
        ).sum().backward()
    assert NUM_TOKENS * VOCAB_SIZE > chunk_elements >= made.largest > NUM_TOKENS
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-5, rtol=2**-8)
    assert not torch.equal(teacher, kept), "the gradient was to take the place of the teacher's logits"


def test_the_renyi_entropy_is_minus_the_log_of_the_chance_of_meeting(group: dist.ProcessGroup) -> None:
    # P = (1/2, 1/4, 1/4) at temperature 0.5, beside padding: sum p^2 = 1/4 + 1/16 + 1/16 = 3/8; and a certain token.
    logits = torch.tensor([[0.5, 0.25, 0.25], [1.0, 1e-30, 1e-30]]).log() / 2
    logits = torch.nn.functional.pad(logits, (0, 2), value=9.0)
    found = renyi_entropies(logits, temperature=0.5, vocab_size=3, group=group)
    torch.testing.assert_close(found, torch.tensor([math.log(8 / 3), 0.0]), atol=1e-6, rtol=0)
