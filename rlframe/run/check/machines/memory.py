"""Rules about memory: what cannot fit is refused, with the changes that would make it fit."""

from collections.abc import Iterator

from rlframe.cluster.config import Device, Preflight
from rlframe.loops.config import Asynchronous
from rlframe.run.check.context import algorithm_of, device_of
from rlframe.run.config import RunConfig
from rlframe.run.preflight.advice import advise, faults_of
from rlframe.run.preflight.devices import Accelerator, cuda_device, host
from rlframe.run.preflight.plan import Plan, plan
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault

CERTAIN = 0.02
"""Part of the memory that a prediction must exceed it by, which is more than the model of memory was wrong by."""


def faults(run: RunConfig) -> Iterator[Fault]:
    """Refuses a run whose memory exceeds this machine's. On a CPU only what processes hold for certain counts. Other
    machines of a cluster are not known here."""
    accelerator = devices_of(run)
    if run.cluster.preflight is Preflight.OFF or accelerator is None:
        return
    from rlframe.run.check import faults_of_settings  # noqa: PLC0415 - the package imports this file

    try:
        found = plan(run, algorithm_of(run), accelerator, rules=faults_of_settings)
        if not faults_of(found):
            yield from (device_faults if found.cuda else host_faults)(found)
            yield from copy_faults(found)
    except (ConfigError, CheckpointError):
        # The topics about the models say why.
        return


def devices_of(run: RunConfig) -> Accelerator | None:
    """Returns the devices of this machine, or None if the run joins a cluster with devices of its own."""
    if run.cluster.joins:
        return None
    return host() if device_of(run) is Device.CPU else cuda_device()


def device_faults(found: Plan) -> Iterator[Fault]:
    """Yields a fault if a phase exceeds a device's memory, or if engines have no room for a sequence."""
    memory, device = found.accelerator.memory_bytes, found.worst
    advice = [str(each) for each in advise(found)]
    hint = f"{'; or '.join(advice)}. " if advice else "more devices would be needed. "
    hint += "`python -m rlframe.tools.plan` shows every part; cluster.preflight=off starts the run in any case"
    if found.certainly_missing_bytes > CERTAIN * memory:
        yield Fault(
            "cluster.preflight",
            said=f"{device.peak} takes {device.peak_bytes / 1e9:.1f} GB of each device with {device.roles}, and "
            f"{found.accelerator.name} has {memory / 1e9:.1f} GB; {hint}",
        )
    elif found.engine and not found.engine.holds_a_sequence:
        yield Fault(
            f"rollout.{found.engine.cache_setting}",
            "leaves no room for the keys and values of one sequence",
            got=getattr(found.run.rollout, found.engine.cache_setting, ""),
            why=f"they take {found.engine.sequence_bytes / 1e9:.2f} GB of each device and the weights "
            f"{found.engine.weights_bytes / 1e9:.1f}",
            hint=hint,
        )


def copy_faults(found: Plan) -> Iterator[Fault]:
    """Yields a fault if a copy of the training state is wanted that this machine has no memory for."""
    asked, memory = found.run.checkpoint.asynchronous, host().memory_bytes
    held = found.host.waiting_bytes + (0.0 if found.cuda else found.resident_bytes)
    if asked is Asynchronous.TRUE and held + found.host.checkpoint_copy_bytes > memory:
        yield Fault(
            "checkpoint.asynchronous",
            "must be auto or false",
            got=asked.value,
            why=f"a copy of the training state takes {found.host.checkpoint_copy_bytes / 1e9:.1f} GB beside "
            f"{held / 1e9:.1f} GB, and this machine has {memory / 1e9:.1f} GB of memory",
        )


def host_faults(found: Plan) -> Iterator[Fault]:
    """Yields a fault if weights, gradients and optimizer of all ranks alone exceed the memory of the machine."""
    held, memory = found.resident_bytes, found.accelerator.memory_bytes
    if held > memory:
        yield Fault(
            "cluster.preflight",
            said=f"weights, gradients and optimizer of all processes take {held / 1e9:.1f} GB, and this machine has "
            f"{memory / 1e9:.1f} GB of memory; use a smaller model, fewer engines (rollout.num_engines) or train.lora. "
            "cluster.preflight=off starts the run in any case",
        )
