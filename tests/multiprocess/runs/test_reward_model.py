"""A reward model in the loop: rollouts earn what transformers' model for sequence classification says of them."""

from pathlib import Path

import pytest
import torch
import transformers

from rlframe.models.hub import EMBEDDED
from tests.multiprocess.program import LEARNING, lines, metrics, run

WEIGHT = 0.5
TOLERANCE = 1e-4


def make_reward_model(folder: Path) -> Path:
    """The embedded model with a head of one output drawn at random."""
    source = EMBEDDED / "qwen3_moe_tiny"
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(source, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def test_rollouts_earn_the_models_score_beside_a_function(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "reward")
    settings = LEARNING | {
        "model.random_init": "false",
        "steps": 2,
        "train.parallel": "d1",
        "rollout.num_engines": 1,
        "reward.model.path": folder,
        "reward.model.weight": WEIGHT,
        "reward.model.parallel": "d1t2",
        "reward.model.colocate": "false",
    }
    output = run(tmp_path / "run", settings)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    samples = lines(output / "samples.jsonl")
    # Two steps of 4 prompts and 4 samples each, and 8 held-out answers before and after.
    assert len(samples) == 2 * 4 * 4 + 2 * 8
    seen = set()
    for sample in samples:
        text = sample["prompt"] + sample["response"]
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if sample["finish_reason"] == "stop":
            tokens.append(tokenizer.eos_token_id)
        with torch.no_grad():
            states = model.model(torch.tensor([tokens])).last_hidden_state
        expected = float(model.score(states)[0, -1, 0])
        assert sample["reward_parts"]["model"] == pytest.approx(expected, abs=TOLERANCE)
        function = sample["reward_parts"]["exact_match"]
        assert sample["reward"] == pytest.approx(function + WEIGHT * sample["reward_parts"]["model"], abs=1e-6)
        seen.add(round(expected, 3))
    assert len(seen) > 8, "scores that hardly differ prove nothing"
    assert {"reward/model_mean", "evaluation/model_mean"} <= {key for line in metrics(output) for key in line}
