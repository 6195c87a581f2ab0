"""GKD over ranks: the divergence on a split vocabulary, and loss and gradients of a student whose teacher is larger and
of another family, are those of plain torch and of transformers."""

import importlib.util
import itertools
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algorithms.gkd import Gkd, GkdConfig
from rlframe.cluster.config import Device
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.messages.microbatch import join, split
from rlframe.models.config import ModelConfig
from rlframe.types.batch import Sequences
from rlframe.types.rollout import OFFLINE_VERSION
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.gradients.cells import LENGTHS, TEMPERATURE
from tests.multiprocess.megatron.gradients.comparison import deviations
from tests.multiprocess.megatron.gradients.ranks import exported_gradients
from tests.multiprocess.megatron.gradients.reference import Reference
from tests.multiprocess.program import QUICK, Program, assert_equal_models, lines, metrics, run, samples
from tests.tiny_models import make, on_disk

CONFIG = GkdConfig(on_policy_fraction=0.0, beta=0.3, temperature=0.9, nll_coefficient=0.2)
TOP_K = replace(CONFIG, top_k=5)
"""The same over five tokens and the rest."""
STUDENTS = {"dense": ("qwen3", {}), "moe": ("qwen3_moe", {})}
TEACHER = ("llama", {"hidden_size": 96, "num_hidden_layers": 3, "head_dim": 24})
SETUPS = [("d1t2", "dense"), ("d2", "dense"), ("c2", "dense"), ("d2e2", "moe")]
"""Layouts and students. A vocabulary of 67 is padded to 68 where two ranks share it."""
TOLERANCE = 5e-5
"""As in the gradient matrix."""
NUM_TOKENS, VOCAB_SIZE = 11, 20
WIDTHS = [20, 22, 44]
"""Halves; 2 columns of padding on rank 1; padding all of rank 1's 22 columns, and 2 of rank 0's."""
BETAS = [0.0, 0.4, 1.0]


def plain(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """[T] the paper's equation 1, and its limits."""
    ours, theirs = torch.softmax(student / temperature, -1), torch.softmax(teacher / temperature, -1)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one / other).log()).sum(-1)

    if beta in (0, 1):
        return kl(theirs, ours) if beta == 0 else kl(ours, theirs)
    middle = (1 - beta) * ours + beta * theirs
    return beta * kl(theirs, middle) + (1 - beta) * kl(ours, middle)


def make_batch() -> Sequences:
    """Sequences with two thirds of their tokens in the loss."""
    generator = torch.Generator().manual_seed(1)
    lengths, total = torch.tensor(LENGTHS), sum(LENGTHS)
    mask = torch.rand(total, generator=generator) < 0.7
    mask[torch.cumsum(lengths, 0) - lengths] = False
    token_ids = torch.randint(0, 67, (total,), generator=generator)
    return Sequences(token_ids=token_ids, lengths=lengths, loss_mask=mask)


def logits_of(width: int) -> tuple[Tensor, Tensor]:
    """[T, width] of a student and a teacher, with padding that would dominate every sum if it took part."""
    generator = torch.Generator().manual_seed(2)
    both = 3 * torch.randn(2, NUM_TOKENS, max(WIDTHS), generator=generator)
    both[:, :, VOCAB_SIZE:] = 40.0
    return both[0, :, :width], both[1, :, :width]


def on_rank(rank: int, init_method: str, folders: dict[str, str], batch: Sequences) -> dict[Any, Any]:
    """What this rank has to show: divergences of split logits, and each setup's loss and gradients."""
    from rlframe.megatron.cpu import platform  # noqa: PLC0415 - the platform must be installed before Megatron

    where = platform.resolve(Device.CPU)
    platform.install(where)
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    found: dict[Any, Any] = {}
    for index, (layout, student) in enumerate(SETUPS):
        train = TrainConfig(parallel=layout, dtype=Dtype.FLOAT32, optimizer=OptimizerConfig(lr=1e-3))
        trainer = Trainer(TrainerSetup(
            rank=rank, init_method=f"{init_method}{index}", device=where, model=ModelConfig(path=folders[student]),
            train=train, seed=0, temperature=TEMPERATURE, total_optimizer_steps=1, timeout_s=60, with_reference=False,
            teacher=ModelConfig(path=folders["teacher"]),
        ))  # fmt: skip
        found[layout] = measure(trainer, batch, CONFIG)
        found[layout, TOP_K.top_k] = measure(trainer, with_top(trainer, batch), TOP_K)
        if index == 0:
            found["divergences"], found["top"] = divergences(rank), top(rank)
        parallel.shutdown()
    return found


