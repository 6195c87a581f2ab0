"""Seconds of a checkpoint of one rank, beside the speed of the disk in the same run, and what training notices of it.

    python examples/benchmarks/checkpoint_speed.py qwen3_1p7b --folder /path/on/the/disk --output result.json
    python examples/benchmarks/checkpoint_speed.py qwen3_1p7b --layers 6 --rounds 3
    python examples/benchmarks/checkpoint_speed.py smollm2_135m --sequences 4

A trainer of random weights takes steps of `--sequences` sequences of 682 tokens. Measured are, medians of `--rounds`
rounds in turns:

* `disk`: the same number of bytes written in order past the page cache, and flushed; and read again.
* `written`: writing the live state, with checksums, with nothing, the default and all of it read back.
* `torch`: `torch.distributed.checkpoint.save` of the same tensors, which neither sums nor reads back.
* `held_up`: copying the state to host memory, what is in the way of a step; as a part of the step too.
* `beside`: steps while the copy is written in another thread, over steps while nothing is.

Rates are GB/s of the file; `ratio` is that of the default over the disk's. Prints JSON after each round. A round writes
the state six times and reads it two to three times, which with the 24 GB of a 1.7 B takes minutes: `--layers` cuts the
model.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models_by_size import MODELS, make_model
from torch.distributed.checkpoint.state_dict_saver import save

from rlframe.cluster.config import Device
from rlframe.loops.config import CheckpointConfig
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.cpu import platform
from rlframe.megatron.messages.microbatch import split
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.models.config import ModelConfig
from rlframe.types.batch import Sequences
from rlframe.types.results import LossOutput, Output, Sum

LENGTH = 682
BLOCK_BYTES = 1 << 24
DEFAULT = CheckpointConfig().read_back


class Likelihood:
    """Plain maximum likelihood."""

    output = Output.TOKENS
    reads_renyi_entropy = False

    def loss(self, policy: Any, batch: Sequences, weights: torch.Tensor) -> LossOutput:  # noqa: ARG002 - an Algorithm's
        """Returns -sum weights * logprob."""
        loss = -(weights * policy.logprobs).sum()
        return LossOutput(loss=loss, metrics={"train/loss": Sum(float(loss.detach()))})


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds of a call, with what it left to the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.monotonic()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - started


def disk(file: Path, num_bytes: int) -> tuple[float, float]:
    """Returns the seconds of writing and of reading a file past the page cache, on one thread. Random bytes: some disks
    compress."""
    block = mmap.mmap(-1, BLOCK_BYTES)
    block[:] = os.urandom(BLOCK_BYTES)
    offsets = range(0, num_bytes, BLOCK_BYTES)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:

        def write() -> None:
            for offset in offsets:
                os.pwrite(descriptor, block, offset)
            os.fsync(descriptor)

        return timed(write), timed(lambda: [os.preadv(descriptor, [block], offset) for offset in offsets])
    finally:
        os.close(descriptor)
        file.unlink()


def steps_of(num_sequences: int, vocabulary: int, max_tokens: int) -> list:
    """Returns the micro-batches of a step."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(num_sequences * LENGTH, dtype=torch.bool)
    mask[::LENGTH] = False
    batch = Sequences(
        token_ids=torch.randint(3, vocabulary, (num_sequences * LENGTH,), generator=generator),
        lengths=torch.full((num_sequences,), LENGTH),
        loss_mask=mask,
    )
    shares, _ = split(batch, mask.float() / int(mask.sum()), num_ranks=1, max_tokens=max_tokens)
    return shares[0].microbatches()


def emptied(folder: Path) -> Path:
    """Returns the folder with nothing in it. Removing what was there is not part of a measurement."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def shape(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the dimensions of the model, with as many layers as asked for."""
    return MODELS[options.model] | ({"num_hidden_layers": options.layers} if options.layers else {})


