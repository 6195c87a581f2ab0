"""Every loop at one size on one GPU: tokens a second, MFU, memory of the device, seconds of each phase.

    python examples/benchmarks/loops.py sft dpo ppo --output examples/benchmarks/results/loops.json

A case is a run of `rlframe.main` with random weights, whose metrics are read as it goes on; it is ended after the last
counted step. Medians of the STEPS counted steps, after WARM_UP others. Sequences have PROMPT_TOKENS and
RESPONSE_TOKENS, each text of an embedding or of a ranking one of the two. Tokens a second are all tokens of the step
over its whole time, or those of one phase over the phase's. MFU is that of docs/metrics.md, for each phase that
computes every token: passes of a teacher count nothing, and neither do those of an embedding's first pass nor what is
recomputed. Memory is the most that nvidia-smi says of each device, 20 times a second, in the counted steps, less what
it said before the run.

A case that fails or takes longer than --limit-s leaves the end of its messages in the result and its workers' logs in
--logs, and the next one begins.
Calls at the same time, each with CUDA_VISIBLE_DEVICES of its own, may share --output.
"""

import argparse
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from device_memory import Memory
from models_by_size import MODELS, make_model
from recipes import STEPS, WARM_UP, Watched, own, watch, words
from weight_sync import machine

from rlframe.models.checkpoint import write_checkpoint
from rlframe.models.hub import load_family, read_config
from rlframe.models.random_init import random_tensor

HERE = Path(__file__).resolve().parent
PROMPT_TOKENS = RESPONSE_TOKENS = 512
TEACHER_SEED = 1
SHORTEST_S = 0.005
"""Least duration of a phase in the table."""
COMMON = {
    "model.random_init": "true",
    # The run is ended after the steps that count, because its end would save a checkpoint.
    "steps": 1000,
    "data.evaluation_count": 0,
    "data.special_tokens_in_text": "true",
    "evaluation.every_steps": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.on_signal_s": 0,
    "cluster.preflight": "off",
    "logging.progress": "false",
    "logging.tensorboard": "false",
    "train.max_tokens_per_microbatch": 8192,
    "train.optimizer.lr": 1e-6,
}
ON_CUDA = {"train.optimizer.precision_aware": "true", "train.optimizer.moment_dtype": "bfloat16"}
SIZES = [1, 2, 4, 8, 16, 32, 64]
"""Batches for which decoding has a CUDA graph."""
GRAPHS = f"{{mode:0,cudagraph_mode:FULL_DECODE_ONLY,cudagraph_capture_sizes:{SIZES}}}".replace(" ", "")
VLLM = {"kv_cache_gb": 8, "max_num_seqs": max(SIZES), "engine_options": f"{{compilation_config:{GRAPHS}}}"}
SCORING = {"kv_cache_gb": 16, "enforce_eager": "true"}
"""Of a teacher's engine, which decodes nothing."""


def text(row: int, *, prompt: int, response: int) -> dict[str, Any]:
    """Returns a document."""
    return {"text": words(row, prompt + response - 1)}


def labelled(row: int, *, prompt: int, response: int) -> dict[str, Any]:
    """Returns a text of one of two classes."""
    return text(row, prompt=prompt, response=response) | {"label": ("left", "right")[row % 2]}


def answered(row: int, *, prompt: int, response: int) -> dict[str, Any]:
    """Returns a prompt and its response."""
    return {"prompt": words(row, prompt - 1), "completion": words(row + 1, response - 1)}


def judged(row: int, *, prompt: int, response: int) -> dict[str, Any]:
    """Returns a response that is to be learnt or unlearnt."""
    return answered(row, prompt=prompt, response=response) | {"label": row % 2 == 0}


def compared(row: int, *, prompt: int, response: int) -> dict[str, Any]:
    """Returns a prompt with two responses."""
    found = {"chosen": words(row + 2, response - 1), "rejected": words(row + 3, response - 1)}
    return {"prompt": words(row, prompt - 1)} | found