def divergences(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Values, and the gradient of this rank's half, for each width and beta. In several chunks."""
    from rlframe.megatron.vocab import vocab_parallel  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.vocab.divergence import divergence  # noqa: PLC0415

    kept, vocab_parallel.CHUNK_ELEMENTS = vocab_parallel.CHUNK_ELEMENTS, 45
    found = []
    for width in WIDTHS:
        for beta in BETAS:
            ours, theirs = (each.chunk(2, dim=1)[rank].clone() for each in logits_of(width))
            ours.requires_grad_()
            value = divergence(
                ours, theirs, beta=beta, temperature=0.9, vocab_size=VOCAB_SIZE, group=torch.distributed.group.WORLD,
                reuse_teacher=True,
            )  # fmt: skip
            (torch.arange(NUM_TOKENS) * value).sum().backward()
            found.append((value.detach(), ours.grad))
    vocab_parallel.CHUNK_ELEMENTS = kept
    return found


def top(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The teacher's top 5, the divergence over it, and the gradient of this rank's half, for each width and beta."""
    from rlframe.megatron.vocab import top_k  # noqa: PLC0415 - see on_rank

    settings = {"vocab_size": VOCAB_SIZE, "group": torch.distributed.group.WORLD}
    found = []
    for width in WIDTHS:
        for beta in BETAS:
            ours, theirs = (each.chunk(2, dim=1)[rank].clone() for each in logits_of(width))
            ours.requires_grad_()
            ids = top_k.largest(theirs, k=5, **settings)
            teacher = top_k.logprobs_and_rest(theirs, ids, temperature=0.9, **settings)
            value = top_k.divergence(ours, ids, teacher, beta=beta, temperature=0.9, **settings)
            (torch.arange(NUM_TOKENS) * value).sum().backward()
            found.append((ids, value.detach(), ours.grad))
    return found


def coarse(logits: Tensor, ids: Tensor) -> Tensor:
    """[..., k + 1] log of the probabilities of `ids` and of all other tokens together."""
    probabilities = torch.softmax(logits, -1)
    chosen = probabilities.gather(-1, ids)
    return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], -1).log()


def with_top(trainer: Any, batch: Sequences) -> Sequences:
    """The batch with what the teacher says of this rank's share of it, which is all that this rank will read."""
    dp = Parallel.parse(trainer.setup.train.parallel).dp
    ranks, plan = split(batch, torch.zeros(batch.num_tokens), num_ranks=dp, max_tokens=31)
    k = TOP_K.top_k
    mine = trainer.teacher_top(ranks[trainer.coordinates.dp_rank].microbatches(), k=k, temperature=CONFIG.temperature)
    own = join([mine], [plan[trainer.coordinates.dp_rank]], batch.lengths)
    return replace(batch, teacher_top_ids=own[:, :k].int(), teacher_top_logprobs=own[:, k:])


def measure(trainer: Any, batch: Sequences, config: GkdConfig) -> dict[str, Any]:
    """This rank's part of the loss, of its gradients, and of the teacher's logprobs."""
    from rlframe.megatron.model import forward  # noqa: PLC0415 - see on_rank

    algorithm = Gkd(config)
    dp = Parallel.parse(trainer.setup.train.parallel).dp
    ranks, plan = split(batch, algorithm.token_weights(batch), num_ranks=dp, max_tokens=31)
    mine = ranks[trainer.coordinates.dp_rank].microbatches()
    passes = forward.accumulate_gradients(
        trainer.model, mine, algorithm, temperature=TEMPERATURE, teacher=trainer.teacher
    )
    gradients = exported_gradients(trainer)
    return {
        "where": trainer.coordinates,
        "plan": plan,
        "loss": sum(each.metrics["train/loss"].value for each in passes) if trainer.coordinates.reports else 0.0,
        "gradients": gradients,
        "teacher_logprobs": trainer.teacher_logprobs(mine),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Where the models are."""
    return {name: tmp_path_factory.mktemp(name) for name in ("dense", "moe", "teacher")}


def by_sequence(model: Any, batch: Sequences, of_logits: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[T] `of_logits(logits, next tokens)` at the token that is predicted, 0.0 at first tokens."""
    rows = [
        torch.cat([torch.zeros(1), of_logits(model(row[None]).logits[0, :-1].float(), row[1:])])
        for row in batch.token_ids.split(LENGTHS)
    ]
    return torch.cat(rows)


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logprob of each token at the trainer's temperature."""
    return torch.log_softmax(logits / TEMPERATURE, -1).gather(1, tokens[:, None])[:, 0]


def references(folders: dict[str, pathlib.Path], batch: Sequences) -> tuple[dict[tuple[str, int], Reference], Tensor]:
    """What transformers has for each student and k, and the teacher's logprobs."""
    kind, changes = TEACHER
    teacher, found = make(kind, folders["teacher"], **changes), {}
    with torch.no_grad():
        teacher_logprobs = by_sequence(teacher, batch, chosen)
    for name, top_k in itertools.product(STUDENTS, (0, TOP_K.top_k)):
        kind, changes = STUDENTS[name]
        student = make(kind, folders[name], **changes)
        rows = []
        for row in batch.token_ids.split(LENGTHS):
            with torch.no_grad():
                theirs = teacher(row[None]).logits[0, :-1]
            ours = student(row[None]).logits[0, :-1]
            models, temperature = [ours, theirs], CONFIG.temperature
            if top_k:
                ids = theirs.topk(top_k, dim=1).indices
                models, temperature = [coarse(each / CONFIG.temperature, ids) for each in models], 1.0
            losses = plain(*models, CONFIG.beta, temperature)
            rows += [torch.zeros(1), losses - CONFIG.nll_coefficient * chosen(ours, row[1:])]
        losses = torch.cat(rows)[batch.loss_mask]
        losses.mean().backward()
        gradients: dict[str, Tensor] = {}
        for parameter_name, parameter in student.named_parameters():
            gradients |= on_disk(parameter_name, parameter.grad.clone())
        mean = float(losses.detach().mean())
        # Divergences are never negative, nor is the likelihood's part here.
        found[name, top_k] = Reference(mean, mean, gradients)
    return found, teacher_logprobs


@pytest.fixture(scope="module")
def results(folders: dict[str, pathlib.Path]) -> tuple[dict[tuple[str, int], Reference], Tensor, list[dict[Any, Any]]]:
    """What transformers has, the teacher's logprobs, and what two ranks have."""
    batch = make_batch()
    expected, teacher_logprobs = references(folders, batch)
    ranks = run_distributed(on_rank, 2, {name: str(folder) for name, folder in folders.items()}, batch)
    return expected, teacher_logprobs, ranks


@pytest.mark.parametrize("top_k", [0, TOP_K.top_k])
@pytest.mark.parametrize(("layout", "student"), SETUPS)
def test_loss_and_gradients_are_those_of_transformers(layout: str, student: str, top_k: int, results: Any) -> None:
    expected, _, ranks = results
    found = deviations([rank[(layout, top_k) if top_k else layout] for rank in ranks], expected[student, top_k])
    worst = max(found, key=lambda name: found[name])
    assert found[worst] < TOLERANCE, f"{worst} is off by {found[worst]:.1e}"


@pytest.mark.parametrize(("layout", "student"), SETUPS)
def test_the_teachers_logprobs_are_those_of_transformers(layout: str, student: str, results: Any) -> None:
    _, expected, ranks = results
    reporting = [rank[layout] for rank in ranks if rank[layout]["where"].reports]
    reporting.sort(key=lambda rank: rank["where"].dp_rank)
    found = join([rank["teacher_logprobs"] for rank in reporting], reporting[0]["plan"], torch.tensor(LENGTHS))
    torch.testing.assert_close(found, expected * make_batch().loss_mask, atol=1e-4, rtol=0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_of_two_halves_is_that_of_the_whole(width: int, beta: float, results: Any) -> None:
    index = WIDTHS.index(width) * len(BETAS) + BETAS.index(beta)
    halves = [rank["divergences"][index] for rank in results[2]]
    student, teacher = (each[:, :VOCAB_SIZE].double() for each in logits_of(width))
    student.requires_grad_()
    expected = plain(student, teacher, beta, 0.9)
    (torch.arange(NUM_TOKENS) * expected).sum().backward()
    assert torch.equal(halves[0][0], halves[1][0]), "every rank must go on with the same numbers"
    torch.testing.assert_close(halves[0][0].double(), expected.detach(), atol=1e-5, rtol=1e-5)
    joined = torch.cat([gradient for _, gradient in halves], dim=1)
    assert student.grad is not None
    torch.testing.assert_close(joined[:, :VOCAB_SIZE].double(), student.grad, atol=1e-5, rtol=1e-4)
    assert not joined[:, VOCAB_SIZE:].any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("beta", BETAS)
def test_the_top_of_two_halves_is_that_of_the_whole(width: int, beta: float, results: Any) -> None:
    index = WIDTHS.index(width) * len(BETAS) + BETAS.index(beta)
    (ids, value, first), (other_ids, other_value, second) = (rank["top"][index] for rank in results[2])
    student, teacher = (each[:, :VOCAB_SIZE].double() for each in logits_of(width))
    student.requires_grad_()
    assert torch.equal(ids, other_ids) and torch.equal(ids, teacher.topk(5, dim=1).indices)
    expected = plain(coarse(student / 0.9, ids), coarse(teacher / 0.9, ids), beta, 1.0)
    (torch.arange(NUM_TOKENS) * expected).sum().backward()
    assert torch.equal(value, other_value), "every rank must go on with the same numbers"
    torch.testing.assert_close(value.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    joined = torch.cat([first, second], dim=1)
    assert student.grad is not None
    torch.testing.assert_close(joined[:, :VOCAB_SIZE].double(), student.grad, atol=1e-5, rtol=1e-4)
    assert not joined[:, VOCAB_SIZE:].any()


SAME = QUICK | {
    # The teacher is the policy's starting point, which hardly moves, so that whatever is compared must be 0.
    "model.random_init": "false",
    "teacher.path": "qwen3_moe_tiny",
    "train.optimizer.lr": 1e-7,
    "train.optimizer.schedule": "constant",
    "train.optimizer.warmup_steps": 0,
    "rollout.num_engines": 1,
    "checkpoint.every_steps": 0,
    "checkpoint.export": "false",
}
ENGINE = {"teacher.placement": "engine", "teacher.engine.name": "transformers"}
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
VLLM = ENGINE | {"teacher.engine.name": "vllm", "teacher.engine.enforce_eager": "true"}


def steps_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Metrics of each step."""
    return [line for line in metrics(folder) if "train/loss" in line]


def test_a_teacher_behind_engines_judges_and_writes_what_the_policy_would(tmp_path: pathlib.Path) -> None:
    # Two engines share the sequences. The student samples step 1, and the teacher writes step 2.
    gkd = Gkd(GkdConfig())
    seed = next(seed for seed in range(99) if gkd.samples(seed, 1) and not gkd.samples(seed, 2))
    settings = SAME | ENGINE | {
        "seed": seed, "algorithm.top_k": 7, "algorithm.seq_kd": "true", "teacher.engine.num_engines": 2, "steps": 2,
        "data.evaluation_count": 0, "train.parallel": "d1",
    }  # fmt: skip
    folder = run(tmp_path / "run", settings, config="gkd_qwen3_moe_tiny")
    sampled, written = steps_of(folder)
    assert (sampled["rollout/on_policy"], written["rollout/on_policy"]) == (1.0, 0.0)
    responses = samples(folder, 2, count=4)
    assert all(sample["versions"] == [OFFLINE_VERSION] for sample in responses)
    assert any(sample["response"] != sample["answer"] for sample in responses), "the data's would all be right"
    # Another row, token or rest would be off by a nat or so.
    assert abs(sampled["train/divergence_nats"]) < 1e-5 and abs(written["train/divergence_nats"]) < 1e-5
    assert "train/nll_nats" not in sampled and written["train/nll_nats"] > 0.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "where",
    [{"teacher.placement": "own", "teacher.parallel": "t2"}, ENGINE, pytest.param(VLLM, marks=NEEDS_VLLM)],
    ids=["ranks", "transformers", "vllm"],
)
def test_a_teacher_of_its_own_says_of_the_policys_own_samples_what_the_policy_says(
    where: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    # The reverse KL is 0 to rounding, and so is every advantage, until the step has moved the policy.
    settings = SAME | where | {
        "algorithm": "on_policy_distillation", "algorithm.distillation_coefficient": 1e3, "steps": 2,
        "train.optimizer.lr": 1e-3,
    }  # fmt: skip
    first, second = steps_of(run(tmp_path / "run", settings, config="gkd_qwen3_moe_tiny"))
    assert abs(first["train/teacher_kl_nats"]) < 1e-4
    assert abs(second["train/teacher_kl_nats"]) > 1e-3


LEARNING = {
    # A student that knows nothing, on the data's responses alone.
    "model.random_init": "true", "algorithm.on_policy_fraction": 0, "train.optimizer.lr": 3e-3, "steps": 4,
    "~reward": "exact_match", "~rollout": "transformers", "~rollout.max_tokens": 8,
}  # fmt: skip


@pytest.mark.thorough
def test_all_but_one_token_of_a_teacher_elsewhere_are_its_whole_distribution(tmp_path: pathlib.Path) -> None:
    # Of 261 tokens the top 260 and the rest, which is one token: the same loss, step after step.
    base = {key: value for key, value in SAME.items() if not key.startswith(("rollout", "data.max_prompt"))} | LEARNING
    top = base | {"algorithm.top_k": 260}
    own = {"teacher.placement": "own", "teacher.parallel": "t2"}
    whole, *others = [
        [step["train/loss"] for step in steps_of(run(tmp_path / str(index), settings, config="gkd_qwen3_moe_tiny"))]
        for index, settings in enumerate([base, top, top | own, top | ENGINE])
    ]
    assert whole[-1] < whole[0]
    for other in others:
        assert other == pytest.approx(whole, abs=2e-5)


@pytest.mark.thorough
@NEEDS_VLLM
def test_a_student_learns_from_a_teacher_behind_vllm(tmp_path: pathlib.Path) -> None:
    settings = SAME | VLLM | {
        "model.random_init": "true", "algorithm.top_k": 16, "algorithm.seq_kd": "true", "steps": 20,
        "train.optimizer.lr": 3e-3, "prompts_per_step": 16,
    }  # fmt: skip
    steps = steps_of(run(tmp_path / "run", settings, config="gkd_qwen3_moe_tiny"))
    assert {step["rollout/on_policy"] for step in steps} == {0.0, 1.0}
    assert steps[-1]["train/divergence_nats"] < 0.7 * steps[0]["train/divergence_nats"]


@pytest.mark.thorough
def test_a_killed_run_with_a_teacher_goes_on_bit_by_bit(tmp_path: pathlib.Path) -> None:
    # With this seed the teacher writes steps 2 and 4, before the checkpoint and after it.
    settings = SAME | ENGINE | {
        "seed": 6, "model.random_init": "true", "algorithm.top_k": 16, "algorithm.seq_kd": "true", "steps": 4,
        "train.optimizer.lr": 3e-3, "checkpoint.every_steps": 2, "checkpoint.export": "true",
        "logging.samples_per_step": 4,
    }  # fmt: skip
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(whole, settings, config="gkd_qwen3_moe_tiny")
    with Program(resumed, settings, config="gkd_qwen3_moe_tiny", held=["step 3"]) as program:
        program.wait_for_step(3)
        program.kill()
        assert program.survivors() == []
    run(resumed, settings, config="gkd_qwen3_moe_tiny")
    assert {step["rollout/on_policy"] for step in steps_of(whole)} == {0.0, 1.0}
    assert all(step["train/grad_norm"] > 1e-3 for step in steps_of(whole)), "equal numbers would prove nothing"
    assert metrics(resumed) == metrics(whole)
    assert lines(resumed / "samples.jsonl") == lines(whole / "samples.jsonl")
    assert_equal_models(resumed, whole)
