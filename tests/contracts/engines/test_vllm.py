"""What only vLLM has: tensors that it repacks, and engines of several ranks on a CPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlframe.types.rollout import SamplingParams
from rlframe.utils.calls import RankCall
from rlframe.weight_sync.border import DestinationRank
from tests.contracts.engines.kinds import Kind, param
from tests.contracts.engines.trainer import CLOSE, Case, make, nats, perturbed, synced, transformers_model
from tests.rollout_models import make_requests

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("running", [param("vllm")], indirect=True)
def test_a_packed_engine_says_which_tensor_keeps_it_from_direct_copies(case: Case):
    (info,) = case.engine.on_ranks([RankCall.of(DestinationRank.describe)])
    assert info.layout is None and info.can_reload
    assert info.refusal.startswith("keeps model.layers.0.self_attn.qkv_proj.weight repacked by vLLM")
    assert case.sync.choice.reloads


@pytest.mark.parametrize("running", [param("vllm")], indirect=True)
def test_sleeping_loses_nothing_on_the_cpu(case: Case):
    case.engine.sleep()
    case.engine.wake_weights()
    case.engine.wake()
    assert not case.engine.weights_lost


@pytest.mark.parametrize("kind", [param("vllm")])
def test_a_dense_model_gets_the_weights_by_a_reload(kind: Kind, tmp_path: Path):
    """vLLM packs other tensors of it."""
    folder = make("qwen3", tmp_path)
    engine = kind.start(folder)
    weights = load_file(folder / "model.safetensors")
    trainer, _, sync = synced(engine, weights)
    assert sync.choice.reloads
    new = perturbed(weights, seed=5)
    trainer.train(new)
    sync.publish(version=1)
    model = transformers_model(folder, new)
    requests = make_requests(3, sampling=SamplingParams(temperature=0.8, max_tokens=12))
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        expected = nats(model, request, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    engine.close()


@pytest.mark.parametrize("kind", [param("vllm")])
def test_every_rank_of_a_tensor_parallel_engine_gets_the_weights(kind: Kind, folder: Path):
    engine = kind.start(folder, tp=2)
    weights = load_file(folder / "model.safetensors")
    trainer, _, sync = synced(engine, weights)
    new = perturbed(weights, seed=4)
    trainer.train(new)
    sync.publish(version=1)
    model = transformers_model(folder, new)
    requests = make_requests(3, sampling=SamplingParams(temperature=0.8, max_tokens=12))
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        expected = nats(model, request, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
    engine.close()