def started(options: argparse.Namespace, folder: Path, device: torch.device) -> Any:
    """Returns a trainer of random weights."""
    platform.install(device)
    from rlframe.megatron.worker.trainer import Trainer  # noqa: PLC0415 - after platform.install

    model = make_model(shape(options), folder / "model")
    config = TrainConfig(parallel="d1", max_tokens_per_microbatch=24 * LENGTH)
    setup = TrainerSetup(
        rank=0, init_method=f"file://{folder}/rendezvous", device=device,
        model=ModelConfig(path=str(model), random_init=True), train=config,
        seed=0, temperature=1.0, total_optimizer_steps=10_000, timeout_s=600, with_reference=False,
    )  # fmt: skip
    return Trainer(setup)


def measure(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the result of the rounds up to now, after each of them."""
    device = platform.resolve(Device.AUTO)
    trainer = started(options, folder, device)
    step = steps_of(options.sequences, MODELS[options.model]["vocab_size"], trainer.setup.train.sequence_tokens)
    done = 0

    def train() -> None:
        nonlocal done
        trainer.train([step], Likelihood(), first_step=done)  # type: ignore[arg-type]
        done += 1

    first = {"reserve_s": timed(trainer.reserve_copy), "first_step_s": timed(train)}
    found: dict[str, list[float]] = defaultdict(list)
    state = folder / "state"
    num_bytes = 0
    for _ in range(options.rounds):
        found["step"].append(timed(train))
        for read_back in (0.0, DEFAULT, 1.0):
            trainer.stage(emptied(state), copy=False)
            found[f"written_{read_back:g}"].append(timed(lambda part=read_back: trainer.write(read_back=part)))
        num_bytes = sum(file.stat().st_size for file in state.iterdir())
        for name, seconds in zip(("disk_write", "disk_read"), disk(folder / "disk", num_bytes), strict=True):
            found[name].append(seconds)
        assert trainer.staged
        items = {str(index): each for index, (_, each) in enumerate(trainer.staged.items) if torch.is_tensor(each)}
        emptied(state)
        found["torch"].append(timed(lambda held=items: save(held, checkpoint_id=state, no_dist=True)))
        del items
        emptied(state)
        found["held_up"].append(timed(lambda: trainer.stage(state, copy=True)))
        writing = threading.Thread(target=trainer.write, kwargs={"read_back": DEFAULT})
        began = time.monotonic()
        writing.start()
        beside = [timed(train)]
        while writing.is_alive():
            beside.append(timed(train))
        writing.join()
        found["written_beside_steps"].append(time.monotonic() - began)
        found["step_beside"].append(statistics.fmean(beside))
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        yield first | report(dict(found), num_bytes) | {"device": name}


def report(found: dict[str, list[float]], num_bytes: int) -> dict[str, Any]:
    """Returns medians, rates and ratios. Of the copy not the first, which allocates."""
    counted = found | {"held_up": found["held_up"][1:] or found["held_up"]}
    seconds = {name: statistics.median(each) for name, each in counted.items()}
    rates = {
        name: num_bytes / each / 1e9
        for name, each in seconds.items()
        if name.startswith(("disk", "written_0", "written_1", "torch"))
    }
    default = f"written_{DEFAULT:g}"
    return {
        "bytes": num_bytes,
        "seconds": seconds,
        "rates_gb_per_s": rates,
        "ratio": rates[default] / rates["disk_write"],
        "ratio_all_read_back": rates["written_1"] / rates["disk_write"],
        "held_up_of_a_step": seconds["held_up"] / seconds["step"],
        "step_beside_over_step": seconds["step_beside"] / seconds["step"],
        "every": {name: [round(each, 4) for each in values] for name, values in found.items()},
    }


def main() -> None:
    """Measures, and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk that is measured")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0, help="layers of the model; 0: all")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-speed-") as folder:
        asked = {"model": options.model, "layers": options.layers, "sequences": options.sequences}
        asked["cores"] = len(os.sched_getaffinity(0))
        for result in measure(options, Path(folder).absolute()):
            text = json.dumps(asked | result, indent=1)
            print(text, flush=True)
            if options.output:
                options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
