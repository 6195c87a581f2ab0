"""Tokens a second, MFU and memory of full training steps on GPUs, beside the speed of matrix products in the same run.

    python examples/benchmarks/train_step.py qwen3_4b --output result.json
    python examples/benchmarks/train_step.py qwen3_4b --profile --set recompute=full

A case starts the policy's Ray workers as a run does (random weights of the published dimensions, GRPO) and times
`PolicyGroup.train` and `PolicyGroup.logprobs` on the driver: forward, backward, gradient sums, clipping, AdamW, and the
hand-over of the batch. LENGTHS are packed into micro-batches of 16,384 tokens without a gap. MFU counts real tokens,
causal attention, forward and twice that for backward, no recompute, no embedding look-up, against 989 TFLOP/s:

    FLOP a token = 3 * { L*[2*(2*h*heads*d + 2*h*kv*d) + 2*MLP + 2*s*heads*d] + 2*h*V }, s = sum(len^2) / sum(len)

Predicted before any of it was measured (2026-11-22). s = 5,472, so Qwen3-4B takes 24.1 + 4.8 GFLOP a token, 475 TFLOP a
micro-batch. At 700 TFLOP/s for matrix products 0.57 s, at 400 for attention 0.20, 0.09 for norms, rotary, SwiGLU and
residuals (300 GB at 3.5 TB/s), 0.01 for the loss, 0.03 for a step's AdamW over two micro-batches: 0.89 s, 54 %; less
8 % for gaps, 50 %. Qwen3-8B on four GPUs: 1.06 + 0.20 + 0.13 + 0.09 (8 of 36 layers twice forward) + 0.05 = 1.53 s for
823 TFLOP, 54 %; less gaps, 50 %. Qwen3-30B-A3B, EP4: dense products 0.19, experts' 0.40 (450 TFLOP/s), attention 0.26,
40 of 48 layers twice forward 0.24, permutation 0.18, all-to-all 0.28, router and AdamW 0.08, gaps 0.10: 1.73 s for 405
TFLOP, 24 %; less uneven experts of random weights, 19 %, 7,600 tokens/s a GPU. Logprobs over train: 0.33 and a little.
Measured, by micro-batch: 0.98 s, 49 %; 1.64 s, 51 %; 1.86 s, 22 %, 8,786 tokens/s a GPU. Ratios 0.32, 0.29, 0.28.

Predicted later, from profiles of qwen3_30b_a3b_cut. Half of its 48 layers on two GPUs (ep2): the GPU is busy for 1.6 s,
0.2 of it all-to-all (268 MB a pass at 337 GB/s), but the cut's 18,800 launches, 1.6 s, become 30,700: 2.6 s, 12,600
tokens/s a GPU, 17 %. With CUTLASS 13,500 launches where the cut has 9,300 in 1.15 s: 1.9 s, 17,200 tokens/s, 23 %.
Deterministic mode at 16 micro-batches of 2,048 tokens: without it 1.15 s of products, 0.1 of attention, 0.33 of the
rest, gaps: 1.75 s, so that it costs 2.1 times the seconds. Measured: 3.04 s and 1.81 with CUTLASS; 2.93 s without
deterministic mode, as micro-batches of 2,048 tokens wait for launches (28 % MFU, 49 at 16,384), and 3.83 with it, 1.31
times.

Predicted by preflight with an H200's speeds (2026-11-25), before any gated delta net was measured: qwen3_5_9b_cut 99
GB, 1.21 s, 61 %; qwen3_5_35b_a3b_cut 121 GB, 0.86 s, 24 %; qwen3_5_9b_80gb 63 GB, 0.89 s, 62 %; qwen3_5_35b_a3b_80gb 67
GB, 0.63 s, 28 %. It takes the delta rule for attention of the same operations, which is too fast for kernels of 64
tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from async_rl_engine import draw_length
from models_by_size import MODELS, make_model
from train_step_parts import (
    flops_per_token,
    peak_memory,
    start_operations,
    start_profile,
    stop_operations,
    stop_profile,
)

from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.cluster import runtime
from rlframe.cluster.config import ClusterConfig, Device
from rlframe.cluster.placement import reserve
from rlframe.cluster.roles import Topology
from rlframe.cluster.roles import policy as policy_role
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.cpu import platform
from rlframe.megatron.driver.policy import PolicyGroup
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.models.config import ModelConfig
from rlframe.types.batch import TrainBatch
from rlframe.utils.build import as_dict, build

PEAK_FLOPS = 989e12
"""bfloat16, dense, of one H100 or H200 by its data sheet."""
LENGTHS = (8192, 4096, 2048, 1024, 512, 512)
"""Tokens of the sequences of one micro-batch: 16,384."""
LENGTHS_8K = (4096, 2048, 1024, 512, 256, 256)
LENGTHS_12K = (6144, 3072, 1536, 768, 384, 384)
"""The same, scaled, where memory asks."""
MIXED = (8192, 8192, 4096, 4096, 2048, 2048, 2048, 2048)
"""32,768 tokens for two ranks of context parallelism, each of which may take half of them in whole sequences."""
SHORT = (1024, 1024)
"""For deterministic mode: on Hopper cuDNN's deterministic attention (9.19) of packed sequences takes memory for
sequences * heads * (tokens of the micro-batch)^2 floats; at 16,384 tokens it asked for 512 GiB."""
WARM_UP, MEASURED = 3, 5
MOST_FLOOR_TOKENS = 65536
"""Of products that are measured beside the step: logits of more would not fit."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and how it is trained."""

    model: str
    num_layers: int | None = None
    """Layers of a model that was cut; the published number when None."""
    train: dict[str, Any] = field(default_factory=dict)
    """What differs from TrainConfig's defaults."""
    lengths: tuple[int, ...] = LENGTHS
    microbatches: int = 2
    """Per rank and optimizer step."""
    groups: int = 1
    """Groups of a micro-batch."""
    prompt: int = 0
    """Tokens that the sequences of a group begin with."""


