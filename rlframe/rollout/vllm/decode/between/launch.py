"""Compiles and launches `kernel.cu`: NVRTC and the driver, by NVIDIA's cuda-bindings."""

import ctypes
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROWS = 8
"""Most rows of a launch. With 16 it was no faster than four products for a 1.7 B, and slower by a tenth and a fifth for
a 4 B and an 8 B (H200, 2026-11-29)."""
TILE, DEPTH, WARPS, LOADERS = 16, 512, 8, 4
"""Numbers of kernel.cu. A test compares them."""
MOST_HIDDEN = 4096
"""Most numbers of a row between layers: a thread that norms holds a 32nd of them."""
LEAST_STAGES = 8
"""Least slots of a ring that are worth it. The kernel needs more than it asks for at once."""
SOURCE = Path(__file__).with_name("kernel.cu")

_POINTERS = (
    "attended", "residual", "output", "norm", "gate_up", "down", "next_norm", "next", "bias",
    "middle", "gated", "result", "residual_out", "arrived",
)  # fmt: skip
_NUMBERS = ("rows", "attended_row", "heads", "inner", "columns")


class _Step(ctypes.Structure):
    """The structure of this name in kernel.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _NUMBERS),
        ("epsilon", ctypes.c_float),
        ("nothing", ctypes.c_uint),
    )


class Layer(NamedTuple):
    """Weights between two attentions, contiguous bfloat16."""

    output: Tensor
    """[H, A]: of the product that ends the first attention."""
    norm: Tensor
    """[H]"""
    gate_up: Tensor
    """[2 I, H]"""
    down: Tensor
    """[H, I]"""
    next_norm: Tensor | None
    """[H]. None after the last attention."""
    next: Tensor | None
    """[N, H]: of the product that begins the next attention."""
    bias: Tensor | None
    """[N], if that product has one."""


class Kernel(NamedTuple):
    """A kernel on a device."""

    function: Any
    shared_bytes: int
    """Bytes of shared memory of a program."""
    programs: int
    """As many as the device has multiprocessors: all of them must run at the same time."""
    arrived: int
    """Address of the counter of the programs that have arrived at a meeting."""


def is_available() -> bool:
    """Returns whether cuda-bindings is installed."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def takes(layer: Layer) -> bool:
    """Returns whether there is a kernel for weights: all bfloat16 and contiguous, with numbers of a row that are
    multiples of DEPTH, and rows of TILE."""
    present = [tensor for tensor in layer if tensor is not None]
    hidden, heads = layer.output.shape
    inner = layer.down.shape[1]
    columns = 0 if layer.next is None else len(layer.next)
    return (
        hidden <= MOST_HIDDEN
        and not any(number % DEPTH for number in (hidden, heads, inner))
        and columns % TILE == 0
        and all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in present)
    )


def stages_for(hidden: int, limit: int) -> int:
    """Returns the most slots of the ring for which the shared memory of a program is at most `limit` bytes.

    Args:
        hidden: numbers of a row between layers.
    """
    return (limit - shared_bytes(hidden, 0)) // (shared_bytes(hidden, 1) - shared_bytes(hidden, 0))


def shared_bytes(hidden: int, stages: int) -> int:
    """Returns the bytes of a program's shared memory: ring, normed rows, two buffers of sums, barriers, a flag."""
    ring = stages * TILE * (DEPTH * 2 + 64)
    normed = ROWS * (hidden * 2 + 64)
    sums = 2 * WARPS * TILE * (ROWS + 1) * 4
    return ring + normed + sums + 2 * stages * 8 + 8


@functools.cache
def kernel_for(device: torch.device, hidden: int) -> Kernel:
    """Returns the kernel for rows of `hidden` numbers, compiled at the first call.

    Not to be called first while a CUDA graph is captured.

    Raises:
        RuntimeError: a program of the device has too little shared memory, or NVRTC does not know the device.
    """
    from cuda.bindings import driver

    properties = torch.cuda.get_device_properties(device)
    stages = stages_for(hidden, properties.shared_memory_per_block_optin)
    if stages < LEAST_STAGES:
        raise RuntimeError(f"{properties.name} has memory for {stages} slots of a program, not for {LEAST_STAGES}")
    with torch.cuda.device(device):
        module = _checked(driver.cuModuleLoadData(compiled(properties, HIDDEN=hidden, STAGES=stages)))
        function = _checked(driver.cuModuleGetFunction(module, b"between"))
        size, attribute = shared_bytes(hidden, stages), driver.CUfunction_attribute
        _checked(driver.cuFuncSetAttribute(function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size))
        return Kernel(function, size, properties.multi_processor_count, _counter(device))


@functools.cache
def _counter(device: torch.device) -> int:
    """Returns the address of a counter on the current device, which is `device`. Launches follow one another, each with
    all programs.

    It is no tensor: while vLLM loads a model, torch's memory is that of weights, which sleeping engines give up.
    """
    from cuda.bindings import driver

    address = _checked(driver.cuMemAlloc(8))
    _checked(driver.cuMemsetD8(address, 0, 8))
    return int(address)


def compiled(properties: Any, **constants: int) -> bytes:
    """Returns the code of `kernel.cu` for a device.

    Args:
        properties: of `torch.cuda.get_device_properties`.
    """
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), SOURCE.name.encode(), 0, [], []))
    options = [f"--gpu-architecture=sm_{properties.major}{properties.minor}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"NVRTC cannot compile {SOURCE.name} with {constants}: {log.decode()}")
    code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code)


def _checked(results: tuple[Any, ...]) -> Any:
    """Returns what a function of the driver or NVRTC returned beside its status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *rest = results
    if int(status):
        raise RuntimeError(f"the CUDA driver or NVRTC failed: {status!r}")
    return rest[0] if rest else None


def between(attended: Tensor, residual: Tensor, layer: Layer, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns what the next attention begins with [B, N], and the new residual [B, H].

    After the last attention: the result of the layer [B, H], and the residual without it.

    Args:
        attended: [B, A] result of an attention, each row contiguous, B at most ROWS.
        residual: [B, H] contiguous.
        epsilon: of both norms.
    """
    from cuda.bindings import driver

    (rows, hidden), inner = residual.shape, layer.down.shape[1]
    kernel = kernel_for(residual.device, hidden)
    columns = 0 if layer.next is None else len(layer.next)
    middle, gated = torch.empty_like(residual), residual.new_empty(rows, inner)
    result, residual_out = residual.new_empty(rows, columns or hidden), torch.empty_like(residual)
    tensors = (attended, residual, *layer, middle, gated, result, residual_out)
    step = _Step(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        kernel.arrived,
        rows, attended.stride(0), attended.shape[1], inner, columns, epsilon, 0,
    )  # fmt: skip
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(step))
    _checked(driver.cuLaunchKernelEx(_launch(kernel, residual.device), kernel.function, ctypes.addressof(arguments), 0))
    return result, residual_out


def _launch(kernel: Kernel, device: torch.device) -> Any:
    """Returns the configuration of a launch on the device's current stream, which begins before the kernel ahead has
    ended."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    launch = driver.CUlaunchConfig()
    launch.gridDimX, launch.gridDimY, launch.gridDimZ = kernel.programs, 1, 1
    launch.blockDimX, launch.blockDimY, launch.blockDimZ = (WARPS + LOADERS) * 32, 1, 1
    launch.sharedMemBytes = kernel.shared_bytes
    launch.hStream = torch.cuda.current_stream(device).cuda_stream
    launch.attrs, launch.numAttrs = [attribute], 1
    return launch
