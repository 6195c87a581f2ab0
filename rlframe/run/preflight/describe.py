"""A plan as text for people, and as numbers for programs."""

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from rlframe.cluster.roles import ENGINES
from rlframe.run.preflight import seconds
from rlframe.run.preflight.advice import advise
from rlframe.run.preflight.layouts import Layout, quoted
from rlframe.run.preflight.parts import DeviceMemory, Phase
from rlframe.run.preflight.plan import Plan
from rlframe.run.preflight.weights import is_sparse
from rlframe.utils.faults import Fault

GB = 1e9
WIDTH = 118
LABEL = 10
"""Columns of the word at the beginning of a line."""


def describe(plan: Plan, faults: Iterable[Fault], layouts: Iterable[Layout], *, given: int | None) -> Iterator[str]:
    """Yields the lines of a plan.

    Args:
        faults: of the checks that need no more than config.json.
        given: number of devices that there are; None means as many as the run needs.
    """
    yield from labelled("run", [_headline(plan)])
    yield from labelled("legality", [str(fault) for fault in faults] or ["no fault"])
    yield from labelled("batch", _batch(plan))
    for device in plan.devices:
        yield from labelled("memory", [f"GB on each of {device.count} devices with {device.roles}"])
        yield from _table(device)
    yield from labelled("fits", _fits(plan, given))
    if not plan.fits:
        yield from labelled("change", [str(each) for each in advise(plan)] or ["nothing known frees enough"])
    yield from labelled("seconds", _seconds(plan))
    if plan.engine:
        yield from labelled("sync", _sync(plan))
    yield from labelled("layouts", _layouts(plan, layouts))