def bf16_moments(**other: Any) -> dict[str, Any]:
    """12 bytes a parameter where gradients are float32: 2, 4, 2 of main weights, 4 of moments."""
    return {"optimizer": {"precision_aware": True, "moment_dtype": "bfloat16"}} | other


def block(layers: int) -> dict[str, Any]:
    """The first `layers` layers of each rank are computed twice forward, as memory asks."""
    return {"recompute": "full", "recompute_options": {"method": "block", "layers": layers}}


def mixed(*, dynamic: bool) -> dict[str, Any]:
    """Two ranks share sequences, or take whole ones."""
    sharing = {"parallel": "c2", "context_parallel": {"dynamic": dynamic}, "max_tokens_per_microbatch": sum(MIXED) // 2}
    return bf16_moments(**block(24), **sharing)


def tail_lengths() -> tuple[int, ...]:
    """Eight groups of eight responses to prompts of 4,096 tokens, lognormal with a mean of 400, at most 2,048 long."""
    generator = np.random.default_rng(0)
    return tuple(4096 + draw_length(generator, 400.0, 1.0, 2048) for _ in range(64))


EXACT = {"optimizer": {"precision_aware": True}}
"""Float32 moments and main weights, the latter without the bits that the parameters have: 16 bytes a parameter."""
CASES = {
    # The workload `equal` of step_vs_peers.py, as its settings divide it.
    "qwen3_1p7b_equal": Case(
        model="qwen3_1p7b",
        train={"share_prompts": True, "max_tokens_per_microbatch": 8704},
        lengths=(682,) * 16,
        microbatches=16,
        groups=2,
        prompt=170,
    ),
    # Its workload `tail`, as long in every step.
    "qwen3_1p7b_tail": Case(
        model="qwen3_1p7b",
        train={"share_prompts": True, "max_tokens_per_microbatch": 8704},
        lengths=tail_lengths(),
        microbatches=1,
        groups=8,
        prompt=4096,
    ),
    "qwen3_4b": Case(model="qwen3_4b", train=EXACT),
    "qwen3_4b_short": Case(model="qwen3_4b", train=EXACT, lengths=SHORT, microbatches=16),
    "qwen3_4b_deterministic": Case(
        model="qwen3_4b", train=EXACT | {"deterministic": True}, lengths=SHORT, microbatches=16
    ),
    "qwen3_4b_c2": Case(model="qwen3_4b", train=mixed(dynamic=False), lengths=MIXED),
    "qwen3_4b_c2_dynamic": Case(model="qwen3_4b", train=mixed(dynamic=True), lengths=MIXED),
    "qwen3_4b_fp8": Case(model="qwen3_4b", train=EXACT | {"fp8": {"recipe": "blockwise", "format": "e4m3"}}),
    "qwen3_8b_1gpu": Case(model="qwen3_8b", train=bf16_moments(**block(26))),
    "qwen3_8b": Case(
        model="qwen3_8b",
        train=EXACT | block(8) | {"parallel": "d4", "communication": {"overlap_grad_reduce": True}},
    ),
    "qwen3_30b_a3b_cut": Case(model="qwen3_30b_a3b", num_layers=12, train=bf16_moments()),
    "qwen3_30b_a3b_ep2": Case(
        model="qwen3_30b_a3b", num_layers=24, train=bf16_moments(**block(8), parallel="d2|ffn:d1t1e2")
    ),
    "qwen3_30b_a3b_ep4": Case(model="qwen3_30b_a3b", train=bf16_moments(**block(40), parallel="d4|ffn:d1t1e4")),
    # Whole intervals of three gated delta nets and one attention layer.
    "qwen3_5_9b_cut": Case(model="qwen3_5_9b", num_layers=12, train=bf16_moments()),
    "qwen3_5_35b_a3b_cut": Case(model="qwen3_5_35b_a3b", num_layers=8, train=bf16_moments()),
    "qwen3_5_9b_80gb": Case(model="qwen3_5_9b", num_layers=8, train=bf16_moments(), lengths=LENGTHS_8K, microbatches=4),
    "qwen3_5_35b_a3b_80gb": Case(
        model="qwen3_5_35b_a3b", num_layers=4, train=bf16_moments(), lengths=LENGTHS_12K, microbatches=3
    ),
    # On 80 GB, to compare releases with.
    "qwen3_4b_80gb": Case(model="qwen3_4b", train=bf16_moments(**block(30))),
    "qwen3_8b_80gb": Case(model="qwen3_8b", num_layers=12, train=bf16_moments(**block(4))),
    "qwen3_30b_a3b_80gb": Case(model="qwen3_30b_a3b", num_layers=5, train=bf16_moments()),
    "tiny_qwen3_5": Case(model="tiny_qwen3_5_moe", train={"dtype": "float32"}, lengths=(96, 32)),
    "tiny": Case(model="tiny_moe", train={"dtype": "float32"}, lengths=(96, 32)),
    "tiny_equal": Case(
        model="tiny_moe",
        train={"dtype": "float32", "share_prompts": True, "max_tokens_per_microbatch": 96},
        lengths=(24,) * 4,
        groups=2,
        prompt=8,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--output", type=Path, default=Path("train_step.json"))
    parser.add_argument("--logs", type=Path, default=None, help="folder for the workers' logs")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of TrainConfig, YAML values"
    )
    parser.add_argument("--profile", action="store_true", help="two more steps, by group of kernels and by operation")
    parser.add_argument("--warm-up", action="store_true", help="warm the ranks up first, as a run with engines does")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "peak_tflops": PEAK_FLOPS / 1e12, "cases": {}}
    print(json.dumps(result["machine"]), flush=True)
    for name in arguments.cases:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            train = settings(CASES[name], arguments.set)
            logs, options = arguments.logs or folder / "logs", {"warm_up": arguments.warm_up}
            outcome = run_case(CASES[name], train, folder, logs, arguments.profile, stack, **options)
        result["cases"][name] = outcome
        print(name, json.dumps(outcome), flush=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def settings(case: Case, overrides: list[str]) -> TrainConfig:
    """The case's TrainConfig with `key.of.a.field=value` put into it."""
    merged = json.loads(json.dumps(case.train))
    for override in overrides:
        key, _, value = override.partition("=")
        *sections, leaf = key.split(".")
        place = merged
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = yaml.safe_load(value)
    return build(TrainConfig, {"max_tokens_per_microbatch": sum(case.lengths)} | merged)


def run_case(
    case: Case,
    train: TrainConfig,
    folder: Path,
    logs: Path,
    profile: bool,
    stack: ExitStack,
    *,
    with_floor: bool = True,
    warm_up: bool = False,
) -> dict[str, Any]:
    """Start the policy, take the steps, and say what they cost."""
    config = MODELS[case.model] | ({"num_hidden_layers": case.num_layers} if case.num_layers else {})
    world, dp = Parallel.parse(train.parallel).world, Parallel.parse(train.parallel).dp
    tokens = sum(case.lengths) * case.microbatches * dp
    with_floor = with_floor and torch.cuda.is_available() and sum(case.lengths) <= MOST_FLOOR_TOKENS
    floor = matmul_floor(config, sum(case.lengths)) if with_floor else {}
    begun = time.perf_counter()
    policy = start(ModelConfig(path=str(make_model(config, folder / "model")), random_init=True), train, logs, stack)
    start_s = time.perf_counter() - begun
    batch = make_batch(case, config["vocab_size"], count=case.microbatches * dp)
    warm_up_s = warmed_up(policy) if warm_up else None
    first_train_s, train_s = timed(lambda: policy.train(batch))
    first_logprobs_s, logprobs_s = timed(lambda: policy.logprobs(batch))
    flops = flops_per_token(config, case.lengths)
    seconds = statistics.median(train_s)
    memory = on_workers(policy, peak_memory)
    outcome = {
        "model": case.model,
        "config": config,
        "train": as_dict(train),
        "lengths": list(case.lengths),
        "microbatches_per_rank": case.microbatches,
        "gpus": world,
        "start_s": start_s,
        "warm_up_s": warm_up_s,
        "first_train_s": first_train_s,
        "first_logprobs_s": first_logprobs_s,
        "train_s": {"median": seconds, "best": min(train_s), "all": train_s},
        "logprobs_s": {"median": statistics.median(logprobs_s), "best": min(logprobs_s)},
        "logprobs_over_train": statistics.median(logprobs_s) / seconds,
        "tokens_per_s_per_gpu": tokens / seconds / world,
        "flops_per_token": flops,
        "tflops_per_gpu": flops * tokens / seconds / world / 1e12,
        "mfu": flops * tokens / seconds / world / PEAK_FLOPS,
        "memory_peak_bytes": max(each["peak_bytes"] for each in memory),
        "memory_reserved_bytes": max(each["reserved_bytes"] for each in memory),
        "matmul_floor": floor,
    }
    if profile:
        recorders = {"profile": (start_profile, stop_profile), "operations": (start_operations, stop_operations)}
        for name, (begin, end) in recorders.items():
            on_workers(policy, begin)
            policy.train(batch)
            outcome[name] = on_workers(policy, end)[0]
    return outcome


def start(model: ModelConfig, train: TrainConfig, logs: Path, stack: ExitStack) -> PolicyGroup:
    """The policy's workers, as a run starts them."""
    world = Parallel.parse(train.parallel).world
    cluster = ClusterConfig()
    stack.enter_context(runtime.running(cluster, num_devices=world))
    gpu = torch.cuda.is_available()
    placement = reserve(Topology((policy_role(world),)), gpu=gpu, timeout_s=cluster.start_timeout_s)
    stack.callback(placement.release)
    policy = PolicyGroup(
        TrainerSetup(
            model=model,
            train=train,
            device=platform.resolve(Device.AUTO),
            timeout_s=540,
            seed=0,
            temperature=1.0,
            total_optimizer_steps=100,
            with_reference=False,
        ),
        Grpo(GrpoConfig(group_size=len(LENGTHS))),
        slots=placement.policy,
        log_folder=str(logs),
        # As many as in a run.
        num_threads=max(1, (os.cpu_count() or 1) // world) if gpu else 1,
        start_timeout_s=540,
        call_timeout_s=540,
    )
    policy.start()
    stack.callback(policy.workers.stop)
    return policy


def make_batch(case: Case, vocab_size: int, *, count: int) -> TrainBatch:
    """`count` micro-batches of the case's lengths and groups, rollouts with random tokens and advantages."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor(case.lengths * count)
    total = int(lengths.sum())
    token_ids = torch.randint(0, vocab_size, (total,), generator=generator)
    begins = torch.cumsum(lengths, 0) - lengths
    group = torch.arange(case.groups * count).repeat_interleave(len(case.lengths) // case.groups)
    prompts = begins[:, None] + torch.arange(max(1, case.prompt))
    mask = torch.ones(total, dtype=torch.bool)
    mask[prompts] = False
    if case.prompt:
        token_ids[prompts] = token_ids[prompts[:: len(case.lengths) // case.groups]][group]
    return TrainBatch(
        token_ids=token_ids,
        lengths=lengths,
        loss_mask=mask,
        rollout_logprobs=torch.full((total,), -1.0) * mask,
        group=group,
        rewards=torch.rand(len(lengths), generator=generator),
        versions=torch.zeros(total, dtype=torch.int64),
        advantages=torch.randn(total, generator=generator) * mask,
    )


def warmed_up(policy: PolicyGroup) -> float:
    """Seconds in which all ranks have warmed up."""
    begun = time.perf_counter()
    policy.warm_up()
    # A rank's calls come in their order.
    on_workers(policy, peak_memory)
    return time.perf_counter() - begun


def timed(call: Any) -> tuple[float, list[float]]:
    """Seconds of the first call, in which kernels are compiled and libraries begin, and of each of MEASURED calls after
    WARM_UP."""
    seconds = []
    for _ in range(WARM_UP + MEASURED):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds[0], seconds[WARM_UP:]


def on_workers(policy: PolicyGroup, function: Any) -> list[Any]:
    """`function(worker)` in each of the policy's processes."""
    actors = policy.workers.actors
    return policy.workers.wait([actor.__ray_call__.remote(function) for actor in actors], doing=function.__name__)


def matmul_floor(config: dict[str, Any], tokens: int) -> dict[str, float]:
    """See train_step_parts.matmul_floor; in a process of its own, whose memory is gone when it ends."""
    command = [sys.executable, str(Path(__file__).with_name("train_step_parts.py")), json.dumps(config), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    packages = {}
    for name in ("torch", "megatron-core", "transformer-engine", "triton", "fla-core", "ray"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": gpus, "packages": packages, "date": datetime.now(UTC).isoformat(timespec="seconds")}


if __name__ == "__main__":
    main()
