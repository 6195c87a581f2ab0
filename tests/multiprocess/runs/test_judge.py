"""A judge in engines of the run, on CPU: its words reach the rewards of every rollout, in training and evaluation."""

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from rlframe.models.hub import EMBEDDED
from tests.multiprocess.program import LEARNING, lines, metrics, run

REPLY_TOKENS = 6


@cache
def replied(question: str) -> str:
    """What transformers makes the judge's model say."""
    folder = EMBEDDED / "qwen3_moe_tiny"
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    text = words.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    asked = torch.tensor([words(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        said = model.generate(asked, max_new_tokens=REPLY_TOKENS, do_sample=False)
    return words.decode(said[0, asked.shape[1] :], skip_special_tokens=True)


def test_a_judge_in_engines_of_the_run_judges_every_rollout(tmp_path: Path) -> None:
    """Its model is asked for the sum that the policy's words make, and its last digit is the score."""
    settings = LEARNING | {
        "model.random_init": "false",
        "steps": 2,
        "train.parallel": "d1",
        "rollout.num_engines": 1,
        "judge.path": "qwen3_moe_tiny",
        "judge.weight": 0.5,
        "judge.template": "'{response}+1='",
        "judge.reading.pattern": r"(\d)",
        "judge.without_score": "skip",
        "judge.engine.max_tokens": REPLY_TOKENS,
    }
    output = run(tmp_path / "run", settings)
    samples = lines(output / "samples.jsonl")
    assert len(samples) == 2 * 4 * 4 + 2 * 8
    seen = set()
    for sample in samples:
        digits = [character for character in replied(f"{sample['response']}+1=") if character in "0123456789"]
        expected = int(digits[-1]) / 10 if digits else None
        parts = sample["reward_parts"]
        assert parts.get("judge_model") == expected
        assert sample["reward"] == pytest.approx(parts["exact_match"] + 0.5 * (expected or 0.0), abs=1e-6)
        seen.add(expected)
    assert len(seen) > 2, "scores that hardly differ prove nothing"
    keys = {key for line in metrics(output) for key in line}
    assert {"reward/judge_model_mean", "evaluation/judge_model_mean"} <= keys
