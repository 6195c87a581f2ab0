"""The device of a rank, and the replacements with which Megatron-Core runs on a CPU.

No other file of rlframe depends on the device. On CUDA, `install` changes nothing in Megatron. On CPU it replaces the
CUDA calls that Megatron makes unconditionally. `tests/multiprocess/megatron/test_platform` trains without each
replacement in turn, and fails for each one that is no longer needed. Written against megatron-core 0.16.1 and 0.19.2,
and torch 2.11 to 2.13.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from rlframe.cluster.config import Device
from rlframe.cluster.cuda import check_cuda
from rlframe.megatron.cpu.gloo import on_one_device
from rlframe.megatron.cpu.products import by_blocks, is_faster

FACTORIES = ("tensor", "zeros")
FOR_CUDA = ("transformer_engine", "apex")
"""Packages that Megatron takes its optimizer and its norms of gradients from wherever they are installed, and that
compute on CUDA only."""
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with torch's settings of CUDA memory, by the new and the old name."""


def resolve(device: Device) -> torch.device:
    """Returns the torch device that `auto`, `cpu` or `cuda` means on this machine."""
    if device is Device.AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device is Device.CUDA:
        check_cuda()
    return torch.device(device.value)


def backend(device: torch.device) -> str:
    """Returns the torch.distributed backend for this device."""
    return "gloo" if device.type == "cpu" else "nccl"


def install(device: torch.device) -> None:
    """Makes Megatron-Core run on `device`. Must be called once per process, before anything imports megatron."""
    if device.type == "cuda":
        # Other processes open this one's parameters by CUDA IPC. Memory of expandable segments cannot be opened without
        # the right to trace this process, or only slowly (https://github.com/pytorch/pytorch/issues/165685).
        if any("expandable_segments:true" in os.environ.get(name, "").lower() for name in ALLOCATOR_SETTINGS):
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        # The rank's own GPU comes first among the visible ones.
        torch.cuda.set_device(device.index or 0)
        return
    if getattr(install, "done", False):
        return
    assert "megatron.core.tensor_parallel" not in sys.modules, "platform.install must run before megatron is imported"
    # tensor_parallel.layers warns at the first sequence-parallel forward pass without it; it has no effect on a CPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Megatron decorates functions with it that are not fused on a CPU. Importing the compiler for them would take as
    # long as all else that a rank imports.
    torch.compile = uncompiled
    with torch.device("cpu"):
        # torch notes its factories at the first call in such a block, and would take the wrappers below for them: their
        # tensors would not lie on the device of later blocks.
        torch.empty(0)
    for name in FOR_CUDA:
        # Its import then raises an ImportError, and Megatron uses torch's.
        sys.modules[name] = None
    for replacements in (in_torch, in_megatron, for_speed):
        for owner, name, replacement in replacements():
            setattr(owner, name, replacement)
    install.done = True


def in_torch() -> list[tuple[Any, str, Any]]:
    """Returns the replacements in torch of functions that Megatron calls regardless of the device: owner, name and
    replacement."""
    stream = NullStream()
    return [
        # tensor_parallel, param_and_grad_buffer and p2p_communication pass it as `device=`.
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "Stream", NullStream),
        # On a machine without a GPU torch's own would work.
        (torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        (torch.cuda, "current_stream", lambda *_: stream),
        # tensor_parallel.random keeps one generator state per parallel region; training draws no numbers from them.
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        *((torch, name, on_cpu(getattr(torch, name))) for name in FACTORIES),
        (torch.Tensor, "type", tensor_type(torch.Tensor.type)),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.distributed, "all_to_all_single", split_sizes_as_lists(torch.distributed.all_to_all_single)),
        (torch.distributed, "all_gather", gather_of_unequal_parts(torch.distributed.all_gather)),
    ]


