"""Device memory of the policy that is dropped, or moved to host memory, while the policy sleeps."""

import sys
import time
from collections.abc import Iterable, Iterator

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage

from rlframe.megatron.memory.pinned import Pieces
from rlframe.megatron.messages.moved import Moved
from rlframe.megatron.model.model import Model

LARGE_BYTES = 10 << 20
"""Tensors of so many bytes get a block of their own from torch's CUDA allocator (`kMinLargeAlloc`)."""
BLOCK_BYTES = 2 << 20
"""A block of a tensor alone is a multiple of this (`kRoundLarge`). What the tensor leaves goes to other tensors."""


class SleepingMemory:
    """Takes gradients, and where asked for optimizer state, of one rank off its device and back.

    Parameters stay: weight sync, which runs while the policy sleeps, maps their addresses into other processes, and
    keeps tables of them. Only the memory under the tensors moves. The tensors stay the same objects, so that their
    other holders (Megatron's buckets, Adam's state) need not be told. On a CPU the same code runs.
    """

    def __init__(self, model: Model, optimizer: MegatronOptimizer, *, moments: torch.dtype | None):
        """Begins to reserve host memory for main weights and moments, so that only the first sleeps wait, and for
        as much of it as they use.

        Args:
            moments: number format of Adam's moments. None leaves main weights and moments where they are: only
                gradients sleep, and memory that no tensor uses goes back to the device.
        """
        self.model, self.optimizer = model, optimizer
        self.device = next(iter(model.parameters.values())).device
        self._asleep: list[tuple[UntypedStorage, int]] | None = None
        self._gradients: list[tuple[UntypedStorage, int]] = []
        self._host = Pieces(pinned=self.device.type == "cuda")
        self.moves_state = moments is not None
        if moments is not None:
            self._host.grow(self._state_bytes(moments))
        # From here on what sleeps fills its blocks, before a forward pass puts anything of its own beside it.
        self.sleep()
        self.wake()

    def _state_bytes(self, moments: torch.dtype) -> int:
        # Main weights and Muon's momentum exist; Adam creates its two moments at the first step.
        shards = [
            parameter
            for part in parts(self.optimizer)
            for parameter in parameters_of(part)
            if not part.state.get(parameter)
        ]
        elements = sum(parameter.numel() for parameter in shards if parameter.device == self.device)
        return sum(storage.nbytes() for storage in self._kept()) + 2 * moments.itemsize * elements

    def before_step(self) -> None:
        """Gives unused memory back before the step in which Adam creates moments that will not sleep. It would create
        them inside blocks of past micro-batches, which no sleep could give back then."""
        creates = any(parameters_of(part) and not part.state for part in parts(self.optimizer))
        if creates and not self.moves_state and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self) -> Moved:
        """Gives the memory back. Only the parameters may be used until `wake`."""
        assert self._asleep is None, "asleep already"
        begun = time.perf_counter()
        kept = [(storage, storage.nbytes()) for storage in self._kept()]
        self._gradients = [(storage, storage.nbytes()) for storage in gradient_storages(self.model)]
        self._host.grow(sum(size for _, size in kept))
        for here, there in self._pieces(kept):
            there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()
        for storage, _ in (*kept, *self._gradients):
            storage.resize_(0)
        forget_placeholders()
        forget_angles()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._asleep = kept
        return self._moved(begun)

    def wake(self) -> Moved:
        """Undoes `sleep`, bit for bit. Gradients are undefined.

        Memory comes back in whole blocks: one small tensor in the rest of a block, such as a table of rotary
        embeddings, would keep the allocator from giving the block back at the next sleep, the gradients' too.
        """
        assert self._asleep is not None, "awake already"
        begun = time.perf_counter()
        for storage, size in (*self._asleep, *self._gradients):
            storage.resize_(whole_blocks(size))
        for here, there in self._pieces(self._asleep):
            here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        moved = self._moved(begun)
        self._asleep = None
        return moved

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are reserved, or about to be."""
        return self._host.num_bytes

    def _moved(self, begun: float) -> Moved:
        assert self._asleep is not None
        return Moved(
            kept_bytes=sum(size for _, size in self._asleep),
            dropped_bytes=sum(size for _, size in self._gradients),
            stuck_bytes=unused_bytes() if self.device.type == "cuda" else 0,
            seconds=time.perf_counter() - begun,
        )

    def _kept(self) -> list[UntypedStorage]:
        """Returns the optimizer's memory on this device that sleeps and is not the parameters' own, each once.

        In float32 the main weights *are* the parameters; with a precision-aware optimizer the optimizer's parameters
        are views of them; with one on the CPU its state is in host memory already.
        """
        own = {
            parameter.untyped_storage().data_ptr() for chunk in self.model.chunks for parameter in chunk.parameters()
        }
        found: dict[int, UntypedStorage] = {}
        for part in parts(self.optimizer) if self.moves_state else ():
            tensors = [*parameters_of(part), *(value for state in part.state.values() for value in state.values())]
            for tensor in tensors:
                # Adam's step counts are numbers of a few bytes, usually on the host.
                if isinstance(tensor, Tensor) and tensor.device == self.device and tensor.numel() > 1:
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in own:
                        found[storage.data_ptr()] = storage
        return list(found.values())

    def _pieces(self, sized: Iterable[tuple[UntypedStorage, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (bytes on the device, their place in host memory), of so many bytes of each storage, in an order that
        depends only on the sizes."""
        index, used = 0, 0
        for storage, size in sized:
            left = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)[:size]
            while left.numel():
                if used == self._host[index].numel():
                    index, used = index + 1, 0
                count = min(left.numel(), self._host[index].numel() - used)
                yield left[:count], self._host[index][used : used + count]
                left, used = left[count:], used + count


def whole_blocks(num_bytes: int) -> int:
    """Returns the bytes with which a tensor leaves nothing of its block of torch's CUDA allocator: the device holds no
    more than without. Small tensors share blocks, and stay as they are."""
    return num_bytes if num_bytes < LARGE_BYTES else -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def forget_placeholders() -> None:
    """Drops the tensors that Transformer Engine's linear layers return in the place of gradients which they have added
    to the gradient buffer.

    Workaround for Transformer Engine 2.20 (`get_dummy_wgrad` of pytorch/module/base.py), which keeps one for each shape
    of a weight for good. They are made in the first backward pass, in whatever free memory suits them, such as that of
    the logits. One tensor keeps torch's allocator from giving back the whole block, of gigabytes. The next backward
    pass makes new ones. Not needed any more once Transformer Engine keeps none.
    """
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    if base is not None:
        getattr(base, "_dummy_wgrads", {}).clear()


def forget_angles() -> None:
    """Drops the rotary angles of up to 32 lengths, which Megatron-Core (0.16 to 0.19) keeps in a cache of the class."""
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()


def unused_bytes() -> int:
    """Returns the bytes of the device that torch's allocator holds for no tensor."""
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def parts(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that hold state: one for all parameters, or one for experts and one for the rest; of an
    optimizer that works on both devices, its halves."""
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is not None:
            found += getattr(inner, "sub_optimizers", [inner])
    return found


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns this rank's shards of the parameters, as the optimizer has them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradient_storages(model: Model) -> list[UntypedStorage]:
    """Returns the memory of the gradient buffers."""
    return [
        buffer.grad_data.untyped_storage()
        for chunk in model.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
