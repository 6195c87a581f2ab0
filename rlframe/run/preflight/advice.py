"""Changes of settings that free memory, ranked."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlframe.megatron.config.optimizer import OptimizerName
from rlframe.megatron.config.options import MomentDtype, Recompute, RecomputeConfig, RecomputeMethod
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype
from rlframe.models import shards
from rlframe.rollout.served.config import ServedConfig
from rlframe.run.config import RunConfig
from rlframe.run.preflight.plan import Plan, with_run
from rlframe.run.preflight.workload import layout_of
from rlframe.types.results import Output
from rlframe.utils.build import as_dict
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault, shown
from rlframe.utils.nested import flat

LOWEST_UTILIZATION = 0.15
"""Least rollout.gpu_memory_utilization that is advised."""
LONG = 16384
"""Tokens of a sequence on a rank from which on settings for long sequences are advised. Of shorter ones, fewer in a
micro-batch cost less."""
CHUNK = 4096
"""Value of train.logits_chunk_tokens that is advised."""
ROUNDS = 3
"""Number of times that all proposals are gone through for a combination."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting and its new value."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}={shown(self.new)} (from {shown(self.old)})"


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes that go together."""

    changes: tuple[Change, ...]
    frees: float
    """Bytes of the fullest device's peak."""
    fits: bool
    """Whether the run fits with them."""
    plan: Plan
    """The plan with them."""

    def __str__(self) -> str:
        text = " and ".join(str(change) for change in self.changes)
        return f"{text} frees {self.frees / 1e9:.1f} GB{', and the run fits' if self.fits else ''}"


def advise(plan: Plan, *, most: int = 4) -> list[Advice]:
    """Returns changes that free memory: those with which the run fits, the cheapest first; else the greatest, and the
    first combination of them with which it fits."""
    found = [advice for advice in singles(plan) if advice.frees > 0 or advice.fits]
    enough = [advice for advice in found if advice.fits]
    if enough:
        return enough[:most]
    ranked = sorted(found, key=lambda advice: -advice.frees)[: most - 1]
    together = _together(plan)
    return [*ranked, together] if together else ranked


def singles(plan: Plan) -> Iterator[Advice]:
    """Yields every single change that the layout and the rules allow, the cheapest first."""
    for propose in PROPOSALS:
        yield from _tried(plan, propose)


def _together(plan: Plan) -> Advice | None:
    """Returns the first combination that fits: every proposal that frees something, in the order of its cost, and from
    the first again, because what takes most has changed."""
    now = plan
    for propose in PROPOSALS * ROUNDS:
        options = [advice for advice in _tried(now, propose) if advice.frees > 0 or advice.fits]
        if not options:
            continue
        now = max(options, key=lambda each: each.frees).plan
        if now.fits:
            return _advice(plan, now)
    return None


def _tried(plan: Plan, propose: "Proposal") -> Iterator[Advice]:
    try:
        runs = list(propose(plan.run, plan))
    except SettingError:
        # It does not go together with another setting of the run.
        return
    for run in runs:
        other = with_run(plan, run)
        if not faults_of(other) and is_allowed(other, plan):
            yield _advice(plan, other)


def _advice(plan: Plan, other: Plan) -> Advice:
    changes = tuple(changes_between(plan.run, other.run))
    return Advice(changes, plan.worst.peak_bytes - other.worst.peak_bytes, other.fits, other)


def is_allowed(other: Plan, plan: Plan) -> bool:
    """Returns whether the rules find nothing in another plan that they do not find in `plan`."""
    return other.known <= plan.known


def changes_between(old: RunConfig, new: RunConfig) -> Iterator[Change]:
    """Yields every setting of `new` that has another value in `old`, those of the ranks first."""
    before, after = _settings(old), _settings(new)
    for key in sorted(after, key=lambda key: (not key.startswith("train."), list(after).index(key))):
        if key not in before or before[key] != after[key]:
            yield Change(key, before.get(key), after[key])


def _settings(run: RunConfig) -> dict[str, Any]:
    """Returns the settings by dotted key, layouts as one text."""
    settings = as_dict(run)
    settings["train"]["parallel"] = str(layout_of(run.train.parallel))
    if run.critic.train is not None:
        settings["critic"]["train"]["parallel"] = str(layout_of(run.critic.train.parallel))
    return flat(settings)


def faults_of(plan: Plan) -> list[Fault]:
    """Returns the faults of the layouts of ranks and of the engine's split, without which nothing can be counted."""
    found = []
    for architecture, layout in plan.layouts():
        sizes = {name: getattr(layout, name) for name in ("dp", "tp", "cp", "ep", "etp")}
        context = asdict(plan.run.train.context_parallel)
        found += shards.faults(architecture, **sizes, **layout.stages, **context)
    return [*found, *plan.run.rollout.faults(plan.architecture)] if plan.engine else found


Proposal = Callable[[RunConfig, Plan], Iterator[RunConfig]]


