"""Rules about engines whose weights, or whose keys and values, have 8 bits. See the package."""

from collections.abc import Iterator

from rlframe.cluster.config import Device
from rlframe.megatron.config.parallel import Parallel
from rlframe.models import hub
from rlframe.models.families.base import Architecture
from rlframe.models.quantized import blocks
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.models.shards import uneven_blocks
from rlframe.rollout.base.config import CacheFormat, EngineDtype
from rlframe.rollout.base.speculative import SpeculativeMethod
from rlframe.run.check.context import architecture_of, device_of, online, samples
from rlframe.run.check.engines.adapters import sends_adapters
from rlframe.run.config import RunConfig
from rlframe.utils.faults import Fault

KEY = "rollout.quantization"


def faults(run: RunConfig) -> Iterator[Fault]:
    """Checks that trainer and engines can quantise the model in the same way, and that nothing needs weights that are
    not quantised."""
    rollout, (architecture, _) = run.rollout, architecture_of(run)
    plain = rollout.engine_format is EngineFormat.NONE
    if not samples(run) or (plain and rollout.cache_format is CacheFormat.AUTO):
        return
    setting = f"{KEY}={rollout.engine_format}" if not plain else f"rollout.kv_cache_dtype={rollout.cache_format}"
    if (dtype := rollout.number_format(run.train.dtype)) is not EngineDtype.BFLOAT16:
        why = "kernels take activations in bfloat16"
        yield Fault("rollout.dtype", f"must be bfloat16 with {setting}", got=dtype, why=why)
    if architecture is not None and (device := device_of(run)) is not Device.AUTO:
        yield from rollout.quantization_faults(architecture, cuda=device is not Device.CPU)
    if plain:
        return
    if architecture is not None:
        yield from _model_faults(run, architecture)
    if run.weight_sync.transport == "reload":
        yield Fault(
            "weight_sync.transport",
            f"must not be reload with {setting}",
            got="reload",
            why="quantised weights are written in place",
        )
    if sends_adapters(run):
        why = "nobody has shown that engines compute with adapters beside weights in 8 bits"
        yield Fault("weight_sync.lora", f"must be merged with {setting}", got="adapter", why=why)
    if rollout.speculative is not None and rollout.speculative.method is SpeculativeMethod.MTP:
        why = "the heads would be quantised too, and nothing proves them"
        yield Fault("rollout.speculative.method", f"must not be mtp with {setting}", got="mtp", why=why)


def _model_faults(run: RunConfig, architecture: Architecture) -> Iterator[Fault]:
    """Yields a fault for every reason why ranks of the trainer cannot quantise what they hold of the model."""
    tensors = hub.load_family(hub.resolve(run.model)).tensors(architecture)
    if (name := blocks.unknown(tensors)) is not None:
        why = f"rlframe does not know whether engines quantise {name}"
        yield Fault(KEY, f"must be none for {architecture.model_type}", got=run.rollout.engine_format, why=why)
    if not run.trains(online=online(run)):
        return
    parallel = Parallel.parse(run.train.parallel)
    for words, size in uneven_blocks(architecture, tp=parallel.tp, expert_tp=parallel.etp):
        # Sizes that no rank splits are faults of rollout.quantization.
        if "/" in words:
            yield Fault(
                "train.parallel",
                f"must leave each rank whole blocks of {blocks.SIZE} with {KEY}={run.rollout.engine_format}: "
                f"{words} is {size} for {architecture.model_type}",
                got=run.train.parallel,
                hint="use a smaller tp or etp",
                stated=True,
            )
