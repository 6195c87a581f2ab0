"""Folders as runs leave them, small."""

import gzip
import json
from pathlib import Path
from typing import Any

import yaml

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b[2J\u202e"
"""A model's answer that would be HTML, a terminal's command and a reversal of the line."""


def record(step: int, reward: float | None = 1.0, *, text: str = "four", tokens: int = 2) -> dict[str, Any]:
    """A kept attempt whose last token has a text."""
    count = tokens + 1
    return {
        "step": step,
        "evaluation": "",
        "kept_as": ["best"],
        "id": "p0",
        "source": "",
        "sample_index": 1,
        "sequence": 0,
        "reward": reward,
        "reward_parts": {"match": reward},
        "reward_weights": {"match": 1.0},
        "reward_troubles": {},
        "answer": "4",
        "finish_reason": "stop",
        "ending": "",
        "prompt": "2+2=",
        "response": text,
        "group": 0,
        "group_rewards": [0.0, reward],
        "group_advantages": [-1.0, 1.0],
        "group_place": 1,
        "tokens": {
            "ids": list(range(count)),
            "pieces": ["2+2="] + ["a"] * (tokens - 1) + [text],
            "sampled": [0] + [1] * tokens,
            "in_loss": [0] + [1] * tokens,
            "turns": [-1] + [0] * tokens,
            "versions": [-1] + [0] * tokens,
            "rollout_logprobs": [0.0] + [-0.5] * tokens,
            "trainer_logprobs": [0.0] + [-0.25] * tokens,
            "advantages": [0.0] + [1.0] * tokens,
        },
    }


def write_samples(output: Path, *records: dict[str, Any]) -> None:
    """Writes kept attempts, those of a step to one file."""
    (output / "samples").mkdir(exist_ok=True)
    for step in {each["step"] for each in records}:
        text = "".join(json.dumps(each) + "\n" for each in records if each["step"] == step)
        (output / "samples" / f"step-{step:08d}.jsonl.gz").write_bytes(gzip.compress(text.encode(), 1))


def run_folder(output: Path, *, steps: int = 3, text: str = "four", **settings: Any) -> Path:
    """A finished run."""
    output.mkdir(parents=True)
    plain = {"name": "it", "output": str(output), "steps": steps, "prompts_per_step": 2, "train": {"lr": 1e-3}}
    (output / "config.yaml").write_text(yaml.safe_dump(plain | settings))
    (output / "overrides.yaml").write_text(yaml.safe_dump(["train.lr=1e-3"]))
    metrics = [
        {"step": step, "reward/mean": step / 10, "train/loss": float("nan"), "time/train_s": 1.0, "time/step_s": 2.0}
        for step in range(1, steps + 1)
    ]
    (output / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    write_samples(output, *(record(step, text=text) for step in range(1, steps + 1)))
    (output / "warnings.jsonl").write_text(
        "".join(json.dumps({"step": step, "of": "m", "text": text}) + "\n" for step in (1, 2))
    )
    phases = [{"name": "train", "role": "policy", "start_s": 1.0, "end_s": 2.0}]
    (output / "timeline.jsonl").write_text(json.dumps({"step": 1, "phases": phases}) + "\n")
    return output
