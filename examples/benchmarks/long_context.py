"""Seconds and memory of training steps of one long sequence, beside what preflight predicts of them.

    python examples/benchmarks/long_context.py predict
    python examples/benchmarks/long_context.py run 4b_128k_p2p 4b_128k_a2a --output long_context.json
    python examples/benchmarks/long_context.py run 4b_one_gpu --output long_context.json

`predict` needs no GPU and prints every case. `run` needs as many GPUs as a case (`tiny` runs on CPUs): it prints the
prediction, takes WARM_UP + MEASURED steps of GRPO on one sequence with random weights of the published dimensions, and
prints what was measured. A case with several lengths tries them from the shortest, until one does not fit. Predicted
memory is that of torch's tensors, without CUDA's context and NCCL, as is the measured peak. The host's is pinned.
"""

import argparse
import importlib
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models_by_size import MODELS, make_model
from preflight import OUTSIDE_TORCH
from train_step import EXACT, PEAK_FLOPS, Case, machine, make_batch, on_workers, settings, start
from train_step_parts import flops_per_token, peak_memory

from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.config import ModelConfig
from rlframe.models.hub import FAMILIES
from rlframe.run.preflight import seconds
from rlframe.run.preflight.devices import KINDS
from rlframe.run.preflight.parts import Phase
from rlframe.run.preflight.trainer import TrainerMemory
from rlframe.run.preflight.weights import Counter
from rlframe.utils.errors import RlframeError

WARM_UP, MEASURED = 1, 2
K = 1024
LONG: dict[str, Any] = {"recompute": "full", "offload_activations": True, "logits_chunk_tokens": 4096}
"""Settings for long sequences."""


@dataclass(frozen=True, kw_only=True)
class LongCase:
    """A model, its settings, and the lengths to try."""

    model: str = "qwen3_4b"
    train: dict[str, Any] = field(default_factory=lambda: EXACT | LONG)
    lengths: tuple[int, ...] = (128 * K,)


def shared(communication: str, **other: Any) -> dict[str, Any]:
    """Settings of two ranks that share each sequence."""
    return EXACT | LONG | {"parallel": "c2", "context_parallel": {"communication": communication}} | other


CASES = {
    "4b_128k_p2p": LongCase(train=shared("p2p")),
    "4b_128k_a2a": LongCase(train=shared("a2a")),
    "4b_128k_all_gather": LongCase(train=shared("all_gather")),
    "4b_128k_plain": LongCase(train=shared("p2p", offload_activations=False, logits_chunk_tokens=None)),
    "4b_one_gpu": LongCase(lengths=(32 * K, 64 * K, 96 * K, 128 * K, 160 * K, 192 * K, 256 * K)),
    "4b_one_gpu_plain": LongCase(train=EXACT | {"recompute": "full"}, lengths=(32 * K, 64 * K, 96 * K, 128 * K)),
    "tiny": LongCase(model="tiny", train=LONG | {"dtype": "float32", "logits_chunk_tokens": 100}, lengths=(256, 512)),
    "tiny_a2a": LongCase(
        model="tiny",
        train=shared("a2a", dtype="float32", logits_chunk_tokens=100, optimizer={}),
        lengths=(512,),
    ),
}


def config_of(case: LongCase, length: int) -> dict[str, Any]:
    """The model's config.json, with positions for the sequence."""
    config = MODELS[case.model]
    return config | {"max_position_embeddings": max(length, config["max_position_embeddings"])}


