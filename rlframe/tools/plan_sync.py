"""Shows how weights would be sent from a trainer to engines: `python -m rlframe.tools.plan_sync --help`.

It needs config.json only: no device, no weights, no processes. Both sides are recorded from the loaders of the real
workers, and planned by the planner of the real sync.
"""

import importlib
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype
from rlframe.models import shards
from rlframe.models.config import ModelConfig
from rlframe.models.families.base import Architecture, Family, Shard
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.utils.arguments import Parser, run_tool
from rlframe.utils.errors import ConfigError, RlframeError, WeightSyncFailed
from rlframe.utils.faults import Fault
from rlframe.utils.files.whole import writing
from rlframe.utils.nearest import did_you_mean
from rlframe.weight_sync.layout.memory import MemoryLayout, record
from rlframe.weight_sync.plan.planner import MOST_LINKS, Kind, LinkSpeeds, Plan, make_plan

ENGINES = "rlframe.rollout"
"""Package whose files `ENGINE/layout.py` compute the layout of an engine's memory."""
MILLISECONDS = 1e3
UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}


KINDS = {
    Kind.DEVICE: "within the device",
    Kind.PEER: "between devices of a host",
    Kind.NETWORK: "between hosts",
}
"""The medium of a link, in words."""


@dataclass(frozen=True)
class Device:
    """Location of a rank."""

    host: int
    index: int
    """Index of the device, counted over all hosts."""

    def __str__(self) -> str:
        return f"device {self.index} of host {self.host}"


@dataclass(kw_only=True)
class Case:
    """The case to plan, from the command line."""

    model: str
    train: str | Parallel
    engine: str
    tp: int = 1
    ep: bool = False
    engines: int = 1
    colocate: bool = True
    dtype: str = "bfloat16"
    devices_per_host: int = 8
    speeds: LinkSpeeds = field(default_factory=LinkSpeeds)


@dataclass(kw_only=True)
class Answer:
    """The plan of a case."""

    case: Case
    tensors: dict[str, tuple[int, ...]]
    sources: list[MemoryLayout]
    destinations: list[MemoryLayout]
    source_devices: list[Device]
    destination_devices: list[Device]
    plan: Plan
    fallback: str
    """Reason why the engine's loader cannot be recorded and whole tensors are reloaded instead. Empty if it can
    be."""
    seconds: dict[str, float]

    @property
    def model_bytes(self) -> int:
        """Bytes of one copy of every tensor."""
        itemsize = getattr(torch, self.case.dtype).itemsize
        return sum(math.prod(shape) for shape in self.tensors.values()) * itemsize

    @property
    def num_boxes(self) -> tuple[int, int]:
        """Number of boxes of all trainer ranks, and of all engine ranks."""
        trainer, engine = (
            sum(len(boxes) for layout in side for boxes in layout.boxes.values())
            for side in (self.sources, self.destinations)
        )
        return trainer, engine

    @property
    def floor_ms(self) -> float:
        """Lower bound of the time in milliseconds, with all links busy at the same time."""
        floor = self.plan.floor_s(self.case.speeds)
        assert floor is not None, "every rank of the tool has a device"
        return floor * MILLISECONDS


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the plan of the case on the command line, and writes it as JSON on request."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    file = options.pop("json")
    speeds = LinkSpeeds(**{each.name: options.pop(each.name) for each in fields(LinkSpeeds)})
    case = Case(**options, speeds=speeds)
    try:
        answer = solve(case)
    except ConfigError as error:
        parser.error("; ".join(map(str, error.faults)))
    except (RlframeError, ValueError) as error:
        parser.error(str(error))
    for line in describe(answer):
        print(line)
    if file:
        try:
            with writing(Path(file)):
                Path(file).write_text(json.dumps(facts(answer), indent=2) + "\n")
        except RlframeError as error:
            parser.error(str(error))
        print(f"written to {file}", file=sys.stderr)