def contrasted(row: int, *, prompt: int, response: int) -> dict[str, Any]:
    """Returns a query with a text that belongs to it and one that does not."""
    found = {"positive": words(row + 2, response - 1), "negative": words(row + 3, response - 1)}
    return {"query": words(row, prompt - 1)} | found


def asked(row: int, *, prompt: int, response: int) -> dict[str, Any]:  # noqa: ARG001 - the policy responds
    """Returns a prompt."""
    return {"prompt": words(row, prompt - 1), "answer": "w7"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loop."""

    config: str
    record: Callable[..., dict[str, Any]]
    items: int = 64
    """Prompts, sequences, pairs or queries of a step."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    online: bool = False
    teacher: bool = False
    devices: int = 1


def offline(name: str, record: Callable[..., dict[str, Any]], items: int = 64, **settings: Any) -> Case:
    """Returns a case that trains on given sequences."""
    return Case(config=f"{name}_qwen3_moe_tiny", record=record, items=items, settings=settings)


def distilled(**settings: Any) -> Case:
    """Returns GKD on the student's own responses, with a frozen teacher."""
    apart = 2 if settings else 1
    settings = {"algorithm.on_policy_fraction": 1} | settings
    given = {"config": "gkd_qwen3_moe_tiny", "record": asked, "items": 32, "settings": settings}
    return Case(**given, online=True, teacher=True, devices=apart)


CASES = {
    "pretrain": offline("pretrain", text, **{"data.text_layout": "separate"}),
    "sft": offline("sft", answered),
    "dpo": offline("dpo", compared, items=32),
    "kto": offline("kto", judged),
    "reward_model": offline("reward_model", compared, items=32),
    "classification": offline("classification", labelled),
    "reranker": offline("reranker", contrasted, items=32),
    "embedding": offline("embedding", contrasted, items=48),
    "ppo": Case(
        config="grpo_qwen3_moe",
        record=asked,
        settings={"algorithm": "ppo", "algorithm.group_size": 1, "train.recompute": "full"},
        online=True,
    ),
    "gkd_in_ranks": distilled(),
    "gkd_own_ranks": distilled(**{"teacher.placement": "own", "algorithm.top_k": 64}),
    "gkd_engine": distilled(
        **{"teacher.placement": "engine", "algorithm.top_k": 64, "teacher.engine.name": "vllm"}
        | {f"teacher.engine.{key}": value for key, value in SCORING.items()}
    ),
}
"""A teacher of its own takes a second GPU."""
TINY = {"train": "cpu", "cluster": "cpu"}
"""What --rehearse puts in the place of a GPU."""


def main() -> None:
    arguments = read_arguments()
    for name in arguments.cases:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = attempted(name, Path(folder), arguments)
        keep(name, found, arguments.output)
        print(name, json.dumps(found), flush=True)
    print(arguments.output.with_suffix(".md").read_text())


def keep(name: str, found: dict[str, Any], output: Path) -> None:
    """Writes a case's figures beside those that the file has, and the table, while no other call does."""
    with output.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or '{"cases": {}}')["cases"] | {name: found}
        cases = {name: known[name] for name in CASES if name in known}
        file.truncate(0)
        file.write(json.dumps({"cases": cases}, indent=1) + "\n")
        output.with_suffix(".md").write_text(table(cases) + "\n")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", choices=CASES, nargs="+")
    parser.add_argument("--model", choices=MODELS, default="qwen3_1p7b", help="dimensions of the policy")
    parser.add_argument("--teacher", choices=MODELS, default="qwen3_1p7b", help="dimensions of a teacher")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds of one case, its start included")
    parser.add_argument("--set", nargs="*", default=[], help="key=value for rlframe's configuration, in every case")
    parser.add_argument("--output", type=Path, default=HERE / "results/loops.json")
    parser.add_argument("--logs", type=Path, help="folder for the messages of the runs")
    parser.add_argument("--folder", type=Path, help="folder for models, data and outputs, which are removed")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model and short sequences, on the CPU")
    return parser.parse_args()


