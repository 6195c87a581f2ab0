"""Seconds of forward and backward where a group's prompt is computed once (`train.share_prompts`), and where not.

    python examples/benchmarks/shared_prompts.py                                  # small shapes, any machine
    python examples/benchmarks/shared_prompts.py --model qwen3_1p7b --full        # one GPU: the shapes of FULL

One rank, in this process, without Ray: gradients of GRPO's loss over two groups, and logprobs, in micro-batches of the
given budget, in turns with and without sharing. No optimizer step is in the times. The gradients of both are compared:
`gradient_difference` is the norm of their difference over the norm of the plain ones, and `repeated` that of two plain
passes with the groups in another order, which is rounding alone. Prints a line for each shape and writes JSON.

    python examples/benchmarks/shared_prompts.py --model qwen3_1p7b --exact

compares the gradients of both, in bfloat16, with those of the same weights in float32 and without sharing, tensor by
tensor: `plain` and `shared` are norms of the difference over those of the float32 ones. Nothing is timed. Without a
fused kernel attention holds its probabilities in float32, so that the shapes of FULL do not fit a device.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from models_by_size import MODELS, QWEN3, make_model

from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.cluster.config import Device
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.cpu import platform
from rlframe.megatron.messages.microbatch import Microbatch, split
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.models.config import ModelConfig
from rlframe.types.batch import TrainBatch

FULL = ((4096, 512, 8), (128, 1024, 8))
"""Tokens of the prompt, tokens of a response, responses of a group."""
SMALL = ((512, 64, 8), (16, 128, 8))
"""The same, an eighth as long."""
TINY = QWEN3 | {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
GROUPS = 2
ALGORITHM = Grpo(GrpoConfig())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", *MODELS], default="tiny")
    parser.add_argument("--full", action="store_true", help="shapes of the issue instead of an eighth of them")
    parser.add_argument("--exact", action="store_true", help="compare gradients with those in float32")
    parser.add_argument("--budget", type=int, default=None, help="max_tokens_per_microbatch; a plain group by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/shared_prompts.json")
    arguments = parser.parse_args()
    device = platform.resolve(Device.AUTO)
    platform.install(device)
    config = TINY if arguments.model == "tiny" else MODELS[arguments.model]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(config, Path(folder) / "model")
        shapes = FULL if arguments.full else SMALL
        if arguments.exact:
            found = exact(path, device, config["vocab_size"], shapes)
        else:
            with trainer(path, device, share=True) as rank:
                for shape in shapes:
                    found.append(measure(rank, config["vocab_size"], shape, arguments.budget, arguments.rounds))
                    print(json.dumps(found[-1]), flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    arguments.output.write_text(
        json.dumps({"device": name, "model": arguments.model, "shapes": found}, indent=1) + "\n"
    )


@contextmanager
def trainer(path: Path, device: torch.device, *, share: bool, dtype: Dtype | None = None) -> Iterator[Any]:
    """The one rank of a policy.

    Args:
        share: whether it can compute micro-batches that share prompts.
        dtype: number format of its weights; by default bfloat16 on CUDA and float32 on CPUs.
    """
    from rlframe.megatron.worker import environment, parallel  # noqa: PLC0415 - the platform comes first
    from rlframe.megatron.worker.trainer import Trainer  # noqa: PLC0415

    usual = Dtype.BFLOAT16 if device.type == "cuda" else Dtype.FLOAT32
    train = TrainConfig(dtype=dtype or usual, share_prompts=share)
    environment.prepare(train)
    with tempfile.NamedTemporaryFile() as meeting:
        yield Trainer(
            TrainerSetup(
                model=ModelConfig(path=str(path), random_init=True),
                train=train,
                device=device,
                timeout_s=540,
                seed=0,
                temperature=1.0,
                total_optimizer_steps=1,
                with_reference=False,
                init_method=f"file://{meeting.name}",
            )
        )
        parallel.shutdown()


def measure(rank: Any, vocab_size: int, shape: tuple[int, int, int], budget: int | None, rounds: int) -> dict[str, Any]:
    """Seconds of both kinds of a shape, in turns, and how far their gradients are apart."""
    prompt, response, size = shape
    budget = budget or (prompt + response) * size
    batch = make_batch(vocab_size, prompt, response, size)
    kinds = {"plain": micro(batch, budget, share=False), "shared": micro(batch, budget, share=True)}
    passes: dict[str, list[float]] = {name: [] for name in kinds}
    scores: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(1 + rounds):
        for name, microbatches in kinds.items():
            passes[name].append(seconds(lambda each=microbatches: gradients(rank, each)))
            scores[name].append(seconds(lambda each=microbatches: rank.logprobs(each, reference=False)))
    reordered = micro(batch.select(list(reversed(range(batch.num_sequences)))), budget, share=False)
    plain, shared, again = (
        gradients(rank, each).float().cpu().clone() for each in (kinds["plain"], kinds["shared"], reordered)
    )
    medians = {name: statistics.median(found[1:]) for name, found in passes.items()}
    tokens = {name: sum(computed(each) for each in found) for name, found in kinds.items()}
    return {
        "prompt, response, group": shape,
        "budget": budget,
        "tokens": tokens,
        "train_s": medians,
        "train_speedup": medians["plain"] / medians["shared"],
        "logprobs_s": {name: statistics.median(found[1:]) for name, found in scores.items()},
        "gradient_difference": difference(shared, plain),
        "repeated": difference(again, plain),
    }


def exact(path: Path, device: torch.device, vocab_size: int, shapes: Any) -> list[dict[str, Any]]:
    """How far the gradients in bfloat16 are from those in float32, of each shape, with sharing and without."""
    batches = {shape: make_batch(vocab_size, *shape) for shape in shapes}

    def by_name(rank: Any, shape: tuple[int, int, int], *, share: bool) -> dict[str, torch.Tensor]:
        prompt, response, size = shape
        gradients(rank, micro(batches[shape], (prompt + response) * size, share=share))
        named = rank.model.chunks[0].module.named_parameters()
        return {name: value.main_grad.float().cpu().clone() for name, value in named}

    with trainer(path, device, share=True, dtype=Dtype.BFLOAT16) as rank:
        weights = {name: value.detach().cpu().clone() for name, value in rank.model.chunks[0].module.named_parameters()}
        rounded = {(shape, share): by_name(rank, shape, share=share) for shape in shapes for share in (False, True)}
    del rank  # its memory is free for the next one
    found = []
    with trainer(path, device, share=False, dtype=Dtype.FLOAT32) as rank, torch.no_grad():
        for name, value in rank.model.chunks[0].module.named_parameters():
            value.copy_(weights[name])
        for shape in shapes:
            with torch.enable_grad():
                right = by_name(rank, shape, share=False)
            plain, shared = rounded[shape, False], rounded[shape, True]
            errors = {"plain": apart(plain, right), "shared": apart(shared, right), "both": apart(shared, plain)}
            found.append({"prompt, response, group": shape} | errors)
            print(json.dumps(found[-1]), flush=True)
    return found


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Norm of the difference over the norm of the other: of all tensors together, and of the one where it is most."""
    each = {name: difference(one[name], value) for name, value in other.items()}
    worst = max(each, key=lambda name: each[name])
    together = difference(*(torch.cat([values[name].flatten() for name in other]) for values in (one, other)))
    return {"together": together, "worst": each[worst], "worst_tensor": worst}


