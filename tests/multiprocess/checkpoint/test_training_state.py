"""The training state of one layout goes on in another: weights, main weights and moments exactly, losses within float
noise; and what is being written does not change under training."""

import pathlib
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import split
from rlframe.models.config import ModelConfig
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, Output, Sum, merge
from tests.multiprocess.distributed import run_distributed
from tests.tiny_models import make

STEPS_BEFORE, STEPS_AFTER = 3, 2
NOT_TRAINED = re.compile(r"e_score_correction_bias|\.indexer\.")
"""In names of weights without moments."""
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, schedule="cosine", warmup_steps=2)
CASES = {
    ("qwen3_moe", "float32", "d2e2"): ["d2e2", "d1", "d1t2p2|ffn:d1t1p2e2"],
    ("qwen3_moe", "bfloat16", "d2e2"): ["d2e2", "d1t2"],
    # A vocabulary of 67 rows is padded to 68 at t2 and not at t1.
    ("qwen3", "float32", "d1"): ["d1t2p2"],
    ("qwen3", "float32", "d4"): ["d1t2"],
    # Layers of two kinds, whose matrices are not stored in the order of the checkpoint.
    ("qwen3_next", "float32", "d1t2"): ["d1p2"],
    ("qwen3", "bfloat16", "d1t2"): ["d2"],
    # Tensor parallelism splits the norms of queries and keys, and not the indexers.
    ("minimax_m2", "float32", "d1t2"): ["d1"],
    ("deepseek_v32", "float32", "d1t2"): ["d1p2"],
    # Both stages hold the embedding, in a buffer of its own; Megatron 0.16.1 loses moments behind such a one.
    ("qwen3_tied", "float32", "d1p2"): ["d1p2", "d1p2v2", "d1"],
}
"""Where a state is saved, and where it is resumed: (model, dtype, layout) -> layouts."""
FURTHER = [("qwen3", "float32", "d4"), ("qwen3", "bfloat16", "d1t2"), ("deepseek_v32", "float32", "d1t2")]
"""Layouts and kinds of tensors that other cases have in another combination."""
PARAMETERS = [pytest.param(case, marks=[pytest.mark.thorough] if case in FURTHER else []) for case in CASES]


class Likelihood:
    """Plain maximum likelihood."""

    output = Output.TOKENS
    reads_renyi_entropy = False

    def loss(self, policy: Any, batch: Sequences, weights: torch.Tensor) -> LossOutput:
        """-sum weights * logprob."""
        loss = -(weights * policy.logprobs).sum()
        return LossOutput(loss=loss, metrics={"train/loss": Sum(float(loss.detach()))})


def step_of(index: int) -> Sequences:
    """The sequences of optimizer step `index`: eight, of different lengths, different each step."""
    generator = torch.Generator().manual_seed(index)
    lengths = torch.randint(3, 20, (8,), generator=generator)
    total = int(lengths.sum())
    mask = torch.ones(total, dtype=torch.bool)
    mask[torch.cumsum(lengths, 0) - lengths] = False
    return Sequences(
        token_ids=torch.randint(0, 67, (total,), generator=generator), lengths=lengths, loss_mask=mask
    )  # fmt: skip