def labelled(label: str, lines: Iterable[str]) -> Iterator[str]:
    """Yields the lines behind a label, wrapped."""
    indent = " " * LABEL
    for index, line in enumerate(lines):
        first = label.ljust(LABEL) if index == 0 else indent
        yield from textwrap.wrap(line, WIDTH, initial_indent=first, subsequent_indent=indent + "  ",
                                 break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _headline(plan: Plan) -> str:
    shape = plan.architecture
    engines = plan.engine
    total = engines.parameters if engines else sum(stage.all for stage in plan.counter.stages(plan.parallel))
    sparse = sum(is_sparse(shape, layer) for layer in range(shape.num_layers))
    kind = f", {sparse} of them with {shape.num_experts} experts, {shape.experts_per_token} a token" if sparse else ""
    size = f"{total / 1e9:.2f} billion parameters, " if engines or plan.parallel.world == plan.parallel.dp else ""
    memory = f"{plan.accelerator.memory_bytes / GB:.1f} GB"
    return (
        f"{plan.run.name}: {plan.run.algorithm.name} of {plan.run.model.path}, {size}{shape.num_layers} layers{kind}; "
        f"{plan.num_devices} x {plan.accelerator.name} of {memory}"
    )


def _batch(plan: Plan) -> Iterator[str]:
    work, division, layout = plan.workload, plan.division, plan.parallel
    lengths = (
        f"{work.prompt_tokens:,} + {work.response_tokens:,}" if work.response_tokens else f"{work.prompt_tokens:,}"
    )
    yield (
        f"{work.prompts:,} prompts x {work.group} = {work.sequences:,} sequences of {lengths} tokens, "
        f"{work.tokens:,} tokens a step"
    )
    axes = f"data parallel {layout.dp}, tensor {layout.tp}, pipeline {layout.pp}, context {layout.cp}"
    experts = f", expert {layout.ep}, expert data parallel {layout.edp}" if plan.architecture.num_experts else ""
    yield axes + experts
    yield (
        f"{division.updates} optimizer {'step' if division.updates == 1 else 'steps'} of {division.microbatches} "
        f"micro-batches on each rank, of at most {division.tokens:,} tokens"
    )
    if (engine := plan.engine) and plan.cuda:
        sharing = engine.config.engines_per_device
        shared = f"; {sharing} engines share each device" if sharing > 1 else ""
        yield (
            f"each of {plan.num_samplers} engines on {engine.config.devices_per_engine} devices samples "
            f"{engine.sequences:,} sequences; its cache holds {engine.cache_tokens:,} tokens{shared}"
        )


def _table(device: DeviceMemory) -> Iterator[str]:
    """Yields a row for each part of each role, and a column for each phase."""
    rows: dict[tuple[str, str], dict[Phase, float]] = {}
    for phase in device.phases:
        for role, part in device.at(phase):
            rows.setdefault((role, part.name), {})[phase] = part.bytes
    head = "".join(f"{phase.value:>13}" for phase in device.phases)
    yield f"{'':{LABEL}}{'':54}{head}"
    order = [process.role for process in device.processes]
    for (role, name), values in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        cells = "".join(f"{values.get(phase, 0.0) / GB:13.1f}" if phase in values else f"{'-':>13}"
                        for phase in device.phases)  # fmt: skip
        yield f"{'':{LABEL}}{f'{role}: {name}':54}{cells}"
    sums = "".join(f"{device.bytes_at(phase) / GB:13.1f}" for phase in device.phases)
    yield f"{'':{LABEL}}{'all':54}{sums}"


def _fits(plan: Plan, given: int | None) -> Iterator[str]:
    device, memory = plan.worst, plan.accelerator.memory_bytes
    left = -plan.missing_bytes
    peak = f"{device.peak} takes most: {device.peak_bytes / GB:.1f} of {memory / GB:.1f} GB"
    if left < 0:
        yield f"no. {peak}, {-left / GB:.1f} GB too many"
    elif left < allocator_bytes(plan):
        yield (
            f"barely. {peak}, {left / GB:.1f} GB are left, and torch's allocator likes "
            f"{allocator_bytes(plan) / GB:.1f} GB more than the tensors"
        )
    else:
        yield f"yes. {peak}, {left / GB:.1f} GB are left"
    if not plan.engine_fits:
        assert plan.engine is not None
        yield (
            f"no. The engine's cache of {plan.engine.cache_tokens:,} tokens holds no sequence of "
            f"{plan.engine.sequence_tokens:,}: raise rollout.{plan.engine.cache_setting} or rollout.tp"
        )
    if given is not None and given != plan.num_devices:
        more = "more than" if plan.num_devices > given else "fewer than"
        yield f"the run needs {plan.num_devices} devices, {more} the {given} given"
    if plan.host.waiting_bytes:
        waiting = f"{plan.host.waiting_bytes / GB:.0f} GB"
        yield f"each host must have {waiting} of memory for what waits, is held or is updated there"
    if plan.host.checkpoint_copy_bytes:
        yield (
            "training goes on while a checkpoint is written where each host has "
            f"{plan.host.checkpoint_copy_bytes / GB:.1f} GB of memory for a copy (checkpoint.asynchronous)"
        )


def allocator_bytes(plan: Plan) -> float:
    """Returns what torch's allocator reserves beyond the tensors of a step."""
    return sum(part.again for part in plan.trainer.process().work[Phase.TRAIN])


def _seconds(plan: Plan) -> Iterator[str]:
    found = plan.step_seconds
    if not found:
        yield f"not predicted: the speeds of {plan.accelerator.name} are not known"
        return
    parts = ", ".join(f"{phase} {value:.3g}" for phase, value in found.items())
    total = plan.total_seconds
    rate = plan.workload.tokens / total / plan.num_devices
    yield f"{parts}; a step {total:.3g}, {rate:,.0f} tokens a second and device"
    speeds = plan.accelerator.speeds
    assert speeds is not None
    work = plan.workload
    predicted = work.response_tokens / work.sequence_tokens if work.response_tokens else 1.0
    flops = seconds.training_operations(plan.architecture, mean_length=work.sequence_tokens, predicted=predicted)
    epochs = plan.run.train.epochs_per_batch
    mfu = flops * work.tokens * epochs / (plan.update_seconds * plan.parallel.world * speeds.flops)
    yield f"training at {100 * mfu:.0f} % of the devices' peak (MFU); every response is assumed as long as said above"


def _sync(plan: Plan) -> Iterator[str]:
    engine, run = plan.engine, plan.run
    assert engine is not None
    where = "on the ranks' devices" if run.cluster.colocate else "on devices of their own"
    yield (
        f"{engine.config.num_devices} devices of engines {where} pull "
        f"{engine.config.engines_per_device * engine.weights_bytes / GB:.2f} GB each, from {plan.parallel.world} ranks"
    )
    alone = engine.config.engines_per_device == 1
    if engine.role == ENGINES and run.rollout.name != "transformers" and plan.cuda and alone:
        ep = " --ep" if getattr(run.rollout, "expert_parallel", False) else ""
        split = "" if run.cluster.colocate else " --split"
        yield (
            f"every link: python -m rlframe.tools.plan_sync --model {run.model.path} --train "
            f"{quoted(str(plan.parallel))} --engine {run.rollout.name} --tp {engine.config.devices_per_engine} "
            f"--engines {engine.config.num_engines}{ep}{split}"
        )


def _layouts(plan: Plan, layouts: Iterable[Layout]) -> Iterator[str]:
    if not plan.accelerator.speeds:
        yield f"not compared: the speeds of {plan.accelerator.name} are not known"
        return
    count = 0
    for count, layout in enumerate(layouts, start=1):  # noqa: B007
        phases = ", ".join(f"{phase} {value:.3g}" for phase, value in layout.plan.step_seconds.items())
        yield (
            f"{count}. {' '.join(layout.overrides)}: {layout.plan.total_seconds:.3g} s a step ({phases}), "
            f"{layout.margin_bytes / GB:.0f} GB left"
        )
    if not count:
        yield "none fits these devices"


def facts(plan: Plan, faults: Iterable[Fault], layouts: Iterable[Layout]) -> dict[str, Any]:
    """Returns the plan for programs: bytes and seconds."""
    return {
        "device": plan.accelerator.name,
        "device_bytes": plan.accelerator.memory_bytes,
        "num_devices": plan.num_devices,
        "faults": [str(fault) for fault in faults],
        "devices": [
            {
                "count": device.count,
                "roles": [process.role for process in device.processes],
                "phases": {
                    phase.value: [{"role": role, "part": part.name, "bytes": part.bytes}
                                  for role, part in device.at(phase)]
                    for phase in device.phases
                },
                "reserved": {phase.value: device.reserved_bytes_at(phase) for phase in device.phases},
            }
            for device in plan.devices
        ],
        "fits": plan.fits,
        "missing_bytes": plan.missing_bytes,
        "host_bytes": plan.host.waiting_bytes,
        "checkpoint_copy_bytes": plan.host.checkpoint_copy_bytes,
        "seconds": plan.step_seconds,
        "layouts": [
            {
                "overrides": list(layout.overrides),
                "seconds": layout.plan.step_seconds,
                "margin_bytes": layout.margin_bytes,
            }
            for layout in layouts
        ],
    }  # fmt: skip