def release(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields that gradients and the memory of past micro-batches make room for engines."""
    if plan.cuda and plan.engine and run.cluster.colocate and not run.train.sleeps:
        yield replace(run, train=replace(run.train, release_memory=True))


def sleep(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields that main weights and moments wait in host memory while engines sample."""
    if plan.cuda and plan.engine and run.cluster.colocate and not run.train.offload_optimizer:
        yield replace(run, train=replace(run.train, offload_optimizer=True))


def engine_sleep(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields that engines free their memory while the policy works."""
    rollout = run.rollout
    if plan.engine and plan.engine.shares and isinstance(rollout, ServedConfig) and not rollout.sleeps:
        yield replace(run, rollout=replace(rollout, sleep_level=2))


def recompute(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields that layers are computed twice instead of being kept."""
    if run.train.recompute is not Recompute.FULL:
        train = replace(run.train, recompute=Recompute.FULL, recompute_options=RecomputeConfig())
        yield replace(run, train=train)


def layer_inputs(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields that the inputs of recomputed layers wait in host memory, where a sequence is long."""
    train = run.train
    uniform = train.recompute is Recompute.FULL and train.recompute_options.method is RecomputeMethod.UNIFORM
    if plan.cuda and uniform and not train.offload_activations and longest_share(plan) >= LONG:
        yield replace(run, train=replace(train, offload_activations=True))


def logits(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields that logits are computed by chunks, where a sequence is long."""
    tokens = plan.algorithm.output is Output.TOKENS
    if tokens and run.train.logits_chunk_tokens is None and longest_share(plan) >= LONG:
        yield replace(run, train=replace(run.train, logits_chunk_tokens=CHUNK))


def longest_share(plan: Plan) -> int:
    """Returns the tokens that a rank has of the longest sequence."""
    return -(-(plan.workload.prompt_tokens + plan.workload.longest_response) // plan.parallel.cp)


def claim(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields that engines claim as little as fits beside the others, or as much as they need."""
    rollout = run.rollout
    if not (plan.engine and plan.cuda and isinstance(rollout, ServedConfig)):
        return
    if rollout.kv_cache_gb is not None:
        yield from cache_size(run, plan, rollout)
        return
    least = plan.engine.weights_bytes + plan.engine.drafter_bytes + 2.5e9
    least += plan.engine.sequence_bytes * 4
    fitting = rollout.gpu_memory_utilization - max(0.0, plan.missing_bytes) / plan.accelerator.memory_bytes
    wanted = max(LOWEST_UTILIZATION, least / plan.accelerator.memory_bytes)
    new = int(100 * max(wanted, fitting)) / 100
    if new != rollout.gpu_memory_utilization and new <= 0.95:
        yield replace(run, rollout=replace(rollout, gpu_memory_utilization=new))


def cache_size(run: RunConfig, plan: Plan, rollout: ServedConfig) -> Iterator[RunConfig]:
    """Yields a cache as large as fits beside the others, of four sequences at least."""
    assert plan.engine is not None and rollout.kv_cache_gb is not None
    least = plan.engine.sequence_bytes * 4 / 1e9
    missing = max(0.0, plan.missing_bytes) / rollout.engines_per_device
    new = int(100 * max(least, rollout.kv_cache_gb - missing / 1e9)) / 100
    if 0 < new != rollout.kv_cache_gb:
        yield replace(run, rollout=replace(rollout, kv_cache_gb=new))


def moments(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields main weights without the bits that parameters have, then moments in bfloat16: both AdamW's alone."""
    optimizer = run.train.optimizer
    if optimizer.name != OptimizerName.ADAMW:
        return
    if not plan.cuda or run.train.dtype != Dtype.BFLOAT16 or optimizer.cpu_offload_fraction:
        return
    if not optimizer.precision_aware:
        changed = replace(optimizer, precision_aware=True)
        yield replace(run, train=replace(run.train, optimizer=changed))
    elif optimizer.moment_dtype is MomentDtype.FLOAT32:
        changed = replace(optimizer, moment_dtype=MomentDtype.BFLOAT16)
        yield replace(run, train=replace(run.train, optimizer=changed))


def tokens(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields smaller micro-batches, down to the longest sequence."""
    old = run.train.max_tokens_per_microbatch
    new = max(longest_share(plan), old // 2)
    if new < old:
        yield replace(run, train=replace(run.train, max_tokens_per_microbatch=new))


def gradients(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields gradients in the parameters' number format."""
    communication = run.train.communication
    if plan.cuda and run.train.dtype == Dtype.BFLOAT16 and communication.reduce_in_float32:
        train = replace(run.train, communication=replace(communication, reduce_in_float32=False))
        yield replace(run, train=train)


def layout(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields the same ranks with more of the model's parts shared out."""
    old = plan.parallel
    for changed in _layouts(old, bool(plan.architecture.num_experts)):
        yield replace(run, train=replace(run.train, parallel=str(changed)))


def engine_split(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields fewer engines of more devices."""
    rollout = run.rollout
    if (
        plan.engine
        and isinstance(rollout, ServedConfig)
        and rollout.num_engines % (2 * rollout.engines_per_device) == 0
    ):
        changed = replace(rollout, tp=rollout.tp * 2, num_engines=rollout.num_engines // 2)
        yield replace(run, rollout=changed)


def host(run: RunConfig, plan: Plan) -> Iterator[RunConfig]:
    """Yields main weights and moments updated by the CPU, which AdamW alone has."""
    optimizer = run.train.optimizer
    if plan.cuda and optimizer.name == OptimizerName.ADAMW and not optimizer.cpu_offload_fraction:
        changed = replace(optimizer, cpu_offload_fraction=1.0, precision_aware=False, moment_dtype=MomentDtype.FLOAT32)
        yield replace(run, train=replace(run.train, optimizer=changed))


PROPOSALS: tuple[Proposal, ...] = (
    engine_sleep,
    release,
    sleep,
    claim,
    recompute,
    tokens,
    logits,
    layer_inputs,
    moments,
    layout,
    engine_split,
    gradients,
    host,
)
"""In the order of what they cost: nothing that is learned changes before `moments`."""


def _layouts(old: Parallel, experts: bool) -> Iterator[Parallel]:
    for axis, other in (("ep", None), ("tp", "dp"), ("pp", "dp")):
        if axis == "ep" and not experts:
            continue
        if other and getattr(old, other) % 2:
            continue
        sizes = {axis: getattr(old, axis) * 2} | ({other: getattr(old, other) // 2} if other else {})
        try:
            yield replace(old, **sizes)
        except (ValueError, SettingError):
            continue
