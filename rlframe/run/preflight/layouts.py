"""The layouts of a run on given devices, by the seconds of a step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from rlframe.cluster.roles import ENGINES
from rlframe.megatron.config.options import ContextParallelConfig, Recompute, RecomputeConfig, RecomputeMethod
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.rollout.base.config import RolloutConfig
from rlframe.rollout.served.config import ServedConfig
from rlframe.run.config import RunConfig
from rlframe.run.preflight.advice import changes_between, faults_of, is_allowed
from rlframe.run.preflight.parts import Phase
from rlframe.run.preflight.plan import Plan, with_run
from rlframe.run.preflight.trainer import peak
from rlframe.utils.faults import shown

MARGIN = 0.03
"""Part of the memory that a proposed layout leaves free."""
CLAIMS = (0.15, 0.85)
"""Least and greatest claim of engines that share devices. The greatest that fits is taken."""
LONG = 16384
"""Tokens of a sequence from which on ranks may share it (cp)."""
OWN_UTILIZATION = 0.9
"""Claim of engines with devices of their own."""


@dataclass(frozen=True)
class Layout:
    """A layout with its overrides of the command line."""

    plan: Plan
    asked: RunConfig
    """The run as it was asked for."""

    @property
    def ranks(self) -> str:
        """The layout of the ranks."""
        return str(self.plan.parallel)

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        """The arguments that turn `asked` into it."""
        return tuple(overrides(self.asked, self.plan.run))

    @property
    def margin_bytes(self) -> float:
        """Bytes that the fullest device has left."""
        return -self.plan.missing_bytes


def best(plan: Plan, num_devices: int, *, most: int = 3) -> list[Layout]:
    """Returns the fastest layouts that fit `num_devices` devices, one for each layout of the ranks, the fastest
    first."""
    found: dict[str, Layout] = {}
    for layout in sorted(_candidates(plan, num_devices), key=lambda layout: layout.plan.total_seconds):
        if len(found) == most:
            break
        if layout.ranks not in found and is_allowed(layout.plan, plan):
            found[layout.ranks] = layout
    return list(found.values())


def _candidates(plan: Plan, num_devices: int) -> Iterator[Layout]:
    """Yields every combination of ranks, recomputation and engines that fits beside the models with devices of their
    own."""
    given = num_devices
    num_devices -= sum(device.count for device in plan.devices[1:] if ENGINES not in device.names)
    for own, parallel in _ranks(plan, num_devices):
        for train in _trained(plan, parallel):
            alone = with_run(plan, replace(plan.run, train=train))
            if _refused(alone) or peak(alone.trainer.process()) > _usable(plan):
                continue
            for rollout in _engines(plan, num_devices - parallel.world if own else num_devices, own=own):
                found = _fitting(alone, rollout, plan.run)
                # A critic with devices of its own may have got another layout too.
                if found and found.plan.num_devices <= given:
                    yield found


def _usable(plan: Plan) -> float:
    return plan.accelerator.memory_bytes * (1 - MARGIN)


def _ranks(plan: Plan, num_devices: int) -> Iterator[tuple[bool, Parallel]]:
    """Yields whether engines have devices of their own, and a layout of the ranks."""
    own = plan.engine is not None and not plan.run.cluster.colocate
    worlds = range(1, num_devices) if own else (num_devices,)
    # Sharing a sequence only costs where it fits one rank.
    contexts = (1,) if plan.workload.sequence_tokens <= LONG else (1, 2, 4, 8)
    for world in worlds:
        for tp in (size for size in (1, 2, 4, 8) if world % size == 0):
            for pp in (size for size in (1, 2, 4, 8) if world // tp % size == 0):
                for cp in (size for size in contexts if world // tp // pp % size == 0):
                    yield from ((own, each) for each in _experts(plan, world, tp=tp, pp=pp, cp=cp))


def _experts(plan: Plan, world: int, *, tp: int, pp: int, cp: int) -> Iterator[Parallel]:
    sizes = (1, 2, 4, 8, 16, 32) if plan.architecture.num_experts else (1,)
    for ep in sizes:
        if world // pp % ep == 0:
            yield Parallel(dp=world // tp // pp // cp, tp=tp, pp=pp, cp=cp, ep=ep)


def _engines(plan: Plan, num_devices: int, *, own: bool) -> Iterator[RolloutConfig]:
    rollout = plan.run.rollout
    shared = rollout.engines_per_device
    if plan.engine is None:
        yield rollout
    elif isinstance(rollout, ServedConfig):
        for tp in (size for size in (1, 2, 4, 8) if num_devices % size == 0):
            split = {"tp": tp, "expert_parallel": rollout.expert_parallel and tp > 1}
            claim = {"gpu_memory_utilization": OWN_UTILIZATION} if own and rollout.measures_memory else {}
            yield replace(rollout, **split, **claim, num_engines=num_devices // tp * shared)
    else:
        yield replace(rollout, num_engines=num_devices * shared)


def _trained(plan: Plan, parallel: Parallel) -> Iterator[TrainConfig]:
    """Yields settings without recomputation, with half of the layers recomputed, with all. Where ranks and engines take
    turns, ranks keep their memory, leave what needs no copy, or move main weights and moments to host memory."""
    layers = plan.architecture.num_layers // parallel.pp
    half = RecomputeConfig(method=RecomputeMethod.BLOCK, layers=max(1, layers // 2))
    turns = plan.engine is not None and plan.run.cluster.colocate and plan.cuda
    longest = -(-plan.workload.sequence_tokens // parallel.cp)
    communication = replace(
        plan.run.train.communication,
        overlap_grad_reduce=False, overlap_param_gather=False, bucket_parameters=None,
    )  # fmt: skip
    for recompute, options in (
        (Recompute.NONE, RecomputeConfig()),
        (Recompute.FULL, half),
        (Recompute.FULL, RecomputeConfig()),
    ):
        for release, offload in ((False, False), (True, False), (False, True)) if turns else ((False, False),):
            yield replace(
                plan.run.train,
                parallel=parallel,
                recompute=recompute,
                recompute_options=options,
                offload_activations=plan.run.train.offload_activations
                and options.method is RecomputeMethod.UNIFORM
                and recompute is Recompute.FULL,
                context_parallel=plan.run.train.context_parallel if parallel.cp > 1 else ContextParallelConfig(),
                max_tokens_per_microbatch=max(longest, plan.run.train.max_tokens_per_microbatch),
                communication=communication,
                release_memory=release,
                offload_optimizer=offload,
            )


def _fitting(plan: Plan, rollout: RolloutConfig, asked: RunConfig) -> Layout | None:
    """Returns the layout with the greatest claim of the engines that fits."""
    other = with_run(plan, replace(plan.run, rollout=rollout))
    if plan.engine is not None and faults_of(other):
        return None
    shared = plan.engine is not None and plan.run.cluster.colocate and plan.cuda
    if shared and isinstance(rollout, ServedConfig) and rollout.measures_memory:
        left = _usable(plan) - other.devices[0].bytes_at(Phase.GENERATION)
        claim = int(100 * (rollout.gpu_memory_utilization + left / plan.accelerator.memory_bytes)) / 100
        if claim < CLAIMS[0]:
            return None
        changed = replace(rollout, gpu_memory_utilization=min(claim, CLAIMS[1]))
        other = with_run(plan, replace(plan.run, rollout=changed))
    if other.worst.peak_bytes > _usable(plan) or not other.engine_fits:
        return None
    return Layout(other, asked)


def _refused(plan: Plan) -> bool:
    """Returns whether rules about the layout refuse it, or ranks would have no sequence."""
    short = plan.workload.sequences // plan.run.train.num_minibatches < plan.parallel.dp
    return short or bool(faults_of(plan))


def overrides(old: RunConfig, new: RunConfig) -> Iterator[str]:
    """Yields the arguments of the command line that turn one run's layout into another's, the ranks first."""
    yield f"train.parallel={quoted(str(new.train.parallel))}"
    for change in changes_between(old, new):
        if change.key != "train.parallel":
            yield f"{change.key}={shown(change.new)}"


def quoted(text: str) -> str:
    """Returns a layout as a shell and Hydra take it."""
    return f"'{text}'" if "|" in text or "{" in text else text
