"""Every engine loads a quantised checkpoint as what it stands for: a trainer with the folder in bfloat16 proves its
weights without a transfer, and it scores and samples the same."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlframe.rollout.vllm.config import has_tiles
from rlframe.types.input import ModelInput
from rlframe.types.rollout import SamplingParams
from rlframe.utils.errors import WeightSyncFailed
from tests.contracts.engines.kinds import ENGINES, Kind, param
from tests.contracts.engines.trainer import synced
from tests.quantized_models import quantize
from tests.rollout_models import make_requests, make_with_tokenizer

pytestmark = pytest.mark.later
# No engine follows the weights of GPT-OSS on a CPU: the embedded one has no windows, SGLang no attention for it.
FORMS = [
    ("fp8", "qwen3_moe"),
    pytest.param("int4", "qwen3_moe", marks=pytest.mark.thorough),
]
SEQUENCES = [ModelInput(tuple(range(5, 5 + length))) for length in (3, 17, 40)]
SAMPLING = SamplingParams(max_tokens=8, min_tokens=8)


@pytest.mark.parametrize(("form", "model"), FORMS)
@pytest.mark.parametrize("kind", [param(name) for name in ENGINES])
def test_scores_and_samples_are_those_of_the_plain_folder(kind: Kind, form: str, model: str, tmp_path: Path) -> None:
    make_with_tokenizer(model, tmp_path / "source", moe_intermediate_size=64)
    quantize(tmp_path / "source", form, plain=tmp_path / "plain", quantized=tmp_path / "quantized")
    weights = {name: each.float() for name, each in load_file(tmp_path / "plain" / "model.safetensors").items()}
    found = []
    for folder in ("plain", "quantized"):
        engine = kind.start(tmp_path / folder)
        try:
            _, _, sync = synced(engine, weights)
            sampled = engine.generate(make_requests(4, sampling=SAMPLING))
            found.append(
                (engine.score(SEQUENCES), [(each.token_ids.tolist(), list(each.logprobs)) for each in sampled])
            )
            sync.close()
        finally:
            engine.close()
    (scores, samples), (others, again) = found
    # SGLang batches by arrival on a CPU, so that the last bits differ from run to run of the same folder.
    exact = kind.name != "sglang"
    for one, other in zip(
        [*scores, *(nats for _, nats in samples)], [*others, *(nats for _, nats in again)], strict=True
    ):
        assert one == other if exact else one == pytest.approx(other, abs=1e-5)
    assert [tokens for tokens, _ in samples] == [tokens for tokens, _ in again]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [param("vllm")])
def test_a_reload_that_leaves_out_experts_fails_before_a_request_does(kind: Kind, tmp_path: Path) -> None:
    if has_tiles():
        pytest.skip("vLLM 0.32 has neither attention nor experts for GPT-OSS on a CPU with AMX")
    make_with_tokenizer("gpt_oss", tmp_path / "source", head_dim=32)
    quantize(tmp_path / "source", "mxfp4", plain=tmp_path / "plain", quantized=tmp_path / "quantized")
    weights = {name: each.float() for name, each in load_file(tmp_path / "plain" / "model.safetensors").items()}
    engine = kind.start(tmp_path / "plain")
    try:
        with pytest.raises(WeightSyncFailed, match="left out the experts of 2 layers of GptOssForCausalLM"):
            synced(engine, weights)
    finally:
        engine.close()
