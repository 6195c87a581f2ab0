"""vLLM with matrices in FP8 blocks, on a CPU: its kernels there need AMX, and leave activations in bfloat16."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlframe.megatron.memory.quantized import QuantizedWeights
from rlframe.models.quantized.blocks import MATRICES, EngineFormat
from rlframe.models.quantized.fp8 import Fp8
from rlframe.rollout.base.config import CacheFormat
from rlframe.rollout.vllm.config import has_tiles
from rlframe.types.input import ModelInput
from rlframe.types.rollout import SamplingParams
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.channel import WeightSource, WeightSync
from tests.contracts.engines.kinds import KINDS, param
from tests.contracts.engines.trainer import OneEngine, Trainer, nats, perturbed, transformers_model
from tests.rollout_models import make_requests, make_with_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.skipif(not has_tiles(), reason="this CPU has no AMX")]
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
SEQUENCES = [ModelInput(tuple(range(5, 5 + length))) for length in (3, 17, 40)]
ROUNDING_NATS = 0.06
"""Mean difference of what vLLM computes in bfloat16 from float32, with the same weights. Quantisation moves it by
0.3."""


@dataclass
class Case:
    """An engine with its trainer, both at the checkpoint's weights, which are version 0."""

    engine: Any
    folder: Path
    trainer: Trainer
    quantized: QuantizedWeights
    sync: WeightSync

    def train_to(self, weights: dict[str, Tensor]) -> None:
        """Take on other values, and quantise them."""
        self.trainer.train(weights)
        self.quantized.update()


def started(folder: Path, engine_format: EngineFormat, **settings: Any) -> Case:
    """An engine whose weights are proved without a transfer."""
    engine = KINDS["vllm"].start(folder, dtype=torch.bfloat16, quantization=engine_format, **settings)
    trainer = Trainer(load_file(folder / "model.safetensors"))
    quantized = QuantizedWeights(trainer.source.layout, trainer.parameters, engine_format)
    trainer.source = WeightSource(quantized.layout, quantized.parameters)
    sync = WeightSync(trainer, OneEngine(engine))
    sync.connect()
    sync.calibrate(version=0)
    return Case(engine, folder, trainer, quantized, sync)


def make(folder: Path) -> Path:
    make_with_tokenizer("qwen3", folder, **WIDE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return folder


@pytest.fixture(scope="module", params=[param("vllm")])
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = started(make(tmp_path_factory.mktemp("fp8")), EngineFormat.FP8_BLOCK)
    yield case
    case.engine.close()


def dequantised(weights: dict[str, Tensor], **options: bool) -> dict[str, Tensor]:
    """What the values and scales of the weights stand for."""
    fp8 = Fp8((128, 128))
    return {
        name: fp8.dequantize(fp8.quantize(value.bfloat16(), **options), torch.float32)
        if name.endswith(MATRICES)
        else value
        for name, value in weights.items()
    }


def gap(case: Case, weights: dict[str, Tensor]) -> float:
    """Mean difference of the engine's logprobs from those of transformers with `weights`, in nats."""
    model = transformers_model(case.folder, weights)
    requests = make_requests(4, sampling=SamplingParams(max_tokens=24, min_tokens=24))
    found = []
    for request, completion in zip(requests, case.engine.generate(requests), strict=True):
        expected = nats(model, request, completion.token_ids.tolist())
        found.append((torch.tensor(completion.logprobs) - expected).abs())
    return torch.cat(found).mean().item()


def test_an_engine_samples_with_the_quantisation_of_what_the_trainer_holds(case: Case) -> None:
    new = perturbed(load_file(case.folder / "model.safetensors"), seed=4)
    case.train_to(new)
    report = case.sync.publish(version=1)
    assert not case.sync.choice.reloads
    assert report.num_bytes < 0.6 * sum(2 * value.numel() for value in new.values())
    case.sync.audit()
    assert gap(case, dequantised(new)) < ROUNDING_NATS < gap(case, new)


def test_a_changed_bit_of_an_engine_is_noticed_by_the_audit_and_mended_by_the_next_sync(case: Case) -> None:
    case.sync.publish(version=2)
    case.engine.on_ranks([RankCall.of(DestinationRank.disturb)])
    with pytest.raises(WeightSyncFailed, match="has changed in the memory of destination rank 0"):
        case.sync.audit()
    case.sync.publish(version=3)
    case.sync.audit()


def test_a_synced_engine_scores_as_one_that_has_loaded_the_weights(case: Case, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    new = perturbed(load_file(case.folder / "model.safetensors"), seed=5)
    case.train_to(new)
    case.sync.publish(version=4)
    synced = [case.engine.score([each]) for each in SEQUENCES]
    save_file(new, make(tmp_path) / "model.safetensors")
    fresh = started(tmp_path, EngineFormat.FP8_BLOCK)
    # One at a time: the kernel rounds otherwise in other batches, and those depend on when requests arrive.
    assert [fresh.engine.score([each]) for each in SEQUENCES] == synced
    fresh.engine.close()


@pytest.mark.parametrize("kind", [param("vllm")])
def test_powers_of_two_and_an_8_bit_cache_are_proved_and_sample_as_they_should(kind: Any, tmp_path: Path) -> None:
    case = started(make(tmp_path), EngineFormat.FP8_BLOCK_POWERS_OF_2, kv_cache_dtype=CacheFormat.FP8)
    new = perturbed(load_file(tmp_path / "model.safetensors"), seed=6)
    case.train_to(new)
    case.sync.publish(version=1)
    assert gap(case, dequantised(new, powers_of_2=True)) < 3 * ROUNDING_NATS
    assert case.engine._engine.vllm_config.cache_config.cache_dtype == "fp8"
    case.engine.close()
