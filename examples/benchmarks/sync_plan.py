"""Plans the weight sync of models that are too large for this machine: seconds, memory and bytes by link.

    python examples/benchmarks/sync_plan.py [CASE...] --output examples/benchmarks/results/sync_plan.json

The cases of 235 and 671 billion parameters are 64 trainer ranks and 64 engine ranks. Both sides are recorded by the
loaders of the real workers (Megatron's families, vLLM's own `load_weights`) on meta tensors, all layers, so no device
and no weights are needed; vLLM must be installed. Then a child process does what the driver of a run does when it
connects: it reads the messages of all ranks, makes the plan (`plan_s`), all that a connection knows (`connection_s`,
which plans once more), and the pickled parts of all engine ranks. Its seconds and the peak of its memory are written,
beside the bytes on each kind of link and the least time for them. Seconds are those of one core (`time.process_time`),
which do not depend on what else the machine does. With `--box-by-box` a further child plans with `piecewise`, which
defines what a plan is.
"""

import argparse
import importlib
import json
import multiprocessing
import pickle
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models_by_size import MODELS

from rlframe.megatron.config.parallel import Parallel
from rlframe.models.hub import load_family, read_config
from rlframe.tools.plan_sync import trainer_layouts
from rlframe.weight_sync.border import DestinationInfo, SourceInfo
from rlframe.weight_sync.choice import Choice
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.connection import make_connection, make_links, pulls
from rlframe.weight_sync.plan.piecewise import plan_piecewise
from rlframe.weight_sync.plan.planner import make_plan

