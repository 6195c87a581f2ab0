"""What preference training does to held-out data, on CPU.

    python examples/benchmarks/preferences.py [--seeds 0 1 2] [--demo FOLDER] [--results FOLDER]

The embedded model, which knows two ways of working and prefers the wrong one, answers problems by sampling. Pairs are a
right and a wrong answer of its own to one problem; verdicts are the same answers one by one. DPO learns from the pairs
and KTO from the verdicts; measured are loss, margin and accuracy on held-out problems, and how many of these the model
answers rightly, greedily, before and after. The two need not go together: with beta = 0.1 both methods widen the margin
by making right and wrong answers less likely, the wrong ones more so, and a third answer takes their place ("likelihood
displacement", arXiv 2410.08847). What holds the right ones up is the negative log-likelihood added to DPO
(`rpo_alpha`), and for KTO a greater beta with a greater weight of desirable answers.

With --demo, both also learn from LLaMA-Factory's dpo_en_demo.json and kto_en_demo.json in that folder, of which a tenth
is held out: a small model with random weights and a tokenizer made of these texts.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from curves_svg import draw, spread
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlframe.data.builtin.arithmetic import RIGHT, Split, records
from rlframe.models.hub import EMBEDDED
from rlframe.run.check import check
from rlframe.run.compose.run import run
from rlframe.run.folder import claim
from rlframe.run.load import load

HERE = Path(__file__).resolve().parent
MODEL = EMBEDDED / "qwen3_moe_tiny"
PROBLEMS = {Split.TRAIN: 1200, Split.HELD_OUT: 300}
SAMPLES = 8
"""Answers to each problem."""
VOCABULARY = 1024
DEMOS = {"dpo": "dpo_en_demo.json", "kto": "kto_en_demo.json"}
COMMON = {
    "train.parallel": "d1",
    "train.optimizer.warmup_steps": 0,
    "train.optimizer.schedule": "constant",
    "logging.progress": "false",
    "logging.tensorboard": "false",
}
RUN = COMMON | {"steps": 40, "evaluation.every_steps": 10, "train.optimizer.lr": 3e-4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "DPO": ("dpo", {"prompts_per_step": 32}),
    "DPO, rpo_alpha 1": ("dpo", {"prompts_per_step": 32, "algorithm.rpo_alpha": 1.0}),
    "KTO": ("kto", {"prompts_per_step": 64}),
    "KTO, beta 1, weight 1.33": (
        "kto",
        {"prompts_per_step": 64, "algorithm.beta": 1.0, "algorithm.desirable_weight": 1.33},
    ),
}
"""By name: algorithm and settings."""
DEMO_RUN = {"model.random_init": "true", "checkpoint.export": "false"}
DEMO_RUNS = {
    # Less than an epoch: a model without weights soon learns these few texts by heart. Longer pairs are dropped.
    "dpo": {
        "steps": 10,
        "prompts_per_step": 16,
        "evaluation.every_steps": 5,
        "train.optimizer.lr": 3e-4,
        "train.max_tokens_per_microbatch": 4096,
    },
    "kto": {
        "steps": 20,
        "prompts_per_step": 8,
        "evaluation.every_steps": 10,
        "train.optimizer.lr": 1e-3,
        "train.max_tokens_per_microbatch": 1024,
    },
}


def answers(folder: Path, problems: list[str], *, samples: int) -> dict[str, list[str]]:
    """The model's answers to each problem, `samples` at temperature 1, or its greedy one where that is 0."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    model = model.float().eval()
    by_length: dict[int, list[str]] = defaultdict(list)
    for problem in problems:
        by_length[len(problem)].append(problem)
    found: dict[str, list[str]] = {}
    count = max(samples, 1)
    for group in by_length.values():
        # One token per character, so all of one length: nothing to pad.
        turns = [[{"role": "user", "content": problem}] for problem in group]
        inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        options: dict[str, Any] = {"do_sample": samples > 0, "num_return_sequences": count, "max_new_tokens": 5}
        with torch.no_grad():
            made = model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(made, skip_special_tokens=True)
        found |= {problem: texts[index * count : (index + 1) * count] for index, problem in enumerate(group)}
    return found


