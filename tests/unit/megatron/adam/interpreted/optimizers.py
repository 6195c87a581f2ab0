"""Steps of Megatron's optimizers by rlframe's kernels, in Triton's interpreter, beside torch's AdamW; run by
tests/multiprocess/test_interpreted.py."""

import copy
import pathlib
from typing import Any

import pytest
import torch

from rlframe.cluster.config import Device
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.messages.microbatch import split
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.models.config import ModelConfig
from tests.multiprocess.distributed import run_distributed, save
from tests.multiprocess.megatron.test_layouts import Weighted, sequences, weights_of
from tests.tiny_models import make

LR, CLIP = 0.01, 0.05
LAYOUTS = ["d2e2", *(pytest.param(layout, marks=pytest.mark.thorough) for layout in ("d1t2|ffn:d1t2", "d1p2"))]


def trained(rank: int, init_method: str, folder: str, parallel: str, by_kernels: bool) -> dict[str, Any]:
    """Gradient norms of each step, weights, and how many steps the kernels took."""
    from rlframe.megatron.cpu import platform

    where = platform.resolve(Device.CPU)
    platform.install(where)
    from rlframe.megatron.adam.step import AdamStep, formats_of
    from rlframe.megatron.checkpoint.moments import parts
    from rlframe.megatron.worker.trainer import Trainer

    settings = OptimizerConfig(lr=LR, weight_decay=0.1, clip_grad=CLIP)
    trainer = Trainer(
        TrainerSetup(
            rank=rank, init_method=init_method, device=where, model=ModelConfig(path=folder), seed=0,
            train=TrainConfig(dtype=Dtype.FLOAT32, parallel=parallel, optimizer=settings), temperature=1.0,
            total_optimizer_steps=5, timeout_s=120, with_reference=False,
        )
    )  # fmt: skip
    taken: list[float] = []
    if by_kernels:
        trainer.optimizer.adam = counted(AdamStep, trainer.optimizer.chained_optimizers, where, taken)
        trainer.warm_up()
    batch = sequences()
    ranks = 2 if "d2" in parallel else 1
    shares, _ = split(batch, weights_of(batch), num_ranks=ranks, max_tokens=200, share_prompts=False)
    microbatches = shares[rank if ranks == 2 else 0].microbatches()
    results = trainer.train([microbatches] * 2, Weighted(), first_step=0)
    for part in parts(trainer.optimizer):
        # As when a checkpoint is read: every tensor is another, and has other numbers.
        part.optimizer.load_state_dict(copy.deepcopy(part.optimizer.state_dict()))
        for state in part.optimizer.state.values():
            state["exp_avg"].neg_()
    results += trainer.train([microbatches] * 2, Weighted(), first_step=2)
    if by_kernels:
        for part, tables in zip(trainer.optimizer.adam.parts, trainer.optimizer.adam._tables, strict=True):
            assert formats_of(part, torch.float32) == {table.kind._replace(group=0) for table in tables}
    state = pathlib.Path(folder) / f"state_{by_kernels}"
    state.mkdir(exist_ok=True)
    save(trainer, state)
    if by_kernels:
        # As in the process of a run that is resumed.
        trainer.optimizer.adam = counted(AdamStep, trainer.optimizer.chained_optimizers, where, taken)
        trainer.warm_up()
    trainer.load(state, num_optimizer_steps=4)
    results += trainer.train([microbatches], Weighted(), first_step=4)
    return {
        "norms": [step.metrics["train/grad_norm"].value for step in results],
        "weights": trainer.export(list(trainer.layout.tensors), torch.float32),
        "taken": taken,
    }


def counted(adam_step: Any, optimizers: list[Any], device: torch.device, taken: list[float]) -> Any:
    """The kernels' steps, which put each gradient norm into `taken`."""
    adam = adam_step(optimizers, device=device, clip_grad=CLIP)
    begin, gradient_norm = adam.begin, adam.gradient_norm

    def begun() -> None:
        for part in adam.parts:
            states = [] if part.is_stub_optimizer else part.optimizer.state.values()
            for group in part.optimizer.param_groups if states else []:
                # Transformer Engine counts steps here, and torch with each parameter.
                group["step"] = max(int(state["step"]) for state in states)
        begin()

    def norm() -> float:
        taken.append(gradient_norm())
        return taken[-1]

    adam.begin, adam.gradient_norm = begun, norm
    return adam


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_steps_by_kernels_are_those_of_adamw(parallel: str, tmp_path: pathlib.Path) -> None:
    make("qwen3_moe", tmp_path)
    plain, other = (run_distributed(trained, 2, str(tmp_path), parallel, by_kernels) for by_kernels in (False, True))
    for here, there in zip(plain, other, strict=True):
        # The first step makes the moments; what is resumed has them.
        assert here["taken"] == [] and there["taken"] == there["norms"][1:]
        assert there["norms"] == pytest.approx(here["norms"], rel=1e-5)
        for name, pieces in here["weights"].items():
            for (_, one), (_, another) in zip(pieces, there["weights"][name], strict=True):
                # Adam moves each weight by about lr a step, also where signs of gradients near zero differ.
                assert (one - another).abs().mean() < 2e-6, name
