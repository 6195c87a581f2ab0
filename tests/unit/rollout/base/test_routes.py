"""Routed experts: what engines say becomes rows of the layers with experts, or an error; and the embedded engine's."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlframe.models.hub import load_family, read_config
from rlframe.rollout.base.routes import Routers
from rlframe.rollout.sglang.config import SglangConfig
from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine
from rlframe.rollout.vllm.config import MoeBackend, VllmConfig
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Rollout, SamplingParams
from rlframe.utils.errors import RlframeError
from tests.rollout_models import make_requests, make_with_tokenizer

ROUTERS = Routers(num_layers=3, layers=(1, 2), experts_per_token=2, num_experts=4)


def test_rows_are_of_the_layers_with_experts_in_one_byte_each():
    # Two tokens, three layers of which the first is dense and has what was there before.
    found = np.array([[[9, 9], [0, 1], [3, 2]], [[9, 9], [2, 0], [1, 3]]], dtype=np.int32)
    routes = ROUTERS.routes(found.reshape(-1), num_tokens=3, engine="it")
    assert routes.dtype == np.uint8 and routes.tolist() == [[[0, 1], [3, 2]], [[2, 0], [1, 3]]]
    assert Routers(num_layers=1, layers=(0,), experts_per_token=1, num_experts=256).dtype is np.uint8
    assert Routers(num_layers=1, layers=(0,), experts_per_token=1, num_experts=257).dtype is np.int16


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"it must return routed experts of shape \(2, 3, 2\) for 2 tokens, got nothing"),
        (np.zeros(6, dtype=np.int32), r"shape \(2, 3, 2\) for 2 tokens, got 6 numbers"),
        (np.zeros(12, dtype=np.int32), r"it returned \[0, 0\] as the experts of one token"),
        (np.tile([4, 1], 6), r"returned \[4, 1\] as the experts of one token"),
    ],
)
def test_what_cannot_be_routes_is_an_error(found: np.ndarray | None, message: str):
    with pytest.raises(RlframeError, match=message):
        ROUTERS.routes(found, num_tokens=3, engine="it")


def start(folder: Path) -> TransformersEngine:
    config = TransformersConfig(max_batch=3)
    engine = TransformersEngine(config, folder=folder, dtype=torch.float32, device="cpu", with_routes=True)
    engine.gate.commit(0)
    return engine


def chosen(folder: Path, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), layers, k] in rising order, what the routers of transformers say."""
    found: list[torch.Tensor] = []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(lambda module, arguments, output: found.append(output[2]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return torch.stack(found, dim=1).sort(-1).values


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "mixtral"])
def test_the_embedded_engine_tells_them_of_every_family(name: str, tmp_path: Path):
    """More requests than slots, of different lengths, so that slots are refilled and moved."""
    folder = make_with_tokenizer(name, tmp_path)
    architecture = load_family(folder).architecture(read_config(folder))
    requests = make_requests(4, group_size=2, sampling=SamplingParams(max_tokens=12))
    completions = start(folder).generate(requests)
    assert len({len(each.token_ids.tolist()) for each in completions}) > 1
    for request, completion in zip(requests, completions, strict=True):
        expected = chosen(folder, [*request.input.token_ids.tolist(), *completion.token_ids[:-1].tolist()])
        assert expected.shape[1:] == (sum(architecture.moe_layers), architecture.experts_per_token)
        assert torch.equal(torch.from_numpy(completion.routes).long().sort(-1).values, expected)


def test_the_experts_of_given_tokens_are_those_with_which_they_were_sampled(tmp_path: Path):
    engine = start(make_with_tokenizer("qwen3_moe", tmp_path))
    requests = make_requests(3, sampling=SamplingParams(max_tokens=12))
    completions = engine.generate(requests)
    sequences = [ask.input.then(got.token_ids) for ask, got in zip(requests, completions, strict=True)]
    scored = engine.score_with_routes(sequences)
    assert [each.logprobs for each in scored] == engine.score(sequences)
    for sequence, given, sampled in zip(sequences, scored, completions, strict=True):
        assert given.routes is not None and sampled.routes is not None
        assert len(given.routes) == len(sequence) - 1
        # Sets: how far rounding orders equal choices differs between one token and many.
        assert np.array_equal(np.sort(given.routes, -1), np.sort(sampled.routes, -1))