def right_answers(part: Split) -> dict[str, str]:
    """The first PROBLEMS of a part, in the fixed order of their hashes, with their answers."""
    chosen = sorted(records(RIGHT, part), key=lambda record: hash_of(record.id))[: PROBLEMS[part]]
    return {record.fields["prompt"]: record.fields["answer"] for record in chosen}


def hash_of(text: str) -> int:
    """A fixed pseudo-random number."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


def accuracy(folder: Path, expected: dict[str, str]) -> float:
    """The part of the problems that the model answers rightly, greedily."""
    given = answers(folder, list(expected), samples=0)
    return sum(given[problem][0] == answer for problem, answer in expected.items()) / len(expected)


def write_samples(folder: Path) -> dict[str, int]:
    """Files dpo-train, dpo-held_out, kto-train and kto-held_out with what the embedded model answered; their sizes."""
    torch.manual_seed(0)
    sizes = {}
    for part in Split:
        expected = right_answers(part)
        pairs, verdicts = [], []
        for problem, texts in answers(MODEL, list(expected), samples=SAMPLES).items():
            right = [text for text in texts if text == expected[problem]]
            wrong = [text for text in texts if text != expected[problem]]
            if right and wrong:
                pairs.append({"prompt": problem, "chosen": right[0], "rejected": wrong[0]})
                verdicts += [{"prompt": problem, "completion": right[0], "label": True}]
                verdicts += [{"prompt": problem, "completion": wrong[0], "label": False}]
        for name, rows in (("dpo", pairs), ("kto", verdicts)):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{name}-{part}.jsonl").write_text(text, encoding="utf-8")
            sizes[f"{name}-{part}"] = len(rows)
    return sizes


def write_model(folder: Path, files: list[Path]) -> None:
    """A small model without weights, and a tokenizer of VOCABULARY byte pairs learnt from `files`."""
    spec = importlib.util.spec_from_file_location("make_tokenizer", HERE.parent / "embedded_model/make_tokenizer.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(made.SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((file.read_text(encoding="utf-8") for file in files), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(made.SPECIAL[2:]),
        chat_template=made.CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    made.make_config(len(fast)).save_pretrained(folder)


@contextmanager
def one_ray() -> Iterator[None]:
    """A Ray of our own, which all runs inside the `with` block join."""
    start = (
        "import ray; ray = ray.init(address='local', num_cpus=4, include_dashboard=False); "
        "print(ray.address_info['gcs_address'], flush=True); input()"
    )
    command = [sys.executable, "-c", start]
    # Ray asks for a token when this account happens to have one, and offers it only when told to.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            os.environ["RAY_ADDRESS"] = process.stdout.readline().strip()
            assert os.environ["RAY_ADDRESS"], "Ray did not start"
            yield
        finally:
            process.stdin.close()


def evaluations(folder: Path, algorithm: str, settings: dict[str, Any]) -> list[dict[str, float]]:
    """The evaluations of one run in this process, whose output is left in `folder`."""
    given = [f"{key}={value}" for key, value in {**settings, "output": folder}.items()]
    config = load(f"{algorithm}_qwen3_moe_tiny", given)
    check(config)
    with closing(claim(config)):
        run(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if "evaluation/loss" in line]
    return [{key.removeprefix("evaluation/"): value for key, value in line.items()} for line in found]


def row(name: str, curve: list[dict[str, float]], more: dict[str, float]) -> dict[str, Any]:
    """One run: its curve, and a line on the terminal with its first and last point."""
    for point in curve:
        if "desirable_reward" in point:
            point["reward_margin"] = point["desirable_reward"] - point["undesirable_reward"]
    first, last = curve[0], curve[-1]
    print(
        f"{name}: held-out loss {first['loss']:.4f} -> {last['loss']:.4f}, margin {first['reward_margin']:+.3f} -> "
        f"{last['reward_margin']:+.3f}, accuracy {last['accuracy']:.3f} {more}",
        flush=True,
    )
    return {"curve": curve, **more}


def summary(runs: dict[str, dict[int, Any]]) -> str:
    """Markdown: each case's held-out figures at its end, mean and spread over the seeds."""
    keys = {"reward_margin": "margin", "accuracy": "pairs or verdicts right", "answers_right": "greedy answers right"}
    rows = [f"| case | {' | '.join(keys.values())} |", "|---" * (len(keys) + 1) + "|"]
    for case, by_seed in runs.items():
        ends = [run["curve"][-1] | run for run in by_seed.values()]
        rows.append(f"| {case} | {' | '.join(spread([end[key] for end in ends]) for key in keys)} |")
    return "\n".join(rows)