def in_megatron() -> list[tuple[Any, str, Any]]:
    """Returns the replacements in Megatron's own modules."""
    import megatron.core.models.common.embeddings.rope_utils as rope_utils  # noqa: PLC0415 - after `in_torch`
    import megatron.core.tensor_parallel.random as random  # noqa: PLC0415
    import megatron.core.transformer.moe.moe_utils as moe_utils  # noqa: PLC0415
    import megatron.core.transformer.multi_latent_attention as multi_latent_attention  # noqa: PLC0415

    from rlframe.megatron.cpu.attention import rotary_thd  # noqa: PLC0415
    from rlframe.megatron.cpu.local_layers import WholeLinear  # noqa: PLC0415

    replacements = [
        # In Transformer Engine's place behind `apply_rope_fusion`.
        (rope_utils, "fused_apply_rotary_pos_emb_thd", rotary_thd),
        # In Transformer Engine's place. Without it this is not a class, and Megatron uses it in isinstance.
        (multi_latent_attention, "TELinear", WholeLinear),
        # Recomputation saves and restores them. Without the replacement each restore leaves a closure in torch's queue
        # for CUDA.
        (random, "_get_cuda_rng_state", lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)),
    ]
    # moe_router_dtype=fp32 reads this name, which Megatron-Core 0.16.1 defines only if Transformer Engine is installed.
    if not hasattr(moe_utils, "te_general_gemm"):
        replacements.append((moe_utils, "te_general_gemm", None))
    return replacements


def for_speed() -> list[tuple[Any, str, Any]]:
    """Returns the replacements without which training is slower here. Megatron's linear layers call both names of
    matmul."""
    # Asked for here: torch has no such class where it is built without gloo.
    gloo = torch.distributed.ProcessGroupGloo
    products = [(owner, "matmul", by_blocks(owner.matmul)) for owner in (torch, torch.Tensor) if is_faster()]
    return [(gloo, "__init__", on_one_device(gloo.__init__)), *products]


def uncompiled(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """Returns the function that `torch.compile` is given, or for arguments alone a decorator that returns it."""
    return uncompiled if function is None else function


class NullStream:
    """A stand-in for a CUDA stream or event, which MoEAlltoAllTokenDispatcher and DDP create. On a CPU all work is in
    order."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, stream: "NullStream") -> None:
        """Does nothing, because there is nothing to wait for."""

    def record_event(self, *_: Any) -> "NullStream":
        """Returns an event that has already happened."""
        return self

    def synchronize(self) -> None:
        """Does nothing, because there is nothing to wait for."""


def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns `factory` with `device="cuda"` replaced by cpu: schedules, clip_grads and optimizer pass it literally.
    Memory is not pinned, as yarn's positions with context parallelism ask for.

    Wrapping these two factories costs a microsecond on each; a TorchFunctionMode would cost it on every operation.
    """

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


def tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `Tensor.type()` with CUDA's names, which DistributedOptimizer and clip_grads compare it with."""

    @functools.wraps(original)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.")

    return wrapper


def split_sizes_as_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `all_to_all_single` for gloo, which needs lists of split sizes where Megatron's dispatcher passes
    tensors."""

    @functools.wraps(original)
    def wrapper(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = kwargs[name].tolist()
        return original(output, input, *args, **kwargs)

    return wrapper


def gather_of_unequal_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `all_gather` for gloo, which needs parts of equal shape. With expert tensor and expert parallelism,
    Megatron's dispatcher gathers as many rows as each rank has. The way back, `reduce_scatter`, accepts unequal
    parts."""

    @functools.wraps(original)
    def wrapper(parts: list[torch.Tensor], own: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if len({part.shape for part in parts}) == 1:
            return original(parts, own, *args, **kwargs)
        rows = max(len(part) for part in parts)
        padded = [part.new_empty(rows, *part.shape[1:]) for part in parts]
        filling = own.new_zeros(rows - len(own), *own.shape[1:])
        original(padded, torch.cat([own, filling]), *args, **kwargs)
        for part, filled in zip(parts, padded, strict=True):
            part.copy_(filled[: len(part)])

    return wrapper
