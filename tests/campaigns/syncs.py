"""Plants faults into weight syncs: over every transport that runs on a CPU, between trainers of several layouts and two
engines, in every kind of memory; each must be reported with the tensor's name.

`python -m tests.campaigns.syncs` writes `examples/benchmarks/results/faults_syncs.json`.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlframe.models.families.qwen3_moe import FAMILY
from rlframe.utils.errors import RlframeError
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.layout.boxes import Box, window
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.reload import part_of
from tests.campaigns.trials import Outcome, Trial, write
from tests.unit.models.parameters import SMALL_MOE, shards
from tests.unit.weight_sync.world import World

MODEL = FAMILY.architecture(SMALL_MOE)
TIED = FAMILY.architecture(SMALL_MOE | {"tie_word_embeddings": True})
LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "d2": lambda: {"trainer": [*shards(MODEL), *shards(MODEL)]},
    "t2": lambda: {"trainer": shards(MODEL, tp=2, vocab_multiple=8)},
    "e2": lambda: {"trainer": shards(MODEL, ep=2)},
    "p2": lambda: {"trainer": shards(MODEL, pp=2)},
    "d2e2": lambda: {"trainer": [*shards(MODEL, ep=2), *shards(MODEL, ep=2)]},
    "t2p2e2": lambda: {},
    "d2p2 tied": lambda: {"trainer": [*shards(TIED, pp=2), *shards(TIED, pp=2)], "model": TIED},
}
TRANSPORTS: dict[str, WeightSyncConfig] = {
    "shm": WeightSyncConfig(transport="shm"),
    "nccl": WeightSyncConfig(transport="nccl", chunk_bytes=1024, timeout_s=30),
    "reload": WeightSyncConfig(transport="reload", bucket_bytes=4096),
}
SIGN = -(1 << 15)


@dataclass
class Site:
    """Where a fault strikes, and what the report has to name."""

    world: World
    rng: np.random.Generator
    names: set[str] = field(default_factory=set)
    undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def reloads(self) -> bool:
        """Whether engines get whole tensors in staging memory."""
        return self.world.sync.choice.reloads

    def engine_box(self, *, rows: int = 1, cols: int = 1) -> tuple[int, Box]:
        """Returns a destination rank and a box of what the copies write there, of at least that size."""
        rank = int(self.rng.integers(len(self.world.destinations.ranks)))
        end = self.world.destinations.ranks[rank]
        boxes = end._staging._boxes if end._staging else end.layout.boxes  # pyright: ignore[reportOptionalMemberAccess]
        fitting = [box for each in boxes.values() for box in each if box.rows >= rows and box.cols >= cols]
        box = fitting[int(self.rng.integers(len(fitting)))]
        self.names.add(box.tensor)
        return rank, box

    def view(self, rank: int, box: Box) -> Tensor:
        """Returns [rows, cols] the memory that the copies write, as 16-bit integers."""
        end = self.world.destinations.ranks[rank]
        return box.view(end._staging.parameters if end._staging else end._parameters).view(torch.int16)

    def after_pull(self, rank: int, box: Box, strike: Callable[[Tensor], object]) -> None:
        """Lets `strike` change the box when the rank has its pieces, before it digests them."""
        transport: Any = self.world.destinations.ranks[rank]._transport
        pull = transport.pull

        def damaged(part: int = 0) -> None:
            pull(part)
            if not self.reloads or part_of(box.parameter) == part:
                strike(self.view(rank, box))

        transport.pull = damaged
        self.undo.append(lambda: setattr(transport, "pull", pull))

    def trainer_box(self, *, replicated: bool = False) -> tuple[int, Box, dict[str, Tensor]]:
        """Returns a source rank, a box of it and its parameters; of those that another rank holds too if asked."""
        ranks = self.world.trainer
        counts: dict[tuple[str, Any], int] = {}
        for layout, _ in ranks:
            for boxes in layout.boxes.values():
                for box in boxes:
                    counts[box.tensor, box.region] = counts.get((box.tensor, box.region), 0) + 1
        found = [
            (rank, box, parameters)
            for rank, (layout, parameters) in enumerate(ranks)
            for boxes in layout.boxes.values()
            for box in boxes
            if not replicated or counts[box.tensor, box.region] > 1
        ]
        if not found:
            raise NotHereError
        rank, box, parameters = found[int(self.rng.integers(len(found)))]
        self.names.add(box.tensor)
        return rank, box, parameters


class NotHereError(Exception):
    """The fault needs what this layout or transport does not have."""


def struck(change: Callable[[Tensor, np.random.Generator], object], **least: int) -> Callable[[Site], None]:
    """Returns the fault that changes a box of an engine after it was written."""

    def plant(site: Site) -> None:
        rank, box = site.engine_box(**least)
        site.after_pull(rank, box, lambda view: change(view, site.rng))

    return plant


def flip_bit(view: Tensor, rng: np.random.Generator) -> None:
    """Changes one bit of one element."""
    bit = int(rng.integers(16))
    view[int(rng.integers(len(view))), int(rng.integers(view.shape[1]))] ^= SIGN if bit == 15 else 1 << bit


def wrong_row(view: Tensor, rng: np.random.Generator) -> None:
    """Puts a row where its neighbour belongs."""
    row = int(rng.integers(len(view) - 1))
    view[row] = view[row + 1].clone()


def swap_rows(view: Tensor, rng: np.random.Generator) -> None:
    """Exchanges two rows."""
    first, second = rng.choice(len(view), 2, replace=False).tolist()
    view[[first, second]] = view[[second, first]]


def swap_columns(view: Tensor, rng: np.random.Generator) -> None:
    """Exchanges two columns."""
    first, second = rng.choice(view.shape[1], 2, replace=False).tolist()
    view[:, [first, second]] = view[:, [second, first]]


def swap_shards(view: Tensor, rng: np.random.Generator) -> None:
    """Exchanges the halves, as two ranks would whose numbers are swapped."""
    axis = int(rng.integers(2))
    view.copy_(view.roll(view.shape[axis] // 2, axis))


def zero_block(view: Tensor, rng: np.random.Generator) -> None:
    """Clears a quarter."""
    view[: (len(view) + 1) // 2, : (view.shape[1] + 1) // 2] = 0


def flip_rectangle(view: Tensor, rng: np.random.Generator) -> None:
    """Flips the signs at the corners of a rectangle."""
    rows, cols = (rng.choice(size, 2, replace=False) for size in view.shape)
    for row in rows.tolist():
        for col in cols.tolist():
            view[row, col] ^= SIGN


def transpose_block(view: Tensor, rng: np.random.Generator) -> None:
    """Transposes the square at the beginning."""
    side = min(view.shape)
    view[:side, :side] = view[:side, :side].T.clone()


def stale(site: Site) -> None:
    """A tensor of an engine stays as it was."""
    rank, box = site.engine_box()
    if site.reloads:
        raise NotHereError
    before = site.view(rank, box).clone()
    site.after_pull(rank, box, lambda view: view.copy_(before))


def wrong_version(site: Site) -> None:
    """A rank pulls nothing at all."""
    rank = int(site.rng.integers(len(site.world.destinations.ranks)))
    end = site.world.destinations.ranks[rank]
    if site.reloads:
        raise NotHereError
    site.names |= end.layout.boxes.keys()  # pyright: ignore[reportOptionalMemberAccess]
    transport: Any = end._transport
    pull = transport.pull
    if transport.two_sided:
        # The messages must be taken; what they bring is put back.
        held = {name: value.clone() for name, value in end._parameters.items()}

        def nothing(part: int = 0) -> None:
            pull(part)
            for name, value in held.items():
                end._parameters[name].copy_(value)
    else:

        def nothing(part: int = 0) -> None: ...

    transport.pull = nothing
    site.undo.append(lambda: setattr(transport, "pull", pull))


def rewired(change: Callable[[Any, np.random.Generator], tuple[Any, set[str]]]) -> Callable[[Site], None]:
    """Returns the fault that changes the list of a rank's copies."""

    def plant(site: Site) -> None:
        if site.world.sync.choice.name != "shm":
            raise NotHereError
        rank = int(site.rng.integers(len(site.world.destinations.ranks)))
        link = site.world.links[rank]
        copies, names = change(link.parts[0], site.rng)
        site.names |= names
        site.world.destinations.ranks[rank].connect(replace(link, parts=(copies,)))
        site.undo.append(lambda: site.world.destinations.ranks[rank].connect(link))

    return plant


