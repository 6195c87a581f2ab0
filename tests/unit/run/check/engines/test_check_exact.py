"""Rules about rollout.logprobs=exact."""

import pytest

from rlframe.run.check import check
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError

EXACT = ["rollout.logprobs=exact", "train.dtype=bfloat16"]
OVERLAPPED = ["train.communication.overlap_grad_reduce=true", "train.communication.overlap_param_gather=true"]


def test_the_embedded_engine_on_a_cpu_can_agree_exactly() -> None:
    check(load("grpo_qwen3_moe", EXACT))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.dtype=float32"], "has no effect with train.dtype=float32, got exact"),
        (["rollout=vllm"], "rollout.logprobs must be sampled with rollout.name=vllm, got exact: VLLM_BATCH_INVARIANT"),
        (["rollout=sglang"], "nobody has shown that rollout.name=sglang and the trainer compute the same"),
        (["train.recompute=full"], "train.recompute must be none with rollout.logprobs=exact, got full"),
        (["train.parallel=p2"], "train.parallel must have no pipeline stages with rollout.logprobs=exact, got p2"),
        (
            ["train.parallel=d2", "train.num_minibatches=2", *OVERLAPPED],
            "train.communication.overlap_param_gather must be false with rollout.logprobs=exact, got true",
        ),
        (["train.lora.rank=4"], "train.lora must be null with rollout.logprobs=exact"),
        (["rollout.dtype=bfloat16"], "rollout.dtype must be auto or float32 with logprobs=exact, got bfloat16"),
        (["cluster.device=cuda"], "rollout.logprobs must be sampled on CUDA, got exact"),
    ],
)
def test_what_cannot_agree_exactly_is_refused_with_the_reason(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(load("grpo_qwen3_moe", [*EXACT, *overrides]))
    assert words in str(refused.value)


def test_engines_of_a_judge_and_a_teacher_have_no_such_setting() -> None:
    teacher = ["teacher.path=qwen3_moe_tiny", "teacher.engine.name=transformers", "teacher.placement=engine"]
    with pytest.raises(ConfigError) as refused:
        check(load("grpo_qwen3_moe", ["algorithm=on_policy_distillation", *teacher, "teacher.engine.logprobs=exact"]))
    assert "teacher.engine.logprobs has no effect, got exact" in str(refused.value)