def on_rank(
    rank: int, init_method: str, folder: pathlib.Path, cases: list[tuple[str, str, str]]
) -> dict[tuple, list[dict[str, Any] | None]]:
    """What this rank saw of each case: before the others what happened where the state was saved. None where a layout
    has fewer ranks."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    platform.install(platform.resolve(Device.CPU))
    results: dict[tuple, list[dict[str, Any] | None]] = {}
    for case in cases:
        results[case] = [
            visit(rank, f"{init_method}-{'-'.join(case)}-{index}", folder, case, layout, index == 0)
            if rank < Parallel.parse(layout).world
            else None
            for index, layout in enumerate([case[2], *CASES[case]])
        ]
    return results


def visit(
    rank: int,
    init_method: str,
    folder: pathlib.Path,
    case: tuple[str, str, str],
    layout: str,
    is_first: bool,
    optimizer: OptimizerConfig = OPTIMIZER,
) -> dict[str, Any]:
    """Train from the start and save on the way, or go on from what was saved."""
    from rlframe.megatron.worker import parallel  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    model, dtype, _ = case
    state = folder / "-".join(case)
    trainer = Trainer(TrainerSetup(
        rank=rank, init_method=init_method.replace("|", "+"), device=torch.device("cpu"),
        model=ModelConfig(path=str(folder / model)),
        train=TrainConfig(parallel=layout, dtype=dtype, optimizer=optimizer), seed=0, temperature=1.0,
        total_optimizer_steps=STEPS_BEFORE + STEPS_AFTER, timeout_s=60, with_reference=True,
    ))  # fmt: skip
    earlier: list[dict[str, Any]] = []
    if is_first:
        earlier = train(trainer, layout, range(STEPS_BEFORE))
        state.mkdir(exist_ok=True)
        trainer.stage(state, copy=True)
    else:
        trainer.verify(state)
        trainer.load(state, num_optimizer_steps=STEPS_BEFORE)
    result = {
        "earlier": earlier,
        "state": state_of(trainer),
        "reference": trainer.logprobs(shares(layout, 0)[trainer.coordinates.dp_rank], reference=True),
        "losses": train(trainer, layout, range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)),
        "trained": state_of(trainer)["weight"],
        "reports": trainer.coordinates.reports,
    }
    if is_first:
        # Only now: training has gone on since the state was staged.
        written = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(written, trainer.write())
        trainer.complete(written)
        torch.distributed.barrier()
    parallel.shutdown()
    return result


def shares(layout: str, index: int) -> list:
    """Micro-batches of optimizer step `index` by data-parallel rank."""
    batch = step_of(index)
    weights = batch.loss_mask.float() / int(batch.loss_mask.sum())
    shares, _ = split(batch, weights, num_ranks=Parallel.parse(layout).dp, max_tokens=64)
    return [share.microbatches() for share in shares]


def train(trainer: Any, layout: str, steps: range) -> list[dict[str, Any]]:
    """This rank's share of the metrics of each step."""
    mine = [shares(layout, index)[trainer.coordinates.dp_rank] for index in steps]
    return [update.metrics for update in trainer.train(mine, Likelihood(), first_step=steps.start)]


def state_of(trainer: Any) -> dict[str, dict[str, list]]:
    """This rank's pieces of weights, main weights and moments by Hugging Face name, through the recorded layout; NaN
    where another data-parallel rank keeps the moments."""
    from rlframe.megatron.checkpoint.state import parts  # noqa: PLC0415 - see on_rank
    from rlframe.megatron.model.model import named_parameters  # noqa: PLC0415

    name_of = {each: name for name, each in named_parameters(trainer.model.chunks).items()}
    kinds = {kind: {} for kind in ("param", "exp_avg", "exp_avg_sq", "momentum_buffer")}
    for part in parts(trainer.optimizer):
        for parameter in part.model_param_gbuf_map:
            owned = part._get_model_param_range_map(parameter)["param"]
            tensors = part._get_main_param_and_optimizer_states(parameter)
            for kind, values in kinds.items():
                if kind not in tensors:
                    continue
                whole = torch.full((parameter.numel(),), torch.nan)
                whole[owned.start : owned.end] = tensors[kind].detach()
                values[name_of[parameter]] = whole.view(parameter.shape)
    kinds["weight"] = {name: each.float() for name, each in trainer.model.parameters.items()}
    return {
        kind: {
            name: [(tuple(box.region), box.view(values).clone()) for box in boxes if box.parameter in values]
            for name, boxes in trainer.layout.boxes.items()
        }
        for kind, values in kinds.items()
        if values
    }


