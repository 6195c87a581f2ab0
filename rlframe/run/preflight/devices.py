"""Devices: their memory and their speeds."""

import ctypes
from dataclasses import dataclass

import psutil

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
        """Returns whether it stands for the host."""
        return self.name == "cpu"


HOPPER = 989e12
"""Operations a second of H100 SXM and H200, by their data sheets."""
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


def this_machine() -> Accelerator:
    """Returns the first CUDA device of this machine, or its host memory if it has none."""
    return cuda_device() or host()


def host() -> Accelerator:
    """Returns the memory of this machine."""
    return Accelerator(name="cpu", memory_bytes=psutil.virtual_memory().total)


def cuda_device() -> Accelerator | None:
    """Returns the first CUDA device of this machine, or None.

    The driver is asked: through torch this process would become one that uses the device.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name, size = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetName(name, len(name), device)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    )
    return None if failed else named(name.value.decode(), size.value)


def named(name: str, memory_bytes: int) -> Accelerator:
    """Returns the device that a driver calls `name`, with the speeds of its kind if that is known."""
    kinds = (kind for kind in KINDS.values() if kind.name.partition("-")[0] in name.lower())
    speeds = next((kind.speeds for kind in kinds), None)
    return Accelerator(name=name, memory_bytes=memory_bytes, speeds=speeds)
