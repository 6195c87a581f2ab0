"""A pass that warms a rank up is seen in nothing that a run computes."""

import pathlib
from typing import Any

import pytest
import torch

from rlframe.megatron.config.lora import LoraConfig
from rlframe.megatron.config.options import CommunicationConfig, Fp8Config, Fp8Recipe, MoeConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.hub import load_family, read_config
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.training.test_training_options import mine, shutdown, start, two_steps
from tests.tiny_models import make

ROUTED = MoeConfig(bias_update_rate=0.01, aux_loss_coefficient=0.3, z_loss_coefficient=0.2, router_replay=True)
CASES: dict[str, dict[str, Any]] = {
    "experts": {"parallel": "d2e2", "moe": ROUTED},
    "stages": {"parallel": Parallel(pp=2, pipeline_layout="E|t|t|L"), "moe": ROUTED},
    "sleeping": {"parallel": "d2", "share_prompts": True, "offload_optimizer": True},
    "adapters": {"parallel": "d2", "lora": LoraConfig(rank=4, dropout=0.5), "max_tokens_per_microbatch": 12},
    "overlap": {
        "parallel": "d2",
        "epochs_per_batch": 2,
        "communication": CommunicationConfig(overlap_grad_reduce=True, overlap_param_gather=True),
    },
}


def on_rank(rank: int, init_method: str, folder: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the metrics and weights after two optimizer steps of each case, without and with the pass."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, options in CASES.items():
        for warm in (False, True):
            trainer = start(rank, f"{init_method}{name}{warm}", folder, **options)
            if warm:
                trainer.warm_up()
                buffers = [buffer for chunk in trainer.model.chunks for buffer in chunk.buffers]
                assert max(float(each.grad_data.norm()) for each in buffers) > 0, "the pass goes backward too"
            found.setdefault(name, []).append(two_steps(trainer, mine(trainer)))
            shutdown()
    return found


@pytest.mark.thorough
def test_nothing_that_a_run_computes_shows_it(tmp_path: pathlib.Path) -> None:
    make("glm4_moe", tmp_path)
    for rank in run_distributed(on_rank, 2, str(tmp_path)):
        for name, (without, warmed) in rank.items():
            assert without["metrics"] == warmed["metrics"], name
            for tensor, pieces in without["weights"].items():
                for piece, other in zip(pieces, warmed["weights"][tensor], strict=True):
                    assert torch.equal(piece[1], other[1]), f"{name}: {tensor}"


def answers(rank: int, init_method: str, folders: list[str]) -> dict[tuple[str, Fp8Recipe], bool]:
    """Returns whether a pass leaves no trace, by model and scales of FP8."""
    from rlframe.megatron.worker.warm_up import leaves_no_trace  # noqa: PLC0415 - it imports Megatron

    found = {}
    for path in map(pathlib.Path, folders):
        architecture = load_family(path).architecture(read_config(path))
        for recipe in Fp8Recipe:
            found[path.name, recipe] = leaves_no_trace(architecture, TrainConfig(fp8=Fp8Config(recipe=recipe)))
    return found


def test_models_in_which_a_pass_would_show_are_left_alone(tmp_path: pathlib.Path) -> None:
    for family in ("qwen3", "qwen3_5"):
        make(family, tmp_path / family)
    (found,) = run_distributed(answers, 1, [str(tmp_path / family) for family in ("qwen3", "qwen3_5")])
    assert {key for key, leaves_none in found.items() if leaves_none} == {
        ("qwen3", recipe) for recipe in Fp8Recipe if recipe is not Fp8Recipe.DELAYED
    }
