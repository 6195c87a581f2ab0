"""Every engine of rlframe/rollout: its place in the config, its tokens, its logprobs, its weights."""

import importlib.util
import inspect
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlframe.rollout.base import RolloutEngine
from rlframe.rollout.config import RolloutConfig
from rlframe.types.rollout import FinishReason, SamplingParams
from rlframe.utils.errors import WeightSyncFailed
from rlframe.utils.registry import find, names
from rlframe.weight_sync.digest import digest
from rlframe.weight_sync.layout import load_tensor
from tests.rollout_models import make_requests, make_with_tokenizer

ENGINES = names("rlframe.rollout")
CONFIGS = Path(__file__).parents[2] / "configs" / "rollout"
FORCED = SamplingParams(max_tokens=8, min_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture-of-experts model with a tokenizer."""
    return make_with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, folder: Path):
    """A running engine, its weights verified as version 3."""
    if request.param != "transformers" and importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    component, config = find("rlframe.rollout", request.param, key="rollout.name")
    running = component(config(name=request.param), folder=folder, dtype=torch.float32, device="cpu")
    running.weights.begin(3)
    running.weights.commit(3)
    yield running
    running.close()


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_one_file_and_one_yaml(name: str):
    component, config = find("rlframe.rollout", name, key="rollout.name")
    assert issubclass(component, RolloutEngine) and not inspect.isabstract(component)
    assert issubclass(config, RolloutConfig)
    assert f"name: {name}" in (CONFIGS / f"{name}.yaml").read_text()
    # Every value has its default in the dataclass.
    assert config(name=name).max_tokens == next(field.default for field in fields(config) if field.name == "max_tokens")


def test_completions_come_in_order_with_logprobs_of_the_sampling_distribution(engine: RolloutEngine, folder: Path):
    sampling = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=8, min_tokens=8)
    requests = make_requests(7, group_size=2, sampling=sampling)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        tokens = torch.tensor([[*request.token_ids, *completion.token_ids]])
        with torch.no_grad():
            logprobs = (model(tokens).logits[0] / 0.8).log_softmax(-1)
        first = len(request.token_ids)
        expected = logprobs[first - 1 : -1].gather(1, tokens[0, first:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
        assert completion.version == 3
        assert completion.finish_reason is FinishReason.LENGTH


def test_seeds_repeat_and_differ(engine: RolloutEngine):
    requests = make_requests(5, group_size=4, sampling=FORCED)
    first = [completion.token_ids for completion in engine.generate(requests)]
    assert [completion.token_ids for completion in engine.generate(requests)] == first
    assert len({tuple(tokens) for tokens in first}) > 15


def test_the_layout_finds_every_tensor_of_the_checkpoint_in_the_engine(engine: RolloutEngine, folder: Path):
    layout = engine.weights.layout
    disk = load_file(folder / "model.safetensors")
    memory = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in layout.parameters.items()}
    for name, value in disk.items():
        load_tensor(layout, memory, name, value)
    assert engine.weights.digests() == digest(layout, memory)


def test_unverified_weights_are_not_sampled(engine: RolloutEngine):
    engine.weights.begin(4)
    with pytest.raises(WeightSyncFailed):
        engine.generate(make_requests(1, sampling=FORCED))
    engine.weights.begin(3)
    engine.weights.commit(3)


def test_sleep_and_wake_change_no_result(engine: RolloutEngine):
    requests = make_requests(4, sampling=FORCED)
    before = engine.generate(requests)
    engine.sleep()
    engine.wake()
    assert engine.generate(requests) == before
