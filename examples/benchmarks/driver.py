"""What the driver does between phases: packing a step's rollouts, cutting it for the ranks, and handing it over.

Run: `python examples/benchmarks/driver.py [ROLLOUTS] [TOKENS]`; 512 rollouts of 8,192 tokens by default. Prints JSON
and writes it to `results/driver.json`.

Handing over is measured twice: round after round, which is into memory that no step has used, as in a run's first
step; and with pauses, in which Ray takes back what the round before used, as in all later steps. The floor of each is a
copy of the same bytes in this process, into new memory and into used memory. The bytes are those of the batch: the
weights of its tokens, which travel too, are not counted.
"""

import json
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import ray
import torch

from rlframe.megatron.messages.microbatch import Share, optimizer_steps, split
from rlframe.ops.packing import pack
from rlframe.types.batch import Batch
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, Group, Rollout

RESULT = Path(__file__).parent / "results/driver.json"
GROUP_SIZE, NUM_RANKS, MINIBATCHES, ROUNDS = 8, 8, 4, 5
TAKEN_BACK_S = 3.0
"""Seconds after which Ray has taken back the memory of objects that are gone: it does so once a second."""


def rollouts(count: int, length: int) -> list[Group]:
    """Returns groups of rollouts whose prompt is an eighth of their tokens."""
    random = np.random.default_rng(0)
    groups = []
    for index in range(count // GROUP_SIZE):
        prompt = Prompt(id=str(index), text="", input=ModelInput(()))
        made = [
            Rollout(
                prompt=prompt,
                sample_index=sample,
                input=ModelInput(random.integers(0, 150_000, length, dtype=np.int32)),
                loss_mask=np.arange(length) >= length // 8,
                rollout_logprobs=-random.random(length, dtype=np.float32),
                versions=np.zeros(length, dtype=np.int32),
                finish_reason=FinishReason.STOP,
            )
            for sample in range(GROUP_SIZE)
        ]
        groups.append(Group(id=str(index), prompt=prompt, rollouts=made))
    return groups


def cut(batch: Batch) -> list[list[Share]]:
    """Returns the share of each optimizer step by rank, as the policy's group makes them."""
    limit = int(batch.lengths.max())
    parts = optimizer_steps(batch, num_minibatches=MINIBATCHES, epochs_per_batch=1)
    steps = [batch.part(indices.start, indices.stop) for indices in parts]
    found = [split(step, torch.ones(step.num_tokens), num_ranks=NUM_RANKS, max_tokens=limit)[0] for step in steps]
    return [[step[rank] for step in found] for rank in range(NUM_RANKS)]


def median_s(work: Callable[[], object], *, pause_s: float = 0.0) -> float:
    """Returns the median seconds of some rounds of `work`, with a pause before each."""
    seconds = []
    for _ in range(ROUNDS):
        time.sleep(pause_s)
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def main() -> None:
    """Measures and prints."""
    count, length = (int(argument) for argument in (sys.argv[1:] or ["512", "8192"]))
    tracemalloc.start()
    groups = rollouts(count, length)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    batch = pack(groups)
    tensors = [value for known in fields(batch) if isinstance(value := getattr(batch, known.name), torch.Tensor)]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    shares = cut(batch)
    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=4 * num_bytes + (256 << 20))
    packing_s, cutting_s = median_s(lambda: pack(groups)), median_s(lambda: cut(batch))

    def hand_over() -> None:
        for share in shares:
            ray.put(share)

    first_s, later_s = median_s(hand_over), median_s(hand_over, pause_s=TAKEN_BACK_S)
    arrays = [tensor.numpy().reshape(-1).view(np.uint8) for tensor in tensors]
    used = np.zeros(num_bytes, dtype=np.uint8)
    content = {
        "command": " ".join(["python examples/benchmarks/driver.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, two cores, torch {torch.__version__}, ray {ray.__version__}",
        "tokens": batch.num_tokens,
        "batch_bytes": num_bytes,
        "held_bytes_per_token": held_bytes / batch.num_tokens,
        "packing_tokens_per_s": batch.num_tokens / packing_s,
        "cutting_tokens_per_s": batch.num_tokens / cutting_s,
        "handing_over_bytes_per_s": num_bytes / first_s,
        "copy_bytes_per_s": num_bytes / median_s(lambda: np.concatenate(arrays)),
        "handing_over_again_bytes_per_s": num_bytes / later_s,
        "copy_again_bytes_per_s": num_bytes / median_s(lambda: np.concatenate(arrays, out=used)),
    }
    text = json.dumps(content, indent=1) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