def solve(case: Case) -> Answer:
    """Records both sides and computes the plan between them.

    Raises:
        ConfigError: the model cannot be split as requested, or the engine is not installed; lists every fault.
        CheckpointError: the model does not exist.
    """
    folder = resolve(ModelConfig(path=case.model, random_init=True))
    family, parallel = load_family(folder), _parallel(case.train)
    architecture = family.architecture(read_config(folder))
    if found := _faults(case, architecture, parallel):
        raise ConfigError(found)
    dtype, clock = getattr(torch, case.dtype), _Clock()
    sources = trainer_layouts(family, architecture, parallel, dtype=dtype)
    clock.lap("record_trainer_s")
    _layouts_of(case.engine).prepare()
    clock.lap("start_engine_s")
    one_engine, fallback = _engine_layouts(case, folder, family.tensors(architecture), dtype)
    destinations = one_engine * case.engines
    clock.lap("record_engine_s")
    source_devices = _devices(len(sources), case)
    destination_devices = _devices(len(destinations), case, first=0 if case.colocate else len(sources))
    plan = make_plan(
        sources,
        destinations,
        source_hosts=[str(device.host) for device in source_devices],
        destination_hosts=[str(device.host) for device in destination_devices],
        source_devices=[str(device) for device in source_devices],
        destination_devices=[str(device) for device in destination_devices],
    )
    clock.lap("plan_s")
    return Answer(
        case=case,
        tensors=family.tensors(architecture),
        sources=sources,
        destinations=destinations,
        source_devices=source_devices,
        destination_devices=destination_devices,
        plan=plan,
        fallback=fallback,
        seconds=clock.laps,
    )


def trainer_layouts(
    family: Family, architecture: Architecture, parallel: Parallel, *, dtype: torch.dtype
) -> list[MemoryLayout]:
    """Returns the layout of each trainer rank, in the order of ranks, without processes and without Megatron."""
    tensors = family.tensors(architecture)
    layouts: list[MemoryLayout] = []
    # Replicas hold the same shards, and are recorded once.
    known: dict[tuple[Shard, ...], MemoryLayout] = {}
    for rank in range(parallel.world):
        own = shards.shards_of_rank(architecture, rank, **asdict(parallel))
        if layout := known.get(tuple(own)):
            layouts.append(layout)
            continue
        shapes = shards.parameters(family, architecture, own)
        parameters = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        load = partial(shards.load, family=family, architecture=architecture, shards=own)
        known[tuple(own)] = record(load, parameters, tensors)
        layouts.append(known[tuple(own)])
    return layouts


def _layouts_of(engine: str) -> Any:
    """Returns the module that records this engine's layouts."""
    return importlib.import_module(f"{ENGINES}.{engine}.layout")