def make_batch(vocab_size: int, prompt: int, response: int, size: int) -> TrainBatch:
    """GROUPS groups of random tokens whose rollouts have their prompt in common."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(0, vocab_size, (count,), generator=generator)

    prompts = [tokens(prompt) for _ in range(GROUPS)]
    rows = [torch.cat([own, tokens(response)]) for own in prompts for _ in range(size)]
    mask = torch.arange(prompt + response).repeat(len(rows)) % (prompt + response) >= prompt
    return TrainBatch(
        token_ids=torch.cat(rows),
        lengths=torch.tensor([len(row) for row in rows]),
        loss_mask=mask,
        rollout_logprobs=torch.full((len(mask),), -5.0) * mask,
        group=torch.arange(GROUPS).repeat_interleave(size),
        rewards=torch.zeros(len(rows)),
        versions=torch.zeros(len(mask), dtype=torch.int32),
        advantages=torch.randn(len(mask), generator=generator) * mask,
    )


def micro(batch: TrainBatch, budget: int, *, share: bool) -> list[Microbatch]:
    """The micro-batches of the one rank."""
    weights = ALGORITHM.token_weights(batch)
    ((own,), _) = split(batch, weights, num_ranks=1, max_tokens=budget, share_prompts=share)
    return own.microbatches()


def computed(microbatch: Microbatch) -> int:
    """Tokens that a forward pass computes."""
    shared = microbatch.batch.shared
    return microbatch.batch.num_tokens - (0 if shared is None else int(shared.sum()))


def gradients(rank: Any, microbatches: list[Microbatch]) -> torch.Tensor:
    """All gradients as one vector, in the order of the buffers, until the next call."""
    from rlframe.megatron.model import forward  # noqa: PLC0415 - the platform comes first

    forward.accumulate_gradients(rank.model, microbatches, ALGORITHM, temperature=1.0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return rank.model.chunks[0].buffers[0].grad_data


def seconds(call: Callable[[], Any]) -> float:
    """Seconds of a call, whose work is complete when it returns."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Norm of the difference over the norm of the other."""
    return float((one - other).norm() / other.norm())


if __name__ == "__main__":
    main()
