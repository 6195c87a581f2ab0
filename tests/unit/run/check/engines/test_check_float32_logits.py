"""Rules about model.float32_logits."""

import pytest

from rlframe.run.check import check
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError

pytestmark = pytest.mark.later
LOGITS = ["model.float32_logits=true", "train.dtype=bfloat16"]
KEY = "model.float32_logits"


@pytest.mark.parametrize("overrides", [[], ["rollout=vllm"], ["train.lora.rank=4"]])
def test_trainer_and_engine_can_keep_logits_in_float32(overrides: list[str]) -> None:
    check(load("grpo_qwen3_moe", [*LOGITS, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.dtype=float32"], f"{KEY} has no effect where all is computed in float32"),
        (["rollout.logprobs=exact"], f"{KEY} has no effect where all is computed in float32"),
        (
            ["rollout=vllm", "rollout.speculative.method=ngram"],
            f"{KEY} must be false with rollout.speculative, got true: nobody has shown that vLLM checks drafts",
        ),
    ],
)
def test_what_has_no_effect_or_would_differ_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(load("grpo_qwen3_moe", [*LOGITS, *overrides]))
    assert words in str(refused.value)
