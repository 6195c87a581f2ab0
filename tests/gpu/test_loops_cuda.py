"""Every loop as a whole program on a GPU: the losses of its first three steps are those of the CPU, in float32.

A loop that samples is recorded on the CPU and replayed on the GPU, so that both train on the same tokens. A teacher on
devices of its own takes a second GPU.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.tools.explain_gap.running import EXACT_FLOAT32
from tests.gpu.test_weight_sync_cuda import checkpoint
from tests.multiprocess.program import REWARD, metrics, run

pytestmark = pytest.mark.gpu

STEPS = 3
AT_ONCE = max(1, len(os.sched_getaffinity(0)) // 3)
"""Loops that run at the same time: most of a run is its start."""
SHORT = {
    "steps": STEPS,
    "prompts_per_step": 16,
    "train": "cpu",
    "data.evaluation_count": 8,
    "evaluation.every_steps": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.export": "false",
    "logging.progress": "false",
    "logging.tensorboard": "false",
}
SAMPLED = {
    "reward.parts.exact_match.name": f"{REWARD}:score",
    "rollout.num_engines": 1,
    "data.evaluation_count": 0,
    "data.max_prompt_tokens": 64,
}
"""Of loops that sample. A replay evaluates nothing."""
ADVANTAGES = SAMPLED | {
    "algorithm.group_size": 4,
    "prompts_per_step": 8,
    "algorithm.kl_coefficient": 0.05,
    "train.num_minibatches": 2,
}
"""Of those whose rewards are turned into advantages, with a frozen reference. The loss of the first optimizer step on a
batch is 0, because advantages add up to 0 and ratios are 1; that of a half is not."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
MOST = 1e-4
"""Greatest difference of a loss."""
OF_GRADIENTS = 1e-3
"""Greatest relative difference of a gradient's norm, before it is clipped. A lost part is off by far more."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A configuration and what is changed in it."""

    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    samples: bool = False
    needs: int = 1
    """GPUs."""

    @property
    def learns(self) -> tuple[str, ...]:
        """Returns the roles whose losses its metrics have."""
        return ("train", "critic") if self.settings.get("algorithm") == "ppo" else ("train",)


def offline(name: str) -> Loop:
    """Returns a loop that trains on given sequences, from the weights of the embedded model: those that a GPU draws are
    not the CPU's."""
    return Loop(config=f"{name}_qwen3_moe_tiny", settings={"model.random_init": "false"})


def distillation(placement: str, **settings: Any) -> Loop:
    """Returns GKD with its teacher somewhere, on responses of the student's own and on the data's."""
    apart = placement != "workers"
    own = {"teacher.placement": placement, "algorithm.top_k": 16} if apart else {}
    return Loop(config="gkd_qwen3_moe_tiny", settings=SAMPLED | own | settings, samples=True, needs=1 + apart)


LOOPS = {
    "grpo": Loop(config="grpo_qwen3_moe", settings=ADVANTAGES, samples=True),
    "ppo": Loop(config="grpo_qwen3_moe", settings={"algorithm": "ppo"} | ADVANTAGES, samples=True),
    "gkd_teacher_in_ranks": distillation("workers"),
    "gkd_teacher_in_ranks_of_its_own": distillation("own"),
    "gkd_teacher_behind_engines": distillation("engine", **{"teacher.engine.name": "transformers"}),
} | {
    name: offline(name)
    for name in ("reward_model", "dpo", "kto", "embedding", "reranker", "classification", "sft", "pretrain")
}


def both(name: str, folder: Path, *, teacher: Path, device: str = "cuda") -> tuple[Path, Path]:
    """Returns the outputs of a loop's run on the CPU and of the same one on the other device."""
    loop = LOOPS[name]
    settings = SHORT | ({} if loop.samples else {"data.cache_folder": folder / "cache"}) | loop.settings
    if "gkd" in name:
        settings["teacher.path"] = teacher
    recorded = {"rollout.record": "true"} if loop.samples else {}
    ours = run(folder / "cpu", settings | recorded | {"cluster": "cpu"}, config=loop.config, environment=NO_GPU)
    replayed = {"rollout.replay": ours} if loop.samples else {}
    theirs = run(
        folder / device,
        settings | replayed | {"cluster": device},
        config=loop.config,
        environment=EXACT_FLOAT32,
    )
    return ours, theirs


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[tuple[Path, Path]]]]:
    """The outputs of each selected loop that there are GPUs for. They begin when the first is asked for."""
    selected = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
    possible = [name for name in selected if LOOPS[name].needs <= torch.cuda.device_count()]
    folder = tmp_path_factory.mktemp("loops")
    # Here, as transformers does not import its parts in several threads at once.
    teacher = checkpoint("dense", folder / "teacher")
    pool = ThreadPoolExecutor(AT_ONCE)
    yield {name: pool.submit(both, name, folder / name, teacher=teacher) for name in possible}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", LOOPS)
def test_losses_on_a_gpu_are_those_of_the_cpu(name: str, runs: dict[str, Future[tuple[Path, Path]]]) -> None:
    if torch.cuda.device_count() < LOOPS[name].needs:
        pytest.skip(f"needs {LOOPS[name].needs} GPUs")
    compare(*(metrics(folder) for folder in runs[name].result()), learns=LOOPS[name].learns)


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, learns: tuple[str, ...]) -> None:
    """Compares the losses and the gradients' norms of two runs, at every step and evaluation.

    Args:
        learns: roles of which there must be losses.
    """
    losses = values(ours, ("/loss", "/nll_nats", "/divergence_nats"))
    assert values(theirs, ("/loss", "/nll_nats", "/divergence_nats")) == pytest.approx(losses, abs=MOST, rel=0)
    norms = values(ours, ("/grad_norm",))
    assert values(theirs, ("/grad_norm",)) == pytest.approx(norms, rel=OF_GRADIENTS)
    for role in learns:
        # Weights moved, so that what follows the first step shows the optimizer too.
        steps = range(1, STEPS + 1)
        assert all(norms[step, f"{role}/grad_norm"] > 0 for step in steps)
        assert len({losses[step, f"{role}/loss"] for step in steps}) == STEPS


def values(written: list[dict[str, Any]], ends: tuple[str, ...]) -> dict[tuple[int, str], float]:
    """Returns the metrics whose names end so, by step and name."""
    return {(line["step"], key): line[key] for line in written for key in line if key.endswith(ends)}
