"""Preflight's rows of activations beside the bytes that autograd keeps of real Megatron models."""

import json
import pathlib
import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlframe.megatron.config.options import Recompute, RecomputeConfig, RecomputeMethod
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.config import ModelConfig
from rlframe.models.families.qwen3 import FAMILY as QWEN3
from rlframe.models.families.qwen3_5_text import FAMILY as QWEN35
from rlframe.models.families.qwen3_moe import FAMILY as QWEN3_MOE
from rlframe.run.preflight import activations
from rlframe.run.preflight.weights import LayerKind
from rlframe.types.batch import Sequences
from tests.multiprocess.distributed import run_distributed

LENGTHS = [128, 64, 64]
"""Powers of two, so that the grids of the local attention have no padding."""
SHARED = [0, 32, 32]
"""Tokens of each sequence that are the first one's too, in the cases that share them."""
BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
}
DENSE = BASE | {"model_type": "qwen3"}
MOE = BASE | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


STATES = BASE | {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def full(method: RecomputeMethod, layers: int) -> dict[str, Any]:
    """Whole layers are recomputed."""
    return {"recompute": Recompute.FULL, "recompute_options": RecomputeConfig(method=method, layers=layers)}


def selective(module: str) -> dict[str, Any]:
    """One module of every layer is recomputed."""
    return {"recompute": Recompute.SELECTIVE, "recompute_options": RecomputeConfig(modules=[module])}


CASES = {
    "none": {},
    "uniform": full(RecomputeMethod.UNIFORM, 2),
    "block": full(RecomputeMethod.BLOCK, 1),
    "core attention": selective("core_attn"),
}


SHARING: dict[str, Any] = {"share_prompts": True}


def saved_bytes(rank: int, init_method: str, hf: dict[str, Any], options: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Bytes of the tensors that one forward pass keeps, parameters apart, for each case."""
    from rlframe.cluster.config import Device
    from rlframe.megatron.cpu import platform
    from rlframe.megatron.worker import environment

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.messages.setup import TrainerSetup
    from rlframe.megatron.model import forward
    from rlframe.megatron.packed.inputs import PackedInputs
    from rlframe.megatron.worker import parallel
    from rlframe.megatron.worker.trainer import Trainer

    folder = pathlib.Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(hf))
    total = sum(LENGTHS)
    batch = Sequences(
        token_ids=torch.arange(total) % hf["vocab_size"],
        lengths=torch.tensor(LENGTHS),
        loss_mask=torch.ones(total, dtype=torch.bool),
    )
    found = {}
    for name, changes in options.items():
        train = TrainConfig(dtype="float32", **changes)
        environment.prepare(train)
        trainer = Trainer(
            TrainerSetup(
                rank=rank, init_method=f"{init_method}{name}", device=device, train=train, seed=0,
                model=ModelConfig(path=str(folder), random_init=True), temperature=1.0, total_optimizer_steps=1,
                timeout_s=60, with_reference=False,
            )
        )  # fmt: skip
        own = {each.untyped_storage().data_ptr() for each in trainer.model.parameters.values()}
        storages: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor, own: set[int] = own, storages: dict = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                # Held here, so that no other tensor gets the same address.
                storages[storage.data_ptr()] = storage
            return tensor

        own_batch = replace(batch, shared=torch.tensor(SHARED)) if train.share_prompts else batch
        forward.set_training(trainer.model, True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            forward.module_output(trainer.model.chunks[0], PackedInputs.of(own_batch, 1))
        found[name] = sum(storage.nbytes() for storage in storages.values())
        parallel.shutdown()
    return found


def predicted(hf: dict[str, Any], options: dict[str, Any]) -> float:
    """Preflight's bytes: the layers', and input and output of the last norm; besides token ids and rotary angles."""
    family = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "qwen3_5_text": QWEN35}[hf["model_type"]]
    architecture, train = family.architecture(hf), TrainConfig(dtype="float32", **options)
    tokens = sum(LENGTHS) - (sum(SHARED) if train.share_prompts else 0)
    chunks, keys = [tuple(range(architecture.num_layers))], sum(LENGTHS) / tokens
    kept = activations.of_stage(architecture, train, chunks, tokens=tokens, cuda=False, keys_per_token=keys).kept
    once = 8 * tokens + 4 * max(LENGTHS) * architecture.head_dim
    return kept + 2 * 4 * architecture.hidden_size * tokens + once


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hf", "module"), [(DENSE, "mlp"), (MOE, "moe"), (STATES, "mlp")], ids=["dense", "experts", "states"]
)
def test_activations_are_those_that_autograd_keeps(hf: dict[str, Any], module: str) -> None:
    cases = CASES | {module: selective(module)}
    (real,) = run_distributed(saved_bytes, 1, hf, cases)
    ratios = {name: predicted(hf, options) / real[name] for name, options in cases.items()}
    # What is left out: maps of tokens, scales of norms.
    assert ratios == pytest.approx(dict.fromkeys(cases, 1.0), abs=0.03), ratios


@pytest.mark.thorough
def test_shared_keys_are_kept_for_each_sequence_that_reads_them() -> None:
    cases = {"none": SHARING, "core attention": SHARING | selective("core_attn")}
    (real,) = run_distributed(saved_bytes, 1, DENSE, cases)
    ratios = {name: predicted(DENSE, options) / real[name] for name, options in cases.items()}
    assert ratios == pytest.approx(dict.fromkeys(cases, 1.0), abs=0.03), ratios


def test_a_layer_that_is_recomputed_keeps_its_input_only() -> None:
    architecture = QWEN3.architecture(DENSE)
    train = TrainConfig(dtype="float32", **full(RecomputeMethod.UNIFORM, 1))
    found = activations.of_stage(architecture, train, [(0, 1, 2, 3)], tokens=10, cuda=False)
    assert found.kept == 4 * 10 * 64 * 4
    kernels = activations.Kernels.of(train, cuda=False)
    whole = activations.layer(architecture, kernels, Parallel(), LayerKind(sparse=False))
    assert found.working == 10 * sum(each.bytes for each in whole)
