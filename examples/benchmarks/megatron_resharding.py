"""Seconds that Megatron-Core's own resharding takes between two Megatron models, for comparison with `weight_sync.py`.

    python examples/benchmarks/megatron_resharding.py qwen3_30b_a3b --ranks 2 --output result.json
    python examples/benchmarks/megatron_resharding.py tiny_moe --ranks 2 --device cpu

`megatron.core.resharding.swap_model_weights` moves the weights of one Megatron model into another of another layout on
the same ranks. It cannot fill vLLM's parameters; what it is compared with is the same model and the same change of
layout through rlframe's channel. Every parameter is compared, bit for bit, with what rlframe's own loader puts there.
"""

import argparse
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from models_by_size import MODELS, make_model

from rlframe.cluster.config import Device
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.cpu import platform
from rlframe.models.hub import load_family, read_config
from rlframe.models.random_init import random_tensor
from rlframe.models.shards import padded_vocab_size, shards_of_rank
from rlframe.weight_sync.layout.memory import clear_padding, load_tensor, record

REPEATS = 4
"""Swaps of a pair of layouts; the first, which plans, is reported on its own."""


def pairs(ranks: int) -> list[tuple[str, str]]:
    """(from, to): experts aligned, then experts cut by rows."""
    source = f"d{ranks}|ffn:d1t1e{ranks}"
    return [(source, f"d1t{ranks}|ffn:d1t1e{ranks}"), (source, f"d1t{ranks}|ffn:d1t{ranks}e1")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, default=Path("megatron_resharding.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(MODELS[arguments.model], Path(name))
        processes.spawn(  # type: ignore[no-untyped-call]
            on_rank, (arguments.ranks, arguments.device, folder, arguments.output), nprocs=arguments.ranks
        )
    print(arguments.output.read_text())


def on_rank(rank: int, ranks: int, kind: str, folder: Path, output: Path) -> None:
    """All pairs of layouts on one rank; rank 0 writes the result."""
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    platform.install(platform.resolve(Device.CPU) if kind == "cpu" else device)
    backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    results = []
    for source, target in pairs(ranks):
        results.append({"from": source, "to": target} | measure(rank, source, target, folder, device))
        if rank == 0:
            print(json.dumps(results[-1]), flush=True)
            output.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


def measure(rank: int, source: str, target: str, folder: Path, device: torch.device) -> dict[str, Any]:
    """Seconds of the first swap, which plans, and of the later ones; and how many parameters arrived."""
    from megatron.core.resharding.refit import swap_model_weights  # noqa: PLC0415 - after `platform.install`

    there, parameters = build(rank, source, folder, device)
    here, wanted = build(rank, target, folder, device)
    expected = {name: value.to("cpu", copy=True) for name, value in wanted.items()}
    for value in wanted.values():
        value.zero_()
    seconds: list[float] = []
    try:
        for _ in range(REPEATS):
            dist.barrier()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            swap_model_weights(there, here, "gloo" if device.type == "cpu" else "nccl")
            torch.cuda.synchronize()
            dist.barrier()
            seconds.append(time.perf_counter() - begun)
    except (RuntimeError, NotImplementedError) as error:
        return {"refused": str(error).splitlines()[0]}
    wrong = [name for name, value in wanted.items() if not torch.equal(value.cpu(), expected[name])]
    counts = torch.tensor([len(wrong), len(wanted)])
    dist.all_reduce(counts)
    return {
        "bytes": sum(value.nbytes for value in parameters.values()),
        "first_s": seconds[0],
        "median_s": statistics.median(seconds[1:]),
        "parameters": int(counts[1]),
        "wrong_parameters": int(counts[0]),
        "one_of_them": wrong[0] if wrong else None,
    }


def build(rank: int, layout: str, folder: Path, device: torch.device) -> tuple[Any, dict[str, torch.Tensor]]:
    """A GPTModel of `layout` without gradients, random weights that do not depend on it, and its parameters."""
    from megatron.core import parallel_state, tensor_parallel  # noqa: PLC0415 - after `platform.install`
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415
    from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: PLC0415

    from rlframe.megatron.model.model import canonical_name  # noqa: PLC0415
    from rlframe.megatron.model.transformer import layer_spec, transformer_config  # noqa: PLC0415

    parallel = Parallel.parse(layout)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        parallel.tp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    config = transformer_config(architecture, TrainConfig(parallel=layout), parallel, device)
    module = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(architecture, config, device, chunk=0),
        vocab_size=padded_vocab_size(architecture, tp=parallel.tp),
        max_sequence_length=architecture.max_positions,
        share_embeddings_and_output_weights=architecture.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).to(device)
    (shard,) = shards_of_rank(architecture, rank, dp=parallel.dp, tp=parallel.tp, ep=parallel.ep, etp=parallel.etp)
    parameters = {canonical_name(name): value.detach() for name, value in module.named_parameters()}
    recorded = record(
        partial(family.load, architecture=architecture, shard=shard), parameters, family.tensors(architecture)
    )
    clear_padding(recorded, parameters)
    for name in recorded.boxes:
        value = random_tensor(
            name,
            recorded.tensors[name],
            zero_centered_norms=architecture.zero_centered_norms,
            seed=0,
            device=device.type,
        )
        load_tensor(recorded, parameters, name, value)
    return module, parameters


if __name__ == "__main__":
    main()