def drop_copy(copies: Any, rng: np.random.Generator) -> tuple[Any, set[str]]:
    """Leaves a copy out."""
    index = int(rng.integers(len(copies)))
    keep = np.arange(len(copies)) != index
    return copies.select(keep), set(copies[index].tensors)


def double_copy(copies: Any, rng: np.random.Generator) -> tuple[Any, set[str]]:
    """Carries out a copy a second time, over the place of another of its size."""
    order = rng.permutation(len(copies)).tolist()
    for first in order:
        for second in order:
            one, other = copies.table[first], copies.table[second]
            if first != second and (one[2:4] == other[2:4]).all() and (one[8:10] != other[8:10]).any():
                row = one.copy()
                row[8:12] = other[8:12]
                return replace(copies, table=np.vstack([copies.table, row])), set(copies[second].tensors)
    raise NotHereError


def replica_drift(site: Site) -> None:
    """One copy of what several trainer ranks hold changes, by less than the engines' format shows."""
    _, box, parameters = site.trainer_box(replicated=True)
    box.view(parameters).view(torch.int32)[0, 0] ^= 1


def tied_drift(site: Site) -> None:
    """The head of a model with tied weights leaves the embedding."""
    heads = [parameters for _, parameters in site.world.trainer if "output_layer.weight" in parameters]
    if site.world.tensors.keys() & {"lm_head.weight"} or not heads:
        raise NotHereError
    site.names.add("model.embed_tokens.weight")
    heads[0]["output_layer.weight"].view(torch.int32)[int(site.rng.integers(37)), 3] ^= 1