def plot(runs: dict[str, dict[int, Any]], file: Path) -> None:
    """The margins of every case over steps."""
    curves = {}
    for case, by_seed in runs.items():
        points = []
        for together in zip(*(each["curve"] for each in by_seed.values()), strict=True):
            margins = [point["reward_margin"] for point in together]
            points.append((together[0]["step"], statistics.fmean(margins), min(margins), max(margins)))
        curves[case] = points
    draw(file, curves, title="Reward margin on held-out problems", x_label="steps", y_label="beta * nats")


def on_samples(folder: Path, case: str, seed: int) -> dict[str, Any]:
    """One run on the embedded model's own answers, and how many problems it answers rightly before and after."""
    algorithm, settings = CASES[case]
    output = folder / f"{list(CASES).index(case)}-seed{seed}"
    data = {
        "seed": seed,
        "data.path": folder / f"{algorithm}-train.jsonl",
        "data.evaluation_path": folder / f"{algorithm}-held_out.jsonl",
    }
    curve = evaluations(output, algorithm, RUN | settings | data)
    expected = right_answers(Split.HELD_OUT)
    models = {"answers_right_before": MODEL, "answers_right": output / "model"}
    return row(f"{case}, seed {seed}", curve, {name: accuracy(model, expected) for name, model in models.items()})


def on_demos(folder: Path, demos: Path) -> dict[str, Any]:
    """A run of each method on its file in `demos`."""
    files = {algorithm: demos / file for algorithm, file in DEMOS.items()}
    write_model(folder / "small", list(files.values()))
    found = {}
    for algorithm, file in files.items():
        data = {"model.path": folder / "small", "data.path": file, "data.evaluation_count": 30}
        curve = evaluations(folder / f"{algorithm}-demo", algorithm, COMMON | DEMO_RUN | DEMO_RUNS[algorithm] | data)
        found[file.name] = row(file.name, curve, {})
    return found


def main() -> None:
    """Sample, train, print; write a JSON file, the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--demo", type=Path, help="folder with dpo_en_demo.json and kto_en_demo.json")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder for the files written")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, one_ray():
        if arguments.demo:
            demos = on_demos(Path(name), arguments.demo)
            write(arguments.results / "preferences_demos.json", settings=DEMO_RUNS, runs=demos)
        if not arguments.seeds:
            return
        folder = Path(name)
        sizes = write_samples(folder)
        runs = {case: {seed: on_samples(folder, case, seed) for seed in arguments.seeds} for case in CASES}
    file = arguments.results / "preferences"
    write(file.with_suffix(".json"), records=sizes, settings={"all": RUN, "cases": CASES}, runs=runs)
    file.with_suffix(".md").write_text(summary(runs) + "\n", encoding="utf-8")
    plot(runs, file.with_suffix(".svg"))
    print(f"{summary(runs)}\nwritten to {file}.json, .md, .svg")


def write(file: Path, **found: Any) -> None:
    """Write a JSON file of what was `found`, and with what."""
    packages = ("rlframe", "torch", "transformers", "megatron-core", "ray")
    about = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in packages},
    }
    file.write_text(json.dumps(about | found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
