"""Predictions of preflight beside what was measured: memory and seconds of training steps.

    python examples/benchmarks/preflight.py compare --output examples/benchmarks/results/preflight.json
    python examples/benchmarks/preflight.py run qwen3_4b lora_8b dpo_4b --output preflight_run.json

`compare` reads the measured cases of results/train_step_*.json. CALIBRATED of them gave the constants of
rlframe/run/preflight/constants.py, as each constant says; the others were held back from them. All of these files were
there when the formulas were written, so that only `run`, on new configurations, is a blind test. `run` needs as many
GPUs as a case: it prints the prediction for the devices that are there, takes the steps of train_step.py, and prints
what was measured. UNSEEN were configurations without a measurement once, for H200; FROZEN fit 80 GB, and were chosen
after the constants were frozen on 2026-11-25 and before anything was measured of them. fit.py runs them one by one.

Peak is that of torch's tensors (max_memory_allocated), which the prediction without contexts and NCCL stands for.
"""

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlframe.megatron.config.train import TrainConfig
from rlframe.models.hub import FAMILIES
from rlframe.run.preflight import constants, seconds
from rlframe.run.preflight.devices import KINDS, Accelerator, this_machine
from rlframe.run.preflight.parts import Phase
from rlframe.run.preflight.trainer import TrainerMemory
from rlframe.run.preflight.weights import Counter
from rlframe.utils.build import build

RESULTS = Path(__file__).parent / "results"
CALIBRATED = {
    "train_step_qwen3_4b",
    "train_step_qwen3_4b_short",
    "train_step_qwen3_4b_deterministic",
    "train_step_qwen3_4b_fp8",
    "train_step_qwen3_30b_a3b_cut",
    "train_step_qwen3_30b_a3b_cut_cutlass",
    "train_step_qwen3_30b_a3b_cut_products",
    "train_step_qwen3_30b_a3b_ep2_cutlass",
    "train_step_qwen3_30b_a3b_ep2_once",
}
"""Files from which a constant was taken, of memory or of seconds."""
OUTSIDE_TORCH = ("CUDA's context", "NCCL's buffers")
"""Parts that torch does not count."""
FORMER = {"minibatches": "num_minibatches", "epochs": "epochs_per_batch"}
"""Settings of results that have another name since."""
REMOVED = {"offload", "loss_logits_only"}
"""Settings of results that there are no more, all at their defaults."""
UNSEEN: dict[str, dict[str, Any]] = {
    "8b_t2": {"model": "qwen3_8b", "train": {"parallel": "d1t2", "optimizer": {"precision_aware": True}}},
    "8b_p2": {
        "model": "qwen3_8b",
        "train": {"parallel": "d1p2", "recompute": "full", "optimizer": {"precision_aware": True}},
        "microbatches": 4,
    },
    "8b_lora": {"model": "qwen3_8b", "train": {"recompute": "full", "lora": {"rank": 32}}},
    "4b_uniform": {"model": "qwen3_4b", "train": {"recompute": "full", "recompute_options": {"layers": 4}}},
    "4b_mlp": {
        "model": "qwen3_4b",
        "train": {"recompute": "selective", "recompute_options": {"modules": ["mlp"]}},
    },
    "30b_cut_moe": {
        "model": "qwen3_30b_a3b",
        "num_layers": 12,
        "train": {
            "recompute": "selective",
            "recompute_options": {"modules": ["moe"]},
            "optimizer": {"precision_aware": True, "moment_dtype": "bfloat16"},
        },
    },
}
"""Cases of train_step.py, as the fields of its Case."""
SMALL_STATE = {"precision_aware": True, "moment_dtype": "bfloat16"}
"""12 bytes a parameter."""
FROZEN: dict[str, dict[str, Any]] = {
    "1p7b": {
        "model": "qwen3_1p7b",
        "train": {"optimizer": {"precision_aware": True}},
        "lengths": (4096, 2048, 1024, 1024),
        "microbatches": 3,
    },
    "4b_even": {
        "model": "qwen3_4b",
        "train": {"recompute": "full", "optimizer": SMALL_STATE},
        "lengths": (4096,) * 4,
    },
    "4b_blocks_fp8": {
        "model": "qwen3_4b",
        "train": {
            "recompute": "full",
            "optimizer": SMALL_STATE,
            "fp8": {"recipe": "blockwise", "format": "e4m3"},
        },
        "lengths": (8192, 2048, 1024, 1024),
    },
    "8b_lora_64": {
        "model": "qwen3_8b",
        "train": {"recompute": "full", "lora": {"rank": 64}},
        "lengths": (4096,) * 4,
    },
    "30b_cut_5": {
        "model": "qwen3_30b_a3b",
        "num_layers": 5,
        "train": {"optimizer": SMALL_STATE},
        "lengths": (4096,) * 4,
    },
    "8b_t2_80": {
        "model": "qwen3_8b",
        "train": {"parallel": "d1t2", "recompute": "full", "optimizer": SMALL_STATE},
    },
    "30b_cut_ep2": {
        "model": "qwen3_30b_a3b",
        "num_layers": 10,
        "train": {"parallel": "d2|ffn:d1t1e2", "recompute": "full", "optimizer": SMALL_STATE},
        "lengths": (4096,) * 4,
    },
}
"""Cases of train_step.py for devices of 80 GB."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What preflight says of a training step."""

    memory_bytes: float
    train_s: float
    logprobs_s: float


