from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine, load_weights, weights_of
from rlframe.types.input import ModelInput
from rlframe.types.rollout import FinishReason, GenerationRequest, SamplingParams
from rlframe.utils.errors import CheckpointError, ConfigError, WeightSyncFailed
from rlframe.weight_sync.layout.memory import load_tensor
from rlframe.weight_sync.proof.digest import digest
from tests.rollout_models import EOS, WORDS, make_requests, make_with_tokenizer
from tests.tiny_models import MODELS

pytestmark = pytest.mark.later

WINDOWED = ("gpt_oss", "mistral", "olmo3", "gemma3", "llama4", "exaone4", "phi3")
VARIANTS = (
    "deepseek_v3_yarn", "kimi_k2", "glm4_moe_lite", "minimax_m2", "deepseek_v32", "glm_moe_dsa", "qwen3_yarn",
    "qwen2_linear", "qwen3_5_moe",
)  # fmt: skip
SERVED = [name for name in MODELS if name not in (*VARIANTS, *WINDOWED)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
FORCED = SamplingParams(max_tokens=9, min_tokens=9)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    """By name of a tiny model, its folder, made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_with_tokenizer(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


def start(
    folder: Path, *, dtype: torch.dtype = torch.float32, float32_logits: bool = False, **settings
) -> TransformersEngine:
    """An engine whose weights count as verified at version 0."""
    engine = TransformersEngine(
        TransformersConfig(**settings), folder=folder, dtype=dtype, device="cpu", float32_logits=float32_logits
    )
    engine.gate.commit(0)
    return engine


def test_windows_and_sinks_are_refused(folder_of):
    for name in ("gpt_oss", "glm_moe_dsa"):
        with pytest.raises(ConfigError, match="has layers without full attention"):
            start(folder_of(name))


@pytest.mark.parametrize("name", SERVED)
def test_greedy_tokens_are_those_of_transformers(name: str, folder_of):
    requests = make_requests(11, sampling=GREEDY)
    model = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32)
    for request, completion in zip(requests, start(folder_of(name)).generate(requests), strict=True):
        expected = model.generate(
            torch.tensor([request.input.token_ids.tolist()]),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0, len(request.input) :].tolist()
        assert completion.token_ids.tolist() == expected


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_forward_pass_over_everything(name: str, temperature: float, folder_of):
    requests = make_requests(
        6, group_size=2, sampling=SamplingParams(temperature=temperature, top_p=0.9, max_tokens=12)
    )
    model = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32)
    for request, completion in zip(requests, start(folder_of(name)).generate(requests), strict=True):
        tokens = torch.tensor([[*request.input.token_ids.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = (model(tokens).logits[0] / temperature).log_softmax(-1)
        first = len(request.input)
        expected = logprobs[first - 1 : -1].gather(1, tokens[0, first:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_bfloat16_reads_the_cache_by_the_fused_kernel_and_stays_close(folder_of):
    # Dense, because a router may flip by rounding alone. bfloat16 keeps 8 bits: some hundredths of a nat.
    requests = make_requests(6, group_size=2, sampling=FORCED)
    engine = start(folder_of("qwen3"), dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder_of("qwen3"), dtype=torch.bfloat16)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        tokens = torch.tensor([[*request.input.token_ids.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0].float().log_softmax(-1)
        first = len(request.input)
        expected = logprobs[first - 1 : -1].gather(1, tokens[0, first:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=0.15, rtol=0)


@pytest.mark.parametrize("float32_logits", [True, False])
def test_float32_logits_are_products_of_the_states_that_nothing_rounds(float32_logits: bool, folder_of):
    engine = start(folder_of("qwen3_tied"), dtype=torch.bfloat16, float32_logits=float32_logits)
    head, seen = engine.model.get_output_embeddings(), []
    head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    (request,) = make_requests(1, sampling=FORCED)
    (completion,) = engine.generate([request])
    # The first pass is over the prompt but for its last token.
    states = torch.cat([each[0, -1:] for each in seen[1:]])
    assert states.dtype is torch.bfloat16
    logprobs = (states.double() @ head.weight.double().t()).log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(completion.token_ids).long()[:, None])[:, 0].float()
    worst = (torch.tensor(completion.logprobs) - expected).abs().max()
    assert worst < 1e-5 if float32_logits else worst > 1e-4


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_a_request_gives_the_same_tokens_alone_and_among_others_in_any_order(name: str, folder_of):
    engine = start(folder_of(name))
    requests = make_requests(25, group_size=2, sampling=SamplingParams(max_tokens=10))
    together = engine.generate(requests)
    backwards = engine.generate(requests[::-1])[::-1]
    alone = [engine.generate([request])[0] for request in requests]
    small_batches = start(folder_of(name), max_batch=7).generate(requests)
    for other in (backwards, alone, small_batches):
        assert [completion.token_ids.tolist() for completion in other] == [
            completion.token_ids.tolist() for completion in together
        ]
    # Nothing is proved if every seed led to the same tokens.
    assert together[0].token_ids.tolist() != together[1].token_ids.tolist()


def test_responses_of_very_different_lengths_keep_their_places(folder_of):
    # Budgets of 1 to 16 tokens over prompts of 1 to 20, six at a time: slots are freed, filled and moved many times.
    engine = start(folder_of("qwen3"), max_batch=6)
    requests = [
        replace(request, sampling=SamplingParams(max_tokens=1 + index * 7 % 16, min_tokens=1 + index * 7 % 16))
        for index, request in enumerate(make_requests(40, sampling=FORCED))
    ]
    completions = engine.generate(requests)
    assert [len(completion.token_ids.tolist()) for completion in completions] == [
        1 + index * 7 % 16 for index in range(40)
    ]
    for request, completion in zip(requests, completions, strict=True):
        assert completion.token_ids.tolist() == engine.generate([request])[0].token_ids.tolist()


def test_equal_prompts_share_one_prefill(folder_of, monkeypatch: pytest.MonkeyPatch):
    engine = start(folder_of("qwen3"))
    sizes = []
    forward = engine.model.forward
    monkeypatch.setattr(
        engine.model, "forward", lambda ids, **rest: sizes.append(tuple(ids.shape)) or forward(ids, **rest)
    )
    engine.generate(make_requests(3, group_size=8, sampling=FORCED))
    longest = max(len(request.input) for request in make_requests(3, sampling=FORCED))
    assert sizes[0] == (3, longest - 1)
    assert sizes[1:] == [(24, 1)] * 9


def test_a_stop_token_ends_the_response_and_is_part_of_it(folder_of):
    completions = start(folder_of("qwen3")).generate(make_requests(40, sampling=SamplingParams(max_tokens=40)))
    stopped = [completion for completion in completions if completion.finish_reason is FinishReason.STOP]
    assert len(stopped) > 5
    assert all(
        completion.token_ids.tolist().index(EOS) == len(completion.token_ids.tolist()) - 1 for completion in stopped
    )
    for completion in completions:
        if completion.finish_reason is FinishReason.LENGTH:
            assert len(completion.token_ids.tolist()) == 40 and EOS not in completion.token_ids.tolist()


def test_min_tokens_equal_to_max_tokens_forces_the_length(folder_of):
    completions = start(folder_of("qwen3")).generate(make_requests(40, sampling=FORCED))
    assert {len(completion.token_ids.tolist()) for completion in completions} == {9}
    assert all(EOS not in completion.token_ids.tolist() for completion in completions)


def test_logprobs_are_of_the_whole_distribution_while_stop_tokens_are_banned(folder_of):
    engine = start(folder_of("qwen3"))
    request = make_requests(1, sampling=FORCED)[0]
    completion = engine.generate([request])[0]
    tokens = torch.tensor([[*request.input.token_ids.tolist(), *completion.token_ids.tolist()]])
    model = AutoModelForCausalLM.from_pretrained(folder_of("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(tokens).logits[0].log_softmax(-1)
    first = len(request.input)
    expected = logprobs[first - 1 : -1].gather(1, tokens[0, first:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_a_stop_string_over_two_tokens_ends_the_response(folder_of):
    engine = start(folder_of("qwen3"))
    sampling = SamplingParams(max_tokens=9)
    requests = make_requests(20, sampling=sampling)
    request, free = next(
        (request, completion.token_ids.tolist())
        for request, completion in zip(requests, engine.generate(requests), strict=True)
        if len(completion.token_ids.tolist()) > 5
    )
    stopping = replace(request, sampling=replace(sampling, stop=(f"{WORDS[free[3]]} {WORDS[free[4]]}",)))
    completion = engine.generate([stopping])[0]
    assert completion.token_ids.tolist() == free[:5]
    assert completion.finish_reason is FinishReason.STOP


def test_unverified_weights_are_not_sampled(folder_of):
    engine = start(folder_of("qwen3"))
    engine.gate.begin(1)
    engine.gate.fail("half of them are missing")
    for sample in (
        lambda: engine.generate(make_requests(1, sampling=FORCED)),
        lambda: engine.score([ModelInput((5, 6))]),
    ):
        with pytest.raises(WeightSyncFailed, match="version 1 that are not verified: half of them are missing"):
            sample()
    engine.gate.begin(1)
    engine.gate.commit(1)
    assert engine.generate(make_requests(1, sampling=FORCED))[0].versions[-1] == 1


@pytest.mark.parametrize("name", SERVED)
def test_the_recorded_layout_is_where_transformers_put_the_weights(name: str, folder_of):
    engine = start(folder_of(name))
    disk = load_file(folder_of(name) / "model.safetensors")
    assert set(engine.weights.layout.tensors) == set(disk)
    parameters = {key: torch.zeros_like(value) for key, value in weights_of(engine.model).items()}
    for key, value in disk.items():
        load_tensor(engine.weights.layout, parameters, key, value)
    assert digest(engine.weights.layout, weights_of(engine.model)) == digest(engine.weights.layout, parameters)
    for key, value in weights_of(engine.model).items():
        assert torch.equal(value, parameters[key]), key


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_tied", "qwen2"])
def test_random_weights_are_those_of_the_seed(name: str, folder_of, tmp_path: Path):
    for file in folder_of(name).iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = TransformersConfig()
    engines = [
        TransformersEngine(config, folder=tmp_path, dtype=torch.float32, device="cpu", random_seed=seed)
        for seed in (5, 5, 6)
    ]
    digests = [digest(engine.weights.layout, weights_of(engine.model)) for engine in engines]
    assert digests[0] == digests[1]
    assert all(
        digests[0][tensor] != digests[2][tensor] for tensor in digests[0] if "proj" in tensor and "bias" not in tensor
    )


@pytest.mark.parametrize("name", SERVED)
def test_scores_are_the_logprobs_of_transformers_at_temperature_1(name: str, folder_of):
    sequences = [request.input for request in make_requests(5, sampling=GREEDY) if len(request.input) > 1]
    model = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32)
    for sequence, scores in zip(sequences, start(folder_of(name)).score(sequences), strict=True):
        tokens = torch.from_numpy(sequence.token_ids).long()[None]
        with torch.no_grad():
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-5, rtol=0)


def test_a_tensor_without_a_place_is_named():
    with pytest.raises(CheckpointError, match="model.layers.0.extra.weight"):
        load_weights({}, {"model.layers.0.extra.weight": torch.zeros(1)})


@pytest.mark.parametrize(("tokens", "message"), [((), "at least 1 token"), ((5,) * 120, "128 positions")])
def test_prompts_the_model_cannot_continue_are_refused(tokens: tuple[int, ...], message: str, folder_of):
    with pytest.raises(ValueError, match=message):
        start(folder_of("qwen3")).generate([GenerationRequest(input=ModelInput(tokens), sampling=FORCED, seed=0)])


def test_sleep_frees_the_cache_and_changes_nothing_else(folder_of):
    engine = start(folder_of("qwen3"))
    requests = make_requests(4, sampling=FORCED)
    before = engine.generate(requests)
    engine.sleep()
    engine.wake()
    assert engine.generate(requests) == before


def test_a_model_type_that_transformers_does_not_have_is_served_without_its_own_code(folder_of):
    requests = make_requests(2, sampling=GREEDY)
    engine = start(folder_of("kimi_k2"))
    assert type(engine.model).__name__ == "DeepseekV3ForCausalLM"
    assert all(len(each.token_ids) for each in engine.generate(requests))