def train_of(case: LongCase, length: int) -> TrainConfig:
    """The settings of a sequence of `length` tokens."""
    ranks = Parallel.parse(case.train.get("parallel", "d1")).cp
    budget = {"max_tokens_per_microbatch": -(-length // ranks)}
    return settings(Case(model=case.model, train=case.train | budget), [])


def predict(case: LongCase, length: int) -> dict[str, Any]:
    """What preflight says of a step on H200."""
    train, config = train_of(case, length), config_of(case, length)
    family = importlib.import_module(f"{FAMILIES}.{config['model_type']}").FAMILY
    architecture = family.architecture(config)
    tokens = train.max_tokens_per_microbatch
    memory = TrainerMemory(
        role="policy",
        train=train,
        architecture=architecture,
        counter=Counter(family, architecture),
        tokens=tokens,
        microbatches=1,
        sequence_tokens=length,
    )
    speeds = KINDS["h200"].speeds
    assert speeds is not None
    timed = seconds.TrainerSeconds(memory=memory, speeds=speeds, tokens=tokens, mean_length=length)
    parts = {part.name: part.bytes for part in memory.process().at(Phase.TRAIN) if part.bytes}
    train_s = timed.optimizer_step()
    return {
        "memory_bytes": sum(size for name, size in parts.items() if name not in OUTSIDE_TORCH),
        "with_context_bytes": sum(parts.values()),
        "host_bytes_of_rank": memory.host_activations(),
        "train_s": train_s,
        "mfu": flops_per_token(config, [length]) * length / train_s / memory.parallel.world / PEAK_FLOPS,
        "parts": parts,
    }


def measure(case: LongCase, length: int, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """What the steps cost."""
    train, config = train_of(case, length), config_of(case, length)
    model = ModelConfig(path=str(make_model(config, folder / "model")), random_init=True)
    policy = start(model, train, folder / "logs", stack)
    batch = make_batch(Case(model=case.model, lengths=(length,)), config["vocab_size"], count=1)
    taken = []
    for _ in range(WARM_UP + MEASURED):
        begun = time.perf_counter()
        policy.train(batch)
        taken.append(time.perf_counter() - begun)
    train_s = statistics.median(taken[WARM_UP:])
    memory = on_workers(policy, peak_memory)
    flops = flops_per_token(config, [length]) * length
    return {
        "train_s": train_s,
        "all_s": taken,
        "memory_bytes": max(each["peak_bytes"] for each in memory),
        "reserved_bytes": max(each["reserved_bytes"] for each in memory),
        "tokens_per_s": length / train_s,
        "mfu": flops / train_s / policy.parallel.world / PEAK_FLOPS,
    }


def attempt(case: LongCase, length: int) -> dict[str, Any]:
    """Prediction and measurement of one length, or why it could not be measured."""
    outcome: dict[str, Any] = {"length": length, "predicted": predict(case, length)}
    print(line(length, "predicted", outcome["predicted"]), flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            outcome["measured"] = measure(case, length, folder, stack)
            print(line(length, "measured", outcome["measured"]), flush=True)
        except RlframeError as error:
            outcome["failed"] = f"{error}"[:2000]
            print(f"{length:>8} tokens  failed: {outcome['failed'][:300]}", flush=True)
    return outcome


def line(length: int, what: str, found: dict[str, Any]) -> str:
    """One row: gigabytes, seconds, MFU."""
    host = f", {found['host_bytes_of_rank'] / 1e9:.1f} GB a rank on the host" if "host_bytes_of_rank" in found else ""
    return (
        f"{length:>8} tokens  {what:<10} {found['memory_bytes'] / 1e9:7.1f} GB a rank{host}, "
        f"{found['train_s']:.2f} s a step, MFU {100 * found['mfu']:.1f} %"
    )


def main() -> None:
    """Predicts, or measures and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["predict", "run"])
    parser.add_argument("cases", nargs="*", help=f"all if none is named: {', '.join(CASES)}")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - set(CASES)):
        parser.error(f"cases must be of {', '.join(CASES)}, got {', '.join(unknown)}")
    result: dict[str, Any] = {"machine": machine(), "cases": {}}
    for name in arguments.cases or CASES:
        print(name, flush=True)
        case, outcomes = CASES[name], []
        for length in case.lengths:
            if arguments.task == "predict":
                outcomes.append({"length": length, "predicted": predict(case, length)})
                print(line(length, "predicted", outcomes[-1]["predicted"]), flush=True)
                continue
            outcomes.append(attempt(case, length))
            if "failed" in outcomes[-1]:
                break
        result["cases"][name] = outcomes
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