def predict(
    config: Mapping[str, Any],
    train: TrainConfig,
    lengths: list[int],
    microbatches: int,
    device: Accelerator = KINDS["h200"],
) -> Prediction:
    """Returns the prediction for a model of `config`."""
    family = importlib.import_module(f"{FAMILIES}.{config['model_type']}").FAMILY
    architecture = family.architecture(config)
    memory = TrainerMemory(
        role="policy",
        train=train,
        architecture=architecture,
        counter=Counter(family, architecture),
        tokens=sum(lengths),
        microbatches=microbatches,
        sequence_tokens=max(lengths),
    )
    if device.speeds is None:
        raise SystemExit(f"the speeds of {device.name} are not known: --device h100, for example")
    timed = seconds.TrainerSeconds(
        memory=memory, speeds=device.speeds, tokens=sum(lengths), mean_length=seconds.mean_length(lengths)
    )
    parts = memory.process().at(Phase.TRAIN)
    return Prediction(
        memory_bytes=sum(part.bytes for part in parts if part.name not in OUTSIDE_TORCH),
        train_s=timed.optimizer_step() + constants.CALL_S,
        logprobs_s=timed.passes(backward=False) + constants.CALL_S,
    )


def measured() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the file's name and the outcome of every measured training step."""
    for file in sorted(RESULTS.glob("train_step_*.json")):
        for outcome in json.loads(file.read_text())["cases"].values():
            yield file.stem, outcome


def settings(name: str, outcome: Mapping[str, Any]) -> TrainConfig:
    """Returns the settings of a measured step under their present names."""
    values = {FORMER.get(key, key): value for key, value in outcome["train"].items() if key not in REMOVED}
    if "cutlass_experts" not in values["kernels"]:
        # Before the setting existed, CUTLASS was chosen by an environment variable.
        values["kernels"] = values["kernels"] | {"cutlass_experts": name.endswith("_cutlass")}
    # Before these existed, Transformer Engine and Megatron did what they do.
    values["kernels"] = {"expert_products": False, "optimizer_fusion": False} | values["kernels"]
    values["moe"] = {"send_once": False} | values["moe"]
    return build(TrainConfig, values)


def compared(
    name: str, outcome: Mapping[str, Any], train: TrainConfig, device: Accelerator = KINDS["h200"]
) -> dict[str, Any]:
    """Returns predicted and measured values of a step, and the relative errors."""
    found = predict(outcome["config"], train, outcome["lengths"], outcome["microbatches_per_rank"], device)
    pairs = {
        "memory_bytes": (found.memory_bytes, outcome["memory_peak_bytes"]),
        "train_s": (found.train_s, outcome["train_s"]["median"]),
        "logprobs_s": (found.logprobs_s, outcome["logprobs_s"]["median"]),
    }
    row: dict[str, Any] = {"case": name, "calibrated": name in CALIBRATED, "gpus": outcome["gpus"]}
    row["device"] = device.name
    for key, (predicted, value) in pairs.items():
        row[key] = {"predicted": predicted, "measured": value, "error": predicted / value - 1 if value else None}
    return row


def compare() -> list[dict[str, Any]]:
    """Returns the comparison with every measured training step."""
    return [compared(name, outcome, settings(name, outcome)) for name, outcome in measured()]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the comparison in Markdown."""
    lines = [
        "| case | used for constants | GB predicted | measured | error | train s predicted | measured | error | "
        "logprobs s predicted | measured | error |",
        "|---|---|" + "---:|" * 9,
    ]
    for row in rows:
        memory, train, logprobs = (row[key] for key in ("memory_bytes", "train_s", "logprobs_s"))
        cells = [row["case"].removeprefix("train_step_"), "yes" if row["calibrated"] else "no"]
        cells += [f"{memory['predicted'] / 1e9:.1f}", f"{memory['measured'] / 1e9:.1f}", percent(memory["error"])]
        for each in (train, logprobs):
            cells += [f"{each['predicted']:.2f}", f"{each['measured']:.2f}", percent(each["error"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def percent(error: float | None) -> str:
    """Returns a relative error for a table."""
    return "-" if error is None else f"{100 * error:+.1f} %"


def run(names: list[str], device: Accelerator) -> Iterator[dict[str, Any]]:
    """Yields the comparison of cases that are measured now, each printed before and after."""
    # They import Megatron's group and Ray, which `compare` does not need.
    import train_step  # noqa: PLC0415
    from models_by_size import MODELS  # noqa: PLC0415

    for name in names:
        case = train_step.CASES.get(name) or train_step.Case(**(UNSEEN | FROZEN)[name])
        train = train_step.settings(case, [])
        config = MODELS[case.model] | ({"num_hidden_layers": case.num_layers} if case.num_layers else {})
        print(name, "predicted", predict(config, train, list(case.lengths), case.microbatches, device), flush=True)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            outcome = train_step.run_case(case, train, folder, folder / "logs", False, stack, with_floor=False)
        row = compared(name, outcome, train, device) | {"reserved_bytes": outcome["memory_reserved_bytes"]}
        row |= {"all_train_s": outcome["train_s"]["all"], "machine": train_step.machine()}
        print(name, json.dumps(row), flush=True)
        yield row


def main() -> None:
    """Compares, or measures and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["compare", "run"])
    known = ", ".join(UNSEEN | FROZEN)
    parser.add_argument("cases", nargs="*", help=f"for run: cases of train_step.py, or of {known}")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", choices=KINDS, help="for run: kind of device, else this machine's")
    arguments = parser.parse_args()
    if arguments.task == "compare":
        device, rows = KINDS["h200"], compare()
    else:
        device = KINDS[arguments.device] if arguments.device else this_machine()
        rows = list(run(arguments.cases or list(FROZEN), device))
    print(table(rows))
    if arguments.output:
        arguments.output.write_text(json.dumps({"device": device.name, "rows": rows}, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(table(rows) + "\n")


if __name__ == "__main__":
    sys.exit(main())