def _engine_layouts(
    case: Case, folder: Path, tensors: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[list[MemoryLayout], str]:
    """Returns the layouts of one engine's ranks and "", or whole tensors for each rank and the reason."""
    try:
        return _layouts_of(case.engine).engine_layouts(folder, dtype=dtype, tp=case.tp, ep=case.ep), ""
    except WeightSyncFailed as error:
        return [whole_tensors(tensors, dtype)] * case.tp, str(error)


def whole_tensors(tensors: dict[str, tuple[int, ...]], dtype: torch.dtype) -> MemoryLayout:
    """Returns a rank that receives every tensor whole, as `reload` passes them to an engine's reload."""
    parameters = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in tensors.items()}

    def load(parameters: dict[str, Tensor], checkpoint: dict[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            parameter.copy_(checkpoint[name])

    return record(load, parameters, tensors)


def _parallel(text: str | Parallel) -> Parallel:
    if isinstance(text, Parallel):
        return text
    try:
        return Parallel.parse(text)
    except ValueError as error:
        raise ConfigError([f"--train: {error}"]) from error


def _faults(case: Case, architecture: Architecture, parallel: Parallel) -> list[str]:
    """Returns every reason why the case is impossible."""
    known = engine_names()
    found = [
        f"--{name.replace('_', '-')} must be at least 1, got {getattr(case, name)}"
        for name in ("tp", "engines", "devices_per_host")
        if getattr(case, name) < 1
    ]
    found += [
        f"--{each.name}-gb-s must be above 0, got {getattr(case.speeds, each.name)}"
        for each in fields(LinkSpeeds)
        if getattr(case.speeds, each.name) <= 0
    ]
    if case.engine not in known:
        rule = f"must be one of {', '.join(known)}"
        found.append(str(Fault("--engine", rule, got=repr(case.engine), hint=did_you_mean(case.engine, known))))
    found += map(str, shards.faults(architecture, **asdict(parallel)))
    if found:
        return found
    found = _layouts_of(case.engine).faults(architecture, tp=case.tp, ep=case.ep)
    if case.colocate and case.engines * case.tp > parallel.world:
        found.append(
            f"--colocate: {case.engines} engines of {case.tp} devices need {case.engines * case.tp} devices, and the "
            f"trainer {case.train} has {parallel.world}: use --split or fewer engines"
        )
    return found


def engine_names() -> list[str]:
    """Returns the engines whose layout can be recorded here, sorted."""
    folders = importlib.import_module(ENGINES).__path__
    return sorted(file.parent.name for folder in folders for file in Path(folder).glob("*/layout.py"))


def _devices(count: int, case: Case, *, first: int = 0) -> list[Device]:
    return [Device(index // case.devices_per_host, index) for index in range(first, first + count)]


class _Clock:
    """Measures the seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Records the time since the last lap as `name`."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def describe(answer: Answer) -> Iterator[str]:
    """Yields the lines of the answer for people."""
    case, sizes, seconds = answer.case, answer.plan.link_bytes, answer.seconds
    trainer_boxes, engine_boxes = answer.num_boxes
    yield f"model     {case.model}: {len(answer.tensors):,} tensors, {_readable(answer.model_bytes)} in {case.dtype}"
    yield f"trainer   {case.train}: {_ranks(answer.sources)}, {trainer_boxes:,} boxes"
    name = f"{case.engines} x {case.engine} tp {case.tp}{' with ep' if case.ep else ''}"
    place = "on the trainer's devices" if case.colocate else "on devices of their own"
    yield f"engines   {name} {place}: {_ranks(answer.destinations)}, {engine_boxes:,} boxes"
    if len(sizes) <= MOST_LINKS:
        for (source, destination), kind in sorted(answer.plan.link_kinds.items()):
            engine, rank = divmod(destination, case.tp)
            size = _readable(sizes[source, destination])
            yield f"link      trainer {source} -> engine {engine} rank {rank}: {size} {KINDS[kind]}"
    else:
        yield from (f"links     {line}" for line in by_medium(answer))
    kinds = answer.plan.kind_bytes
    parts = ", ".join(f"{_readable(size)} {KINDS[kind]}" for kind, size in sorted(kinds.items()))
    yield f"plan      {answer.plan.num_copies:,} copies: {parts}"
    speeds = ", ".join(f"{KINDS[kind]} {getattr(case.speeds, kind):g} GB/s" for kind in sorted(kinds))
    yield f"floor     {answer.floor_ms:.3g} ms, all links at work at the same time"
    yield f"speeds    {speeds}"
    yield (
        f"seconds   {seconds['record_trainer_s']:.2f} to record {len(answer.sources)} trainer ranks, "
        f"{seconds['start_engine_s']:.2f} to import the engine, {seconds['record_engine_s']:.2f} to record "
        f"its {case.tp} ranks, {seconds['plan_s']:.2f} to plan"
    )
    if answer.fallback:
        yield f"reload    everything, as whole tensors through the engine's reload: {answer.fallback}"
    else:
        yield "reload    nothing, unless the engine repacks its weights after loading, which calibration detects"


def by_medium(answer: Answer) -> Iterator[str]:
    """Yields for each medium the bytes, the links, and the seconds of the rank that sends or reads most over it."""
    plan, speeds = answer.plan, answer.case.speeds
    for kind, (busiest, seconds) in plan.busiest(speeds).items():
        count = sum(each == kind for each in plan.link_kinds.values())
        links = f"{count:,} {'link' if count == 1 else 'links'}"
        yield (
            f"{_readable(plan.kind_bytes[kind])} {KINDS[kind]}, on {links}; at most {_readable(busiest)} from or to "
            f"one rank: {seconds * MILLISECONDS:.3g} ms at {getattr(speeds, kind):g} GB/s"
        )


def facts(answer: Answer) -> dict:
    """Returns the answer for programs: bytes, milliseconds, seconds."""
    return {
        "case": asdict(answer.case),
        "num_tensors": len(answer.tensors),
        "model_bytes": answer.model_bytes,
        "trainer_rank_bytes": [_num_bytes(layout) for layout in answer.sources],
        "engine_rank_bytes": [_num_bytes(layout) for layout in answer.destinations],
        "trainer_boxes": answer.num_boxes[0],
        "engine_boxes": answer.num_boxes[1],
        "num_copies": answer.plan.num_copies,
        "links": [
            {
                "trainer": source,
                "engine_rank": destination,
                "bytes": size,
                "kind": answer.plan.link_kinds[source, destination],
            }
            for (source, destination), size in sorted(answer.plan.link_bytes.items())
        ],
        "media": {kind: {"bytes": answer.plan.kind_bytes[kind], "busiest_rank_bytes": busiest, "seconds": seconds}
                  for kind, (busiest, seconds) in answer.plan.busiest(answer.case.speeds).items()},
        "total_bytes": answer.plan.total_bytes,
        "floor_ms": answer.floor_ms,
        "seconds": answer.seconds,
        "fallback": answer.fallback,
    }  # fmt: skip


def _num_bytes(layout: MemoryLayout) -> int:
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in layout.parameters.values())


def _ranks(layouts: list[MemoryLayout]) -> str:
    """Returns `4 ranks of 17.61 GB`, or the least and the greatest size."""
    sizes = sorted(_num_bytes(layout) for layout in layouts)
    least, most = _readable(sizes[0]), _readable(sizes[-1])
    noun = "rank" if len(layouts) == 1 else "ranks"
    return f"{len(layouts)} {noun} of {most if least == most else f'{least} to {most}'}"


def _readable(size: int) -> str:
    """Returns a readable size such as `15.29 GB` or `0.91 kB`."""
    unit, scale = next(((unit, scale) for unit, scale in UNITS.items() if size >= scale), ("kB", 1e3))
    return f"{size / scale:.2f} {unit}"


def _parser() -> Parser:
    parser = Parser(
        prog="python -m rlframe.tools.plan_sync",
        description="Bytes per link, copies and the physical floor of a weight sync, from config.json alone.",
    )
    defaults = Case(model="", train="", engine="")
    add = parser.add_argument
    add("--model", required=True, help="an embedded model's name, a folder with config.json, or a hub id")
    add("--train", required=True, help="the trainer's layout, such as d1t2p2|ffn:d1t1p2e2")
    add("--engine", required=True, help=f"one of {', '.join(engine_names())}")
    add("--tp", type=int, default=defaults.tp, help="devices of one engine (default %(default)s)")
    add("--ep", action="store_true", help="each device of the engine holds whole experts")
    add("--engines", type=int, default=defaults.engines, help="number of engines (default %(default)s)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--colocate", action="store_true", default=True, help="engines on the trainer's devices (default)"
    )
    where.add_argument("--split", dest="colocate", action="store_false", help="engines on devices of their own")
    add("--dtype", choices=[str(each) for each in Dtype], default=defaults.dtype, help="default %(default)s")
    add("--devices-per-host", type=int, default=defaults.devices_per_host, help="default %(default)s")
    for each in fields(LinkSpeeds):
        kind = KINDS[Kind(each.name)]
        add(
            f"--{each.name}-gb-s",
            dest=each.name,
            type=float,
            default=each.default,
            help=f"{kind}, one way (default %(default)s)",
        )
    add("--json", metavar="FILE", help="write everything as JSON too")
    return parser


if __name__ == "__main__":
    run_tool(main)
