"""A small student learns arithmetic from a larger teacher: held-out accuracy over steps, by how responses are made.

    python examples/benchmarks/distillation.py [--teacher FOLDER] [--methods METHOD ...] [--seeds 0 1 2] [--steps 100]

The teacher is a dense Qwen3 of 0.9 million parameters, another family than the student, trained on right answers from
random weights by this repository's own supervised loop (a folder it was written to before is taken with `--teacher`).
The student is the embedded Qwen3-MoE of 0.5 million parameters, which prefers the wrong way of working. It learns from
the teacher by GKD on the data's responses (on_policy_fraction 0), on a mixture (0.5), and by the policy gradient whose
only advantage is the teacher's; from the data alone by supervised training, for comparison. All see as many prompts.
Accuracy is that of greedy answers to the 256 held-out prompts, by transformers, of the model exported at each step.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from curves_svg import draw, spread
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlframe.data.config import DataConfig
from rlframe.data.prompts import PromptSource
from rlframe.models.hub import EMBEDDED

HERE = Path(__file__).resolve().parent
STUDENT = EMBEDDED / "qwen3_moe_tiny"
TEACHER_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 261,
    "hidden_size": 160,
    "intermediate_size": 480,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TEACHER = [
    "data=arithmetic", "prompts_per_step=128", "steps=1500", "train.parallel=d1", "train.optimizer.lr=2e-3",
    "checkpoint.every_steps=0",
]  # fmt: skip
QUIET = ["logging.progress=false", "logging.tensorboard=false"]
RECIPE = [
    "prompts_per_step=64", "train.optimizer.lr=1e-3", "train.optimizer.schedule=linear",
    "train.optimizer.warmup_steps=10", "train.optimizer.beta2=0.98", "checkpoint.every_steps=0",
    "checkpoint.export_dtype=float32",
]  # fmt: skip
OFFLINE = ["~reward", "~rollout", "~rollout.max_tokens", "evaluation.every_steps=0"]
METHODS = {
    "gkd, on_policy_fraction 0": ("gkd_qwen3_moe_tiny", ["algorithm.on_policy_fraction=0", *OFFLINE]),
    "gkd, on_policy_fraction 0.5": ("gkd_qwen3_moe_tiny", ["evaluation.every_steps=0"]),
    "on_policy_distillation": (
        "gkd_qwen3_moe_tiny",
        ["algorithm=on_policy_distillation", "evaluation.every_steps=0"],
    ),
    "sft": ("sft_qwen3_moe_tiny", ["model.random_init=false", "data=arithmetic"]),
}
"""By name: the configuration and its overrides."""


def run(config: str, overrides: list[str], folder: Path) -> None:
    """One run of rlframe, whose output is left in `folder`."""
    command = [sys.executable, "-m", "rlframe.main", "--config-name", config, *overrides, *QUIET, f"output={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")


def make_teacher(folder: Path) -> Path:
    """The trained teacher's folder, under `folder`."""
    start = folder / "start"
    start.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(STUDENT / name, start / name)
    (start / "config.json").write_text(json.dumps(TEACHER_CONFIG), encoding="utf-8")
    run("sft_qwen3_moe_tiny", [f"model.path={start}", *TEACHER], folder / "run")
    return folder / "run" / "model"


def accuracy(folder: Path) -> float:
    """The part of the held-out prompts that the model in `folder` answers rightly when it is greedy."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    by_length = defaultdict(list)
    for prompt in PromptSource(DataConfig(), tokenizer=tokenizer, seed=0).evaluation_prompts():
        by_length[len(prompt.input)].append(prompt)
    right = total = 0
    for length, prompts in by_length.items():
        rows = torch.tensor([prompt.input.token_ids for prompt in prompts])
        with torch.no_grad():
            made = model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=8, do_sample=False)
        texts = tokenizer.batch_decode(made[:, length:], skip_special_tokens=True)
        right += sum(text.strip() == prompt.answer for text, prompt in zip(texts, prompts, strict=True))
        total += len(prompts)
    return right / total


def settings(method: str, teacher: Path, *, seed: int, steps: int, every: int) -> list[str]:
    """Returns the overrides of one student's run."""
    given = [] if method == "sft" else [f"teacher.path={teacher}"]
    given += [f"steps={steps}", f"seed={seed}", f"checkpoint.export_every_steps={every}"]
    return [*RECIPE, *METHODS[method][1], *given]


def curve(method: str, teacher: Path, folder: Path, *, seed: int, steps: int, every: int) -> dict[int, float]:
    """Accuracy by step of one student."""
    run(METHODS[method][0], settings(method, teacher, seed=seed, steps=steps, every=every), folder)
    exports = folder / "exports"
    return {step: accuracy(exports / f"step-{step:08d}") for step in range(every, steps + 1, every)}


def num_parameters(folder: Path) -> int:
    """Parameters of the model in `folder`."""
    return AutoModelForCausalLM.from_pretrained(folder).num_parameters()


def show(found: dict[str, dict[int, dict[int, float]]], *, start: float, file: Path) -> None:
    """Print and write the table of accuracies by method, seed and step, and the plot."""
    rows = ["| method | " + " | ".join(f"step {step}" for step in next(iter(found[next(iter(found))].values()))) + " |"]
    rows.append("|---" * (rows[0].count("|") - 1) + "|")
    curves = {}
    for method, by_seed in found.items():
        values = {step: [curve[step] for curve in by_seed.values()] for step in next(iter(by_seed.values()))}
        rows.append(f"| {method} | {' | '.join(spread(each) for each in values.values())} |")
        points = [(step, fmean(each), min(each), max(each)) for step, each in values.items()]
        curves[method] = [(0, start, start, start), *points]
    file.with_suffix(".md").write_text("\n".join(rows) + "\n", encoding="utf-8")
    draw(file.with_suffix(".svg"), curves, title="Held-out arithmetic, greedy", x_label="steps", y_label="exact match")
    print("\n".join(rows), f"\nwritten to {file}.json, .md, .svg")


def main() -> None:
    """Measure, print, write a JSON file, the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, help="a teacher made before; made anew when left out")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="steps between measurements")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the files written")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    file = arguments.results / "distillation"
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        teacher = arguments.teacher or make_teacher(work / "teacher")
        report: dict[str, Any] = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {name: version(name) for name in ("torch", "transformers", "megatron-core", "ray")},
            "teacher": {"parameters": num_parameters(teacher), "accuracy": accuracy(teacher), "recipe": TEACHER},
            "student": {"parameters": num_parameters(STUDENT), "accuracy": accuracy(STUDENT), "recipe": RECIPE},
            "accuracy_by_step": {},
        }
        print(f"teacher {report['teacher']['accuracy']:.3f}, student before {report['student']['accuracy']:.3f}")
        for method in arguments.methods:
            curves = {}
            for seed in arguments.seeds:
                folder = work / f"{method.replace(' ', '_').replace(',', '')}-{seed}"
                curves[seed] = curve(
                    method, teacher, folder, seed=seed, steps=arguments.steps, every=arguments.every
                )  # fmt: skip
                print(f"{method:<28} seed {seed}:", *(f"{step}: {value:.3f}" for step, value in curves[seed].items()))
            report["accuracy_by_step"][method] = curves
            file.with_suffix(".json").write_text(json.dumps(report) + "\n", encoding="utf-8")
    show(report["accuracy_by_step"], start=report["student"]["accuracy"], file=file)


if __name__ == "__main__":
    main()