def whole(pieces_of_ranks: list[dict[str, list]], shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Whole tensors from the pieces of all ranks, every element covered."""
    tensors = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for pieces_by_name in pieces_of_ranks:
        for name, pieces in pieces_by_name.items():
            if name not in shapes:
                assert not pieces
                continue
            matrix = tensors[name].view(-1, tensors[name].shape[-1])
            for (row, rows, col, cols), values in pieces:
                window = matrix[row : row + rows, col : col + cols]
                window.copy_(torch.where(values.isnan(), window, values))
    assert [name for name, tensor in tensors.items() if tensor.isnan().any()] == []
    return tensors


def losses(results: list[dict[str, Any]]) -> list[float]:
    """Loss of each optimizer step over all reporting ranks."""
    reporting = [result["losses"] for result in results if result["reports"]]
    return [merge(step)["train/loss"].value for step in zip(*reporting, strict=True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The models and, after `results`, the saved states."""
    folder = tmp_path_factory.mktemp("states")
    for model in {model for model, *_ in CASES}:
        make(model, folder / model, num_hidden_layers=4 if model == "qwen3_tied" else 2)
    return folder


@pytest.fixture(scope="module")
def results(folder: pathlib.Path, request: pytest.FixtureRequest) -> dict[tuple, list[list[dict[str, Any]]]]:
    """By case of the chosen tests, by layout: what each rank of it saw."""
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    cases = [item.callspec.params["case"] for item in items]
    ranks = run_distributed(on_rank, 4, folder, cases)
    return {
        case: [
            [seen for rank in ranks if (seen := rank[case][index]) is not None] for index in range(len(CASES[case]) + 1)
        ]
        for case in cases
    }


@pytest.mark.parametrize("case", PARAMETERS, ids="-".join)
def test_a_state_goes_on_in_another_layout(
    case: tuple[str, str, str], folder: pathlib.Path, results: dict[tuple, list[list[dict[str, Any]]]]
) -> None:
    model, dtype, source = case
    shapes = {name: tensor.shape for name, tensor in load_file(folder / model / "model.safetensors").items()}
    before, *others = results[case]
    assert losses(before)[0] != losses(before)[1]
    optimized = {name: shape for name, shape in shapes.items() if not NOT_TRAINED.search(name)}
    of_kind = {kind: shapes if kind == "weight" else optimized for kind in before[0]["state"]}
    saved = {kind: whole([rank["state"][kind] for rank in before], of_kind[kind]) for kind in of_kind}
    trained = whole([rank["trained"] for rank in before], shapes)
    assert not torch.equal(trained["model.norm.weight"], saved["weight"]["model.norm.weight"])
    for layout, after in zip(CASES[case], others, strict=True):
        for kind, tensors in saved.items():
            loaded = whole([rank["state"][kind] for rank in after], of_kind[kind])
            assert [name for name in tensors if not torch.equal(loaded[name], tensors[name])] == [], (layout, kind)
            # All zeros would be equal too. An expert that no token chose has moments of zeros.
            assert all(tensor.any() for name, tensor in tensors.items() if ".experts." not in name), kind
        # A lost moment, step count or place in the schedule moves weights by a good part of lr = 0.01 a step, and the
        # losses by parts in a hundred; another order of summation by parts in a million in float32, and in bfloat16 by
        # what rounds differently at 8 bits.
        tolerance = 0.0 if layout == source else {"float32": 1e-5, "bfloat16": 3e-3}[dtype]
        assert losses(after) == pytest.approx(losses(before), rel=tolerance, abs=0), layout
        if dtype == "float32" or layout == source:
            again = whole([rank["trained"] for rank in after], shapes)
            assert max(float((again[name] - trained[name]).abs().max()) for name in shapes) <= 10 * tolerance, layout
        if layout == source:
            # The reference is the model the run began with, not the one it resumed.
            for mine, theirs in zip(after, before, strict=True):
                assert all(torch.equal(*pair) for pair in zip(mine["reference"], theirs["reference"], strict=True))