def padding(side: str) -> Callable[[Site], None]:
    """Returns the fault that writes into what no tensor fills."""

    def plant(site: Site) -> None:
        engines = [pair for engine in site.world.engines for pair in engine]
        ranks: list[tuple[MemoryLayout, dict[str, Tensor]]] = site.world.trainer if side == "trainer" else engines
        padded = [pair for pair in ranks if pair[0].padding]
        if not padded or (side == "engine" and site.reloads):
            raise NotHereError
        layout, parameters = padded[int(site.rng.integers(len(padded)))]
        part = layout.padding[int(site.rng.integers(len(layout.padding)))]
        site.names.add(part.parameter)
        window(parameters[part.parameter], part.offset, part.size, part.stride)[-1, -1] = float(site.rng.normal())

    return plant


def engine_memory(site: Site) -> None:
    """An engine's memory changes after the sync."""
    rank = int(site.rng.integers(len(site.world.destinations.ranks)))
    layout, parameters = [pair for engine in site.world.engines for pair in engine][rank]
    boxes = [box for each in layout.boxes.values() for box in each]
    box = boxes[int(site.rng.integers(len(boxes)))]
    flip_bit(box.view(parameters).view(torch.int16), site.rng)
    # Of engines that load streams themselves the parameter is known, and no tensor.
    site.names.add(box.parameter if site.reloads else box.tensor)


def trainer_memory(site: Site) -> None:
    """The trainer's memory changes after the sync."""
    _, box, parameters = site.trainer_box()
    box.view(parameters).view(torch.int32)[0, -1] ^= 1


DURING: dict[str, Callable[[Site], None]] = {
    "a bit of an engine": struck(flip_bit),
    "a row in another's place": struck(wrong_row, rows=2),
    "two rows swapped": struck(swap_rows, rows=2),
    "two columns swapped": struck(swap_columns, cols=2),
    "two shards swapped": struck(swap_shards, rows=2, cols=2),
    "a block of zeros": struck(zero_block),
    "signs at the corners of a rectangle": struck(flip_rectangle, rows=2, cols=2),
    "a block transposed": struck(transpose_block, rows=2, cols=2),
    "a tensor that stays": stale,
    "a rank at the old version": wrong_version,
    "a copy dropped": rewired(drop_copy),
    "a copy doubled elsewhere": rewired(double_copy),
    "a replica that drifts": replica_drift,
    "tied weights that drift": tied_drift,
    "padding of the trainer": padding("trainer"),
}
BETWEEN: dict[str, Callable[[Site], None]] = {
    "an engine's memory after its digest": engine_memory,
    "the trainer's memory after its digest": trainer_memory,
    "padding of an engine": padding("engine"),
    "padding of the trainer after its digest": padding("trainer"),
}


@contextmanager
def running(layout: str, transport: str) -> Iterator[World]:
    """A world at version 1."""
    world = World(TRANSPORTS[transport], **LAYOUTS[layout]())
    world.sync.calibrate(version=0)
    forward(world)
    yield world
    world.sync.close()


def forward(world: World) -> None:
    """Trains and publishes once more, which must do."""
    version = (world.sync.policy_version or 0) + 1
    world.train_to(version)
    world.sync.publish(version=version)
    world.sync.audit()


def attempt(world: World, name: str, plant: Callable[[Site], None], seed: int, *, between: bool) -> Trial | None:
    """Returns what one fault came to, with the world whole again; None where it cannot be planted here."""
    site = Site(world, np.random.default_rng(seed))
    if not between:
        world.train_to((world.sync.policy_version or 0) + 1)
    try:
        plant(site)
    except NotHereError:
        forward(world)
        return None
    start = time.monotonic()
    outcome, said = Outcome.WRONG, "not noticed"
    try:
        if between:
            world.sync.audit()
        else:
            world.sync.publish(version=(world.sync.policy_version or 0) + 1)
    except RlframeError as error:
        said = str(error).splitlines()[0]
        # A name may be the beginning of another.
        named = any(f"{each}{end}" in f"{said} " for each in site.names for end in (" ", ":", ",", ";"))
        outcome = Outcome.REPORTED if named else Outcome.WRONG
    seconds = time.monotonic() - start
    for undo in site.undo:
        undo()
    forward(world)
    return Trial(name=f"{name}, seed {seed}", outcome=outcome, said=said[:300], seconds=seconds)


def trials(layouts: list[str], transports: list[str], repeats: int) -> Iterator[Trial]:
    """Every fault `repeats` times on every layout over every transport."""
    for layout in layouts:
        for transport in transports:
            with running(layout, transport) as world:
                for kinds, between in ((DURING, False), (BETWEEN, True)):
                    for kind, plant in kinds.items():
                        for seed in range(repeats):
                            name = f"{kind}; trainer {layout} over {transport}"
                            if trial := attempt(world, name, plant, seed, between=between):
                                yield trial


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = list(trials(list(LAYOUTS), list(TRANSPORTS), repeats=2))
    sys.stdout.write(write("syncs", found, command="python -m tests.campaigns.syncs").row() + "\n")
