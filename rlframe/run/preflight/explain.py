"""Adds to an out-of-memory error what was predicted, and what would free memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlframe.algorithms.base import Algorithm
from rlframe.cluster.roles import CRITIC, ENGINES
from rlframe.run.config import RunConfig
from rlframe.run.preflight.advice import faults_of, singles
from rlframe.run.preflight.devices import Accelerator, host
from rlframe.run.preflight.parts import DeviceMemory, Phase
from rlframe.run.preflight.plan import Plan, plan
from rlframe.utils.errors import CheckpointError, ConfigError, OutOfMemory

ENGINE_ROLES = ("rollout", "evaluation")
"""Roles of workers that are engines of the policy."""
MOST = 4
"""Greatest number of changes that are named."""
CALLS = {
    "train": Phase.TRAIN,
    "generate": Phase.GENERATION,
    "wake": Phase.GENERATION,
    "score": Phase.GENERATION,
    "top": Phase.GENERATION,
    "receive": Phase.SYNC,
    "weights": Phase.SYNC,
    "on_ranks": Phase.SYNC,
}
"""The phase of a worker's call; any other is a forward pass."""


@contextmanager
def explaining(run: RunConfig, algorithm: Algorithm) -> Iterator[None]:
    """Adds the prediction and advice to an OutOfMemory that leaves the block."""
    try:
        yield
    except OutOfMemory as error:
        raise explained(run, algorithm, error) from error


def explained(run: RunConfig, algorithm: Algorithm, error: OutOfMemory) -> OutOfMemory:
    """Returns the error with what was predicted for its phase, and with changes that free memory."""
    device = Accelerator(name=error.device, memory_bytes=error.device_bytes) if error.device else host()
    try:
        found = plan(run, algorithm, device)
        if faults_of(found):
            return error
        return error.explained("\n".join([predicted(found, error), *advice(found, error)]))
    except (ConfigError, CheckpointError):
        # The models' files are no longer there.
        return error


def predicted(found: Plan, error: OutOfMemory) -> str:
    """Returns the sentence about the prediction."""
    device = device_of(found, error.role)
    phase = phase_of(error)
    if phase is None:
        held = sum(part.bytes for process in device.processes for part in process.resident)
        return f"predicted for the start: {held / 1e9:.2f} GB on {place(found, device)}"
    return f"predicted for {phase}: {device.bytes_at(phase) / 1e9:.2f} GB on {place(found, device)}"


def phase_of(error: OutOfMemory) -> Phase | None:
    """Returns the phase in which the error arose. None for the start of a process."""
    call = error.call.partition("(")[0]
    if call == "start":
        return None
    return Phase.CRITIC if error.role == CRITIC else CALLS.get(call, Phase.LOGPROBS)


def device_of(found: Plan, role: str) -> DeviceMemory:
    """Returns the device that a role is on; that of the policy for a role that has none."""
    role = ENGINES if role in ENGINE_ROLES else role
    having = (device for device in found.devices if role in [process.role for process in device.processes])
    return next(having, found.devices[0])


def place(found: Plan, device: DeviceMemory) -> str:
    """Returns the device in words."""
    share = f"each of {device.count} devices with {device.roles}"
    return f"{share}, which have {found.accelerator.memory_bytes / 1e9:.1f} GB" if found.cuda else share


def advice(found: Plan, error: OutOfMemory) -> Iterator[str]:
    """Yields what would free most memory in the phase of the error."""
    phase = phase_of(error) or Phase.TRAIN
    before = device_of(found, error.role).bytes_at(phase)
    freed = [(before - device_of(each.plan, error.role).bytes_at(phase), each) for each in singles(found)]
    for size, each in sorted(freed, key=lambda pair: -pair[0])[:MOST]:
        if size > 0:
            yield f"{' and '.join(map(str, each.changes))} would free {size / 1e9:.2f} GB"