def test_sequences_that_are_scored_meanwhile_leave_a_response_its_experts(tmp_path: Path):
    engine = start(make_with_tokenizer("qwen3_moe", tmp_path))
    requests = make_requests(3, sampling=SamplingParams(max_tokens=12))
    alone = engine.generate(requests)
    sequences = [request.input.then(np.arange(5, 25)) for request in requests[:2]]
    scored = engine.score_with_routes(sequences)
    main, meanwhile = threading.current_thread(), []

    def score(*arguments: object) -> None:
        # Between a forward pass of the decode loop and what it reads of it.
        if threading.current_thread() is main:
            scoring = threading.Thread(target=lambda: meanwhile.append(engine.score_with_routes(sequences)))
            scoring.start()
            scoring.join()

    engine.model.register_forward_hook(score)
    for once, again in zip(alone, engine.generate(requests), strict=True):
        assert np.array_equal(once.routes, again.routes) and once.token_ids.tolist() == again.token_ids.tolist()
    for one, other in zip(meanwhile[-1], scored, strict=True):
        assert np.array_equal(one.routes, other.routes)


def test_tokens_before_a_sync_within_the_response_keep_what_they_were_sampled_with(tmp_path: Path):
    folder = make_with_tokenizer("qwen3_moe", tmp_path / "old")
    engine = start(folder)
    (request,) = make_requests(1, sampling=SamplingParams(max_tokens=16, min_tokens=16))
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    changed = {name: value + 0.2 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}
    new = make_with_tokenizer("qwen3_moe", tmp_path / "new")
    save_file(changed, new / "model.safetensors", metadata={"format": "pt"})
    steps = []

    def sync() -> None:
        engine.gate.begin(1)
        engine.pause()
        engine.model.load_state_dict(AutoModelForCausalLM.from_pretrained(new).state_dict())
        engine.resume()
        engine.gate.commit(1)

    syncing = threading.Thread(target=sync)

    def count(*arguments: object) -> None:
        steps.append(1)
        if len(steps) == 10:
            # Between the tenth forward pass, counting the prompt's, and the next: ten tokens of P - 1 + 10 are there.
            syncing.start()
            while not engine._control.wanted:
                pass

    engine.model.register_forward_hook(count)
    (completion,) = engine.generate([request])
    syncing.join(10)
    split = completion.spans[0].end
    assert [each.version for each in completion.spans] == [0, 1] and 0 < split < 16
    tokens, first = (
        [*request.input.token_ids.tolist(), *completion.token_ids[:-1].tolist()],
        len(request.input) + split - 1,
    )
    told = torch.from_numpy(completion.routes).long().sort(-1).values
    old_rows, new_rows = chosen(folder, tokens), chosen(new, tokens)
    assert torch.equal(told[:first], old_rows[:first]) and torch.equal(told[first:], new_rows[first:])
    assert not torch.equal(old_rows[:first], new_rows[:first])


def test_an_abort_before_the_first_token_says_nothing_of_the_prompt(tmp_path: Path):
    """Four requests for three slots, all aborted after the first token: the last one waits."""
    engine = start(make_with_tokenizer("qwen3_moe", tmp_path))
    requests = make_requests(4, sampling=SamplingParams(max_tokens=8, min_tokens=8))
    whole = engine.generate(requests)
    hook = engine.model.register_forward_hook(lambda *arguments: engine.abort())
    begun = engine.generate(requests)
    hook.remove()
    assert sorted(len(each.token_ids) for each in begun) == [0, 1, 1, 1]
    for request, before, expected in zip(requests, begun, whole, strict=True):
        rollout = Rollout.begin(Prompt(id="a", text="", input=request.input), 0)
        rollout.append(before)
        (rest,) = engine.generate([replace(request, input=rollout.input, first_position=len(before.token_ids))])
        rollout.append(rest)
        assert rollout.routes is not None and expected.routes is not None
        assert np.array_equal(np.sort(rollout.routes, -1), np.sort(expected.routes, -1))


def test_engines_that_cannot_tell_say_why():
    assert list(TransformersConfig(stop=["x"]).route_faults(cuda=False)) == []
    assert list(SglangConfig().route_faults(cuda=False)) == list(VllmConfig().route_faults(cuda=True)) == []
    (fault,) = map(str, SglangConfig(stop=["x"]).route_faults(cuda=True))
    assert fault.startswith("rollout.stop must be empty if rollout.name=sglang is to return routed experts")
    (fault,) = map(str, SglangConfig(engine_options={"enable_hierarchical_cache": True}).route_faults(cuda=True))
    assert fault.startswith(
        "rollout.engine_options.enable_hierarchical_cache must not be set if rollout.name=sglang is to"
    )
    assert list(VllmConfig(stop=["x"]).route_faults(cuda=False)) == []
    (fault,) = map(str, VllmConfig(moe_backend=MoeBackend.AUTO).route_faults(cuda=True))
    assert fault.startswith("rollout.moe_backend must be triton") and fault.endswith("got auto")