RESULT = Path(__file__).parent / "results/sync_plan.json"
DEVICES_PER_HOST = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer and its engines."""

    model: str
    train: Parallel
    tp: int = 8
    """Devices of an engine."""
    ep: bool = False
    """Whether each device of an engine holds whole experts."""
    engines: int = 8
    split: bool = False
    """Whether engines have devices of their own."""


QWEN = Parallel(dp=4, tp=4, pp=4, ep=8, first_stage_layers=23, last_stage_layers=23)
DEEPSEEK = Parallel(dp=4, tp=4, pp=4, ep=16, first_stage_layers=15, last_stage_layers=14)
CASES = {
    "qwen3_30b_ep2": Case(model="qwen3_30b_a3b", train=Parallel(dp=2, ep=2), tp=2, ep=True, engines=1),
    "qwen3_235b_tp8": Case(model="qwen3_235b_a22b", train=QWEN),
    "qwen3_235b_tp8_ep": Case(model="qwen3_235b_a22b", train=QWEN, ep=True),
    "qwen3_235b_tp8_split": Case(model="qwen3_235b_a22b", train=QWEN, split=True),
    "deepseek_v3_tp8": Case(model="deepseek_v3", train=DEEPSEEK),
    "deepseek_v3_tp8_ep": Case(model="deepseek_v3", train=DEEPSEEK, ep=True),
    "deepseek_v3_tp8_split": Case(model="deepseek_v3", train=DEEPSEEK, split=True),
}


def messages(case: Case, folder: Path, facts: dict[str, Any]) -> tuple[list[bytes], list[bytes]]:
    """Returns the pickled answers to `describe` of the ranks of both sides, after recording them."""
    (folder / "config.json").write_text(json.dumps(MODELS[case.model]))
    family = load_family(folder)
    architecture = family.architecture(read_config(folder))
    start = time.process_time()
    sources = trainer_layouts(family, architecture, case.train, dtype=torch.bfloat16)
    facts["record_trainer_s"] = time.process_time() - start
    vllm = importlib.import_module("rlframe.rollout.vllm.layout")
    vllm.prepare()
    start = time.process_time()
    engine = vllm.engine_layouts(folder, dtype=torch.bfloat16, tp=case.tp, ep=case.ep)
    facts["record_engine_s"] = time.process_time() - start
    facts |= {"tensors": len(family.tensors(architecture)), "trainer_ranks": len(sources)}
    first = len(sources) if case.split else 0
    described: tuple[list[bytes], list[bytes]] = [], []
    for rank, layout in enumerate(sources):
        described[0].append(pickle.dumps(SourceInfo(layout=layout, **place(rank))))
    for rank in range(case.engines * case.tp):
        info = DestinationInfo(
            layout=engine[rank % case.tp],
            refusal="",
            can_reload=True,
            tensors=family.tensors(architecture),
            dtype=torch.bfloat16,
            **place(first + rank),
        )
        described[1].append(pickle.dumps(info))
    return described


def place(device: int) -> dict[str, Any]:
    """Returns the fields of RankInfo of a process on a device, counted over all hosts."""
    return {"host": f"host {device // DEVICES_PER_HOST}", "device": f"device {device}", "pid": device}


def connect(case: Case, described: tuple[list[bytes], list[bytes]], box_by_box: bool, answers: Any) -> None:
    """Plans in a process of its own, as the driver does, and puts the figures into `answers`."""
    laps, last = {}, time.process_time()

    def lap(name: str) -> None:
        nonlocal last
        now = time.process_time()
        laps[name], last = now - last, now

    sources, destinations = ([pickle.loads(each) for each in side] for side in described)
    lap("read_s")
    sides = (sources, destinations)
    hosts, devices = ([[getattr(rank, name) for rank in side] for side in sides] for name in ("host", "device"))
    layouts = [[rank.layout for rank in side] for side in sides]
    if box_by_box:
        here, there = (list(zip(*each, strict=True)) for each in zip(hosts, devices, strict=True))
        copies = sum(map(len, plan_piecewise(*layouts, here, there)))
        lap("plan_s")
        answers.put(laps | {"copies": copies, "peak_bytes": peak()})
        return
    plan = make_plan(
        *layouts,
        source_hosts=hosts[0],
        destination_hosts=hosts[1],
        source_devices=devices[0],
        destination_devices=devices[1],
    )
    lap("plan_s")
    figures = {
        "copies": plan.num_copies,
        "bytes": {str(kind): size for kind, size in sorted(plan.kind_bytes.items())},
        "links": {str(kind): list(plan.link_kinds.values()).count(kind) for kind in sorted(plan.kind_bytes)},
        "floor_ms": (plan.floor_s() or 0.0) * 1e3,
    }
    del plan
    engines = [rank // case.tp for rank in range(len(destinations))]
    choice, config = Choice("nccl", False, "measured without a transport"), WeightSyncConfig()
    last = time.process_time()
    connection = make_connection(sources, destinations, engines, config, choice, seed=1)
    lap("connection_s")
    links = make_links(connection, config, [""] * len(destinations), pulls(connection))
    figures["link_bytes"] = sum(len(pickle.dumps(link)) for link in links)
    lap("links_s")
    answers.put(laps | figures | {"peak_bytes": peak()})


def peak() -> int:
    """Returns the greatest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_child(case: Case, described: tuple[list[bytes], list[bytes]], box_by_box: bool) -> dict[str, Any]:
    """Returns the figures of `connect` in a process of its own."""
    # Spawned, so that its peak is its own.
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=connect, args=(case, described, box_by_box, answers))
    child.start()
    found = answers.get()
    child.join()
    return found


def measure(name: str, *, box_by_box: bool) -> dict[str, Any]:
    """Returns the figures of a case."""
    case, facts = CASES[name], {}
    with tempfile.TemporaryDirectory() as folder:
        described = messages(case, Path(folder), facts)
    facts |= in_child(case, described, False)
    if box_by_box:
        facts["box_by_box"] = in_child(case, described, True)
    sizes = {"devices_of_an_engine": case.tp, "engines": case.engines, "ep": case.ep, "split": case.split}
    return {"model": case.model, "train": str(case.train), **sizes, **facts}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the cases and writes what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--box-by-box", action="store_true", help="plan with `piecewise` too")
    parser.add_argument("--output", type=Path, help="write the result there too")
    options = parser.parse_args(arguments)
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    results = {"machine": {"cpu": platform.processor() or platform.machine(), "python": platform.python_version()}}
    for name in options.cases or CASES:
        results[name] = measure(name, box_by_box=options.box_by_box)
        print(name, json.dumps(results[name], indent=1), file=sys.stderr, flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
