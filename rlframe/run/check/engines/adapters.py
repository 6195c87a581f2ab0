"""Rules about weight_sync.lora=adapter, and the adapters that engines are told of."""

from collections.abc import Iterator

from rlframe.cluster.config import Device
from rlframe.megatron.config.lora import LoraConfig, trained
from rlframe.models import adapters, hub
from rlframe.models.families.base import Architecture
from rlframe.rollout.base.adapter import EngineAdapter
from rlframe.rollout.served.config import ServedConfig
from rlframe.run.check.context import architecture_of, device_of, samples
from rlframe.run.check.model import layout_of_first_rank
from rlframe.run.config import Mode, RunConfig
from rlframe.utils.faults import Fault
from rlframe.weight_sync.config import HoldIn, LoraSync

KEY = "weight_sync.lora"
SETTING = "with weight_sync.lora=adapter"


def sends_adapters(run: RunConfig) -> bool:
    """Returns whether engines receive adapters instead of merged weights."""
    return run.train.lora is not None and run.weight_sync.lora is LoraSync.ADAPTER


def engine_adapter(run: RunConfig) -> EngineAdapter | None:
    """Returns the adapters of engines, or None if they receive whole weights."""
    lora, (architecture, _) = run.train.lora, architecture_of(run)
    if lora is None or architecture is None or not sends_adapters(run):
        return None
    tensors = {adapters.key(name, half): shape for name, half, shape in _trained(run, lora, architecture) if half}
    return EngineAdapter(rank=lora.rank, tensors=dict(sorted(tensors.items())))


def faults(run: RunConfig) -> Iterator[Fault]:
    """Checks that engines can compute with the policy's adapters, and that nothing needs their whole weights."""
    if not samples(run) or run.weight_sync.lora is LoraSync.MERGED:
        return
    lora, (architecture, _) = run.train.lora, architecture_of(run)
    if lora is None:
        yield Fault(
            KEY,
            "has no effect without train.lora, whose adapters it is about",
            got="adapter",
            hint="remove it, or set train.lora.rank",
        )
        return
    if architecture is not None:
        whole = sorted(name for name, half, _ in _trained(run, lora, architecture) if half is None)
        if whole:
            yield Fault(
                "train.lora.modules_to_save",
                f"must be [] {SETTING}",
                why=f"{whole[0]} is trained in full, and only adapters are sent",
                hint="or use weight_sync.lora=merged",
            )
        adapted = [name for name, half, _ in _trained(run, lora, architecture) if half == adapters.HALVES[0]]
        yield from run.rollout.adapter_faults(architecture, adapted, rank=lora.rank)
    yield from _circumstances(run)


def _circumstances(run: RunConfig) -> Iterator[Fault]:
    """Yields a fault for each other setting under which whole weights are needed."""
    sync, shared = run.weight_sync, run.cluster.colocate and device_of(run) is not Device.CPU
    if sync.transport == "reload":
        yield Fault(
            "weight_sync.transport",
            f"must not be reload {SETTING}",
            got="reload",
            why="adapters are written in place, and the base is proved in place",
        )
    if sync.hold is not HoldIn.NONE:
        yield Fault(
            "weight_sync.hold",
            f"must be none {SETTING}",
            got=sync.hold,
            why="the base of an engine that comes back is proved against the trainer's, which trains meanwhile",
        )
    if run.checkpoint.start_from is not None:
        yield Fault(
            "checkpoint.start_from",
            f"must be null {SETTING}",
            got=run.checkpoint.start_from,
            why="engines load their base from model.path",
            hint="or use weight_sync.lora=merged",
        )
    if shared and isinstance(run.rollout, ServedConfig) and run.rollout.sleep_level > 1:
        yield Fault(
            "rollout.sleep_level",
            f"must be 0 or 1 {SETTING}",
            got=run.rollout.sleep_level,
            why="2 drops the base, which is not sent again",
        )
    if run.rollout.speculative is not None:
        yield Fault(
            KEY,
            "must be merged with rollout.speculative",
            got="adapter",
            why="nobody has shown that engines draft, and check drafts, with adapters",
        )
    if run.mode is Mode.SELF_TEST:
        yield Fault(
            KEY,
            "must be merged with mode=self_test",
            got="adapter",
            why="it changes the base and looks whether engines notice",
        )


def _trained(
    run: RunConfig, lora: LoraConfig, architecture: Architecture
) -> list[tuple[str, str | None, tuple[int, ...]]]:
    family = hub.load_family(hub.resolve(run.model))
    boxes = layout_of_first_rank(family, architecture).boxes
    return list(trained(lora, {name: held[0].parameter for name, held in boxes.items()}, family.tensors(architecture)))