def attempted(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of a case, or why it has none."""
    begun = time.time()
    try:
        found = measure(name, folder, arguments)
    except (SystemExit, RuntimeError, ImportError, OSError, ValueError, KeyError, StopIteration) as error:
        found = {"failed": f"{type(error).__name__}: {error}"}
        if arguments.logs and (workers := folder / "run/logs").exists():
            shutil.copytree(workers, arguments.logs / f"{name}.workers", dirs_exist_ok=True)
    sizes = {"model": arguments.model, "prompt_tokens": PROMPT_TOKENS, "response_tokens": RESPONSE_TOKENS}
    described = {key: value for key, value in asdict(CASES[name]).items() if key != "record"}
    given = {"case": described, "sizes": sizes, "rehearsed": arguments.rehearse, "set": arguments.set}
    return {"machine": machine(), "took_s": time.time() - begun} | given | found


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a case and returns its figures."""
    case = CASES[name]
    settings = overrides(case, folder, arguments)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    devices = [] if arguments.rehearse else visible.split(",")
    if len(devices) < case.devices and not arguments.rehearse:
        raise RuntimeError(f"needs {case.devices} GPUs, sees {visible}")
    with ExitStack() as stack:
        memory = stack.enter_context(Memory(",".join(devices[: case.devices]))) if devices else None
        log = (arguments.logs or folder) / f"{name}.log"
        run = watch(case.config, settings, folder, log=log, limit_s=arguments.limit_s)
    phases = counted(run)
    span = ("steps", min(each["start_s"] for each in phases), max(each["end_s"] for each in phases))
    peaks = {index: memory.peaks(index, [span])["steps"] for index in memory.samples} if memory else {}
    return figures(run) | {"device_peak_bytes": peaks}


def counted(run: Watched) -> list[dict[str, Any]]:
    """Returns the phases of the steps that count."""
    return [phase for row in run.timeline if row["step"] > WARM_UP for phase in row["phases"]]


def figures(run: Watched) -> dict[str, Any]:
    """Returns the medians of the counted steps, and the losses of all."""
    losses = ("train/loss", "train/grad_norm", "critic/loss")
    medians = own(run.steps[WARM_UP:], ("time/", "throughput/", "memory/", "rollout/"))
    names = dict.fromkeys(phase["name"] for phase in counted(run))
    return {
        "start_s": run.start_s,
        "steps": len(run.steps) - WARM_UP,
        "phases_s": {name: medians[f"time/{name}_s"] for name in names if f"time/{name}_s" in medians},
        "medians": medians,
        "by_step": [{key: step[key] for key in losses if key in step} for step in run.steps],
    }


def overrides(case: Case, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Returns the settings of the run, and writes its models and its data."""
    tiny = arguments.rehearse
    sizes = MODELS["tiny" if tiny else arguments.model]
    prompt, response, items = (16, 8, 4) if tiny else (PROMPT_TOKENS, RESPONSE_TOKENS, case.items)
    data = folder / "data.jsonl"
    record = partial(case.record, prompt=prompt, response=response)
    write(data, (record(row) for row in range(items * (WARM_UP + STEPS + 2))), tiny=tiny)
    found: dict[str, Any] = {
        "output": folder / "run",
        "prompts_per_step": items,
        "data.path": data,
        "data.cache_folder": folder / "cache",
        "model.path": make_model(sizes, folder / "model", words=sizes["vocab_size"]),
    }
    found |= TINY if tiny else {"train": "cuda", "cluster": "cuda"}
    found |= COMMON | ({} if tiny else ON_CUDA)
    if case.online:
        found |= sampled(prompt, response, tiny=tiny)
    found |= case.settings
    if case.teacher:
        theirs = MODELS["tiny" if tiny else arguments.teacher]
        found["teacher.path"] = make_teacher(theirs, folder / "teacher", device="cpu" if tiny else "cuda")
    if "teacher.engine.name" in found:
        # To score a sequence an engine samples a token after it.
        found["teacher.engine.max_model_len"] = prompt + response + 1
        if tiny:
            found = {key: value for key, value in found.items() if not key.startswith("teacher.engine.")}
            found["teacher.engine.name"] = "transformers"
    return [*(f"{key}={value}" for key, value in found.items()), *arguments.set]


def sampled(prompt: int, response: int, *, tiny: bool) -> dict[str, Any]:
    """Returns the settings of a loop whose policy writes responses of one length."""
    found: dict[str, Any] = {
        "rollout": "transformers" if tiny else "vllm",
        "rollout.num_engines": 1,
        "rollout.max_tokens": response,
        "rollout.min_tokens": response,
        "data.max_prompt_tokens": prompt,
        "reward.parts.exact_match.name": f"{HERE / 'even_characters.py'}:score",
    }
    engine = {} if tiny else VLLM | {"max_model_len": prompt + response}
    return found | {f"rollout.{key}": value for key, value in engine.items()}


def write(file: Path, records: Iterable[dict[str, Any]], *, tiny: bool) -> None:
    """Writes records, with words that a tiny model's tokenizer has too: none begins like the special tokens."""

    def known(value: Any) -> Any:
        if not tiny or not isinstance(value, str) or not value.startswith("w"):
            return value
        return " ".join(f"w{300 + int(word[1:]) % 600}" for word in value.split())

    lines = (json.dumps({key: known(value) for key, value in record.items()}) + "\n" for record in records)
    file.write_text("".join(lines))


def make_teacher(config: dict[str, Any], folder: Path, *, device: str) -> Path:
    """Returns `folder` with a model of random weights, which the policy's differ from, in bfloat16."""
    make_model(config, folder, words=config["vocab_size"])
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    shapes, centered = family.tensors(architecture), architecture.zero_centered_norms
    draw = partial(random_tensor, zero_centered_norms=centered, seed=TEACHER_SEED, device=device)
    write_checkpoint(folder, ((name, draw(name, shape).bfloat16().cpu()) for name, shape in shapes.items()))
    torch.cuda.empty_cache()
    return folder


def table(cases: Mapping[str, Any]) -> str:
    """Returns the figures in Markdown."""
    lines = [
        "| loop | tokens/s | train tokens/s | train MFU | step, s | phases, s | peak GB by device | start, s |",
        "|---|" + "---:|" * 4 + "---|---:|---:|",
    ]
    for name, case in cases.items():
        if "failed" in case:
            lines.append(f"| {name} | failed: {case['failed'].splitlines()[0][:80]} |" + " |" * 6)
            continue
        values = case["medians"]
        peaks = ", ".join(f"{value / 1e9:.1f}" for value in case["device_peak_bytes"].values())
        cells = [
            name,
            f"{values['throughput/tokens_per_s']:,.0f}",
            f"{values['throughput/train_tokens_per_s_device']:,.0f}",
            shares(values),
            f"{values['time/step_s']:.2f}",
            ", ".join(f"{phase} {value:.2f}" for phase, value in case["phases_s"].items() if value >= SHORTEST_S)
            or "-",
            peaks or "-",
            f"{case['start_s']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shares(values: Mapping[str, float]) -> str:
    """Returns the MFU of the policy's training, and of its critic's."""
    names = ("train", "critic")
    found = {name: values.get(f"throughput/{name}_mfu_fraction") for name in names}
    known = [(name, value) for name, value in found.items() if value is not None]
    return ", ".join(f"{value:.1%}" + (f" ({name})" if name != "train" else "") for name, value in known) or "-"


if __name__ == "__main__":
    main()
