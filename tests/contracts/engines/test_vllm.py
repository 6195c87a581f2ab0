"""What only vLLM has: tensors that it repacks, and engines of several ranks on a CPU."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlframe.rollout.vllm import launch
from rlframe.rollout.vllm.line import CALL, TAKE, Line
from rlframe.types.rollout import SamplingParams
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import EngineDied
from rlframe.weight_sync.border import DestinationRank
from tests.contracts.engines.kinds import Kind, param
from tests.contracts.engines.trainer import (
    CLOSE,
    Case,
    experts,
    make,
    nats,
    perturbed,
    synced,
    transformers_model,
)
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


@pytest.mark.parametrize("running", [param("vllm")], indirect=True)
def test_a_step_takes_as_many_tokens_of_prompts_as_in_vllms_own_batches(case: Case):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    tokens, _ = EngineArgs.get_batch_defaults(world_size=1)
    assert case.engine._engine.vllm_config.scheduler_config.max_num_batched_tokens == tokens[UsageContext.LLM_CLASS]


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
def test_a_worker_with_a_process_of_its_own_gets_the_weights_and_samples_the_same(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Without experts, whose routes are not asked for beside steps.
    folder = make("qwen3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    new = perturbed(weights, seed=5)
    requests = make_requests(2, group_size=2, sampling=SamplingParams(temperature=0.8, max_tokens=12))
    # Linear layers stay as loaded, so that weights are written into them and not reloaded.
    settings = launch.loader_settings
    monkeypatch.setattr(launch, "loader_settings", lambda *rest, **more: settings(*rest, **more) | {"as_loaded": True})
    found, asked, ask = [], [], Line.ask
    monkeypatch.setattr(Line, "ask", lambda line, what, message: asked.append(what) or ask(line, what, message))
    for apart in (False, True):
        engine = kind.start(folder, worker_process=apart)
        assert len(engine._lines) == apart
        trainer, _, sync = synced(engine, weights)
        assert not sync.choice.reloads
        trainer.train(new)
        sync.publish(version=1)
        found.append(engine.generate(requests))
        engine.close()
    for one, other in zip(*found, strict=True):
        # torch's own products round by the number of rows, and requests arrive in other steps.
        assert one.token_ids.tolist() == other.token_ids.tolist()
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), **CLOSE)
    # The weights came beside vLLM's own calls, as the logprobs did.
    assert asked.count(CALL) == 1 and asked.count(TAKE) >= 1


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


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [param("vllm")])
def test_a_worker_that_dies_before_a_sync_reaches_it_is_a_death_of_the_engine(kind: Kind, folder: Path):
    """Also while vLLM still ends the other worker, and is not dead by its own account."""
    before = set(psutil.Process().children(recursive=True))
    engine = kind.start(folder, tp=2)
    started = set(psutil.Process().children(recursive=True)) - before
    (worker,) = (each for each in started if "Worker_TP1" in " ".join(each.cmdline()))
    _, destination, sync = synced(engine, load_file(folder / "model.safetensors"))
    destination.after_pause = worker.kill
    with pytest.raises(EngineDied, match="died during"):
        sync.publish(version=1)
    assert not engine.is_alive()
    engine.close()


@pytest.mark.parametrize("running", [param("vllm")], indirect=True)
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.8, "top_p": 0.9}, {"top_k": 5, "min_tokens": 10}, {"temperature": 0.0}, {"stop": ("1", "e")}],
)
def test_the_record_has_vllms_own_logprobs_bit_for_bit(case: Case, settings: dict[str, Any]):
    """The batches are of more requests than run at once, whose responses end at different tokens."""
    requests = make_requests(16, group_size=4, sampling=SamplingParams(max_tokens=24, **settings))
    recorded = case.engine.generate(requests)
    fetcher, case.engine._fetcher = case.engine._fetcher, None
    own = case.engine.generate(requests)
    case.engine._fetcher = fetcher
    # Experts come with the record alone.
    assert [replace(each, routes=None) for each in recorded] == own
    assert len({len(each.token_ids) for each in own}) > 1 or "min_tokens" in settings


@pytest.mark.parametrize("kind", [param("vllm")])
def test_requests_that_vllm_preempts_have_the_logprobs_and_experts_of_their_tokens(kind: Kind, folder: Path):
    """The cache has room for half of what they need. Some have spelled a stop string when vLLM preempts them."""
    engine = kind.start(folder, max_model_len=256, engine_options={"block_size": 32, "num_gpu_blocks_override": 20})
    engine.gate.commit(3)
    model = transformers_model(folder, load_file(folder / "model.safetensors"))
    batches = [make_requests(12, sampling=SamplingParams(max_tokens=100, min_tokens=100))]
    for least in (47, 48, 49, 50):
        sampling = SamplingParams(max_tokens=100, min_tokens=least, stop=("1", "e"))
        batches.append(make_requests(24, sampling=sampling))
    done = [engine.generate(batch) for batch in batches]
    for request, completion in zip(itertools.chain(*batches), itertools.chain(*done), strict=True):
        expected = nats(model, request, completion.token_ids.tolist())
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)
        assert completion.routes is not None
        told = torch.from_numpy(completion.routes).long().sort(-1).values
        assert torch.equal(told, experts(model, request, completion.token_ids.tolist()))
    engine.close()


@pytest.mark.parametrize("kind", [param("vllm")])
def test_a_class_that_draws_lengths_draws_those_of_both_calls(kind: Kind, folder: Path, tmp_path: Path):
    """Calls of one request come by `generate`, of several by `generate_each`."""
    place = Path(__file__).parents[3] / "examples/benchmarks/async_rl_engine.py"
    drawing = replace(kind, name=f"{place}:LengthsVllm")
    engine = drawing.start(folder, mean_tokens=10.0, sigma=0.5, running_log=str(tmp_path))
    engine.gate.commit(0)
    requests = make_requests(8, sampling=SamplingParams(max_tokens=40))
    lengths = [len(each.token_ids) for each in engine.generate(requests)]
    again = dict(itertools.chain.from_iterable(engine.generate_each(requests)))
    engine.close()
    assert len(set(lengths)) > 4 and max(lengths) < 40
    assert len({len(each.token_ids) for each in again.values()}) > 4
    (log,) = tmp_path.glob("*.jsonl")
    running = [json.loads(line)["running"] for line in log.read_text().splitlines()]
    assert max(running) == 8 and running[-1] == 0 and len(running) > 4
