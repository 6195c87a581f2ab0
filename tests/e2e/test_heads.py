"""A reward model and an embedding model made of the embedded language model, from configuration to what transformers
loads."""

from pathlib import Path

import pytest
import torch
import transformers

from rlframe.data.builtin.arithmetic import PREFERENCES, Split, records
from tests.e2e.test_preference import evaluations, train

EXPORTED = {"checkpoint.export": "true", "checkpoint.export_dtype": "float32", "train.dtype": "float32"}


def test_a_reward_model_scores_right_answers_higher_here_and_in_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    held_out = evaluations(train(folder, "reward_model_qwen3_moe_tiny", **EXPORTED))
    # The head begins at zero: log 2, and all is level.
    assert held_out[0]["evaluation/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert held_out[0]["evaluation/accuracy"] == 0.0
    assert held_out[4]["evaluation/loss"] < held_out[2]["evaluation/loss"] < 0.6931
    assert held_out[4]["evaluation/accuracy"] > 0.6

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()

    def score(prompt: str, answer: str) -> float:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(turns, tokenize=False).rstrip()
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return float(model(tokens).logits[0, 0])

    pairs = [record.fields for record in records(PREFERENCES, Split.HELD_OUT)[::10]]
    right = [score(pair["prompt"], pair["chosen"]) > score(pair["prompt"], pair["rejected"]) for pair in pairs]
    assert sum(right) > 0.6 * len(right)


@pytest.mark.thorough
def test_an_embedding_model_learns_from_the_texts_of_the_whole_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    held_out = evaluations(train(folder, "embedding_qwen3_moe_tiny", **EXPORTED, **{"train.parallel": "d2"}))
    assert held_out[4]["evaluation/loss"] < held_out[0]["evaluation/loss"]
    model = transformers.AutoModel.from_pretrained(folder / "model")
    assert type(model).__name__ == "Qwen3MoeModel"
