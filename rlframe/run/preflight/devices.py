"""What a device can hold and how fast it is."""

from dataclasses import dataclass, replace

import psutil
import torch

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Peaks by the data sheet, but for those that were measured."""

    flops: float
    """bfloat16 operations a second, dense."""
    memory: float
    """Bytes a second that kernels read and write."""
    peer: float
    """Bytes a second in one direction between two devices of a host."""
    network: float = 50e9
    """Bytes a second of one device's network card: 400 Gbit/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """A kind of device."""

    name: str
    memory_bytes: int
    """Memory that a program finds, of which the driver has taken its part already."""
    speeds: Speeds | None = None
    """None if they are not known; seconds are then not predicted."""

    @property
    def is_cpu(self) -> bool:
        """Whether it stands for the host."""
        return self.name == "cpu"

    def as_host(self) -> "Accelerator":
        """Returns the host of this machine."""
        return self if self.is_cpu else host()


HOPPER = 989e12
"""Of H100 SXM, H200 and GH200, by their data sheets."""
KINDS = {
    each.name: each
    for each in (
        # Copies measured on H200: 2,117 GB/s of payload, so that twice as much is moved; NVLink 394 GB/s.
        Accelerator(
            name="h200",
            memory_bytes=int(139.8 * GIB),
            speeds=Speeds(flops=HOPPER, memory=4.23e12, peer=394e9),
        ),
        # The others by data sheets, memory and links at the fraction that H200 reaches (0.88).
        Accelerator(name="h100", memory_bytes=int(79.1 * GIB), speeds=Speeds(flops=HOPPER, memory=2.95e12, peer=394e9)),
        Accelerator(name="a100", memory_bytes=int(79.1 * GIB), speeds=Speeds(flops=312e12, memory=1.79e12, peer=264e9)),
        Accelerator(
            name="a100-40gb", memory_bytes=int(39.4 * GIB), speeds=Speeds(flops=312e12, memory=1.37e12, peer=264e9)
        ),
        Accelerator(
            name="b200", memory_bytes=int(178.3 * GIB), speeds=Speeds(flops=2250e12, memory=7.0e12, peer=790e9)
        ),
        Accelerator(name="l40s", memory_bytes=int(44.4 * GIB), speeds=Speeds(flops=362e12, memory=0.76e12, peer=25e9)),
    )
}
"""Known devices by the names of `--device`."""


def host() -> Accelerator:
    """Returns the memory of this machine."""
    return Accelerator(name="cpu", memory_bytes=psutil.virtual_memory().total)


def this_machine() -> Accelerator:
    """Returns the first CUDA device of this machine, or its host memory if it has none."""
    if not torch.cuda.is_available():
        return host()
    found = torch.cuda.get_device_properties(0)
    kinds = (kind for name, kind in KINDS.items() if name.partition("-")[0] in found.name.lower())
    known = next(kinds, Accelerator(name=found.name, memory_bytes=0))
    return replace(known, memory_bytes=found.total_memory)
