"""The two ends of weight sync inside the worker processes."""

import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.utils.process.memory import used
from rlframe.weight_sync.border import DestinationInfo, DestinationRank, Held, Received, Sent, SourceInfo, SourceRank
from rlframe.weight_sync.host_copy import HostCopy
from rlframe.weight_sync.layout.boxes import Region
from rlframe.weight_sync.layout.memory import MemoryLayout, clear_padding, dirty_padding, identity_layout
from rlframe.weight_sync.proof.digest import DigestPlan, common_units, region_digests
from rlframe.weight_sync.proof.terms import BITS
from rlframe.weight_sync.reload import Staging, finer
from rlframe.weight_sync.transports.base import Link, Transport, find_transport


class Reload(Protocol):
    """Loads whole Hugging Face tensors by the engine's own full path."""

    def begin(self) -> None:
        """Starts a version. Called before its first tensor."""
        ...

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads some whole tensors. The engine may keep references until `finish`."""
        ...

    def finish(self) -> None:
        """Finishes a version after its last tensor. Afterwards the engine is ready to sample."""
        ...


class WeightSource(SourceRank):
    """One trainer rank's end: exposes its memory and digests its content."""

    def __init__(self, layout: MemoryLayout, parameters: Mapping[str, Tensor]):
        self.layout = layout
        self._parameters = parameters
        self._transport: Transport | None = None
        self._digests: DigestPlan | None = None
        self._held: DigestPlan | None = None
        self._num_parts = 0
        self._link: Link | None = None
        self._copy: HostCopy | None = None

    def warm_up(self) -> None:
        """Compiles what a sync needs on a GPU. `connect` does without it."""
        if device_of(self._parameters).type == "cuda":
            from rlframe.weight_sync.warm_up import compile_kernels  # noqa: PLC0415 - Triton exists only with CUDA

            compile_kernels(self.layout, self._parameters)

    def describe(self) -> SourceInfo:
        """Returns the recording and the location of this rank."""
        return SourceInfo(layout=self.layout, **_where(device_of(self._parameters)))

    def memory(self, transport: str) -> Any:
        """Returns the picklable handle of this rank's parameters. `shm` moves them in place into memory that can be
        mapped."""
        return find_transport(transport).share(self._parameters)

    def connect(self, link: Link) -> None:
        """Prepares this rank's part of the plan. For a two-sided transport all ranks of both sides must connect at
        once."""
        self.close()
        transport = find_transport(link.transport)()
        transport.open_source(self._parameters, link)
        self._transport, self._num_parts = transport, len(link.parts) if transport.two_sided else 0
        self._link = link
        keyed = {"units": link.units, "seed": link.seed}
        names = list(link.dtypes)
        self._digests = DigestPlan(self.layout, self._parameters, link.dtypes, names=names, **keyed)
        # Differences that a cast hides, and tensors that no engine has.
        others = [name for name in self.layout.boxes if link.dtypes.get(name) != self.layout.dtype(name)]
        self._held = DigestPlan(self.layout, self._parameters, names=others, **keyed)

    def send(self) -> Sent:
        """Digests the present weights. Two-sided transports send them first.

        Raises:
            WeightSyncFailed: two copies of a tied weight differ, or padding is not zero.
        """
        assert self._transport is not None, "connect before send"
        with _leaving(self._transport):
            for part in range(self._num_parts):
                self._transport.push(part)
            return self.digests()

    def digests(self) -> Sent:
        """Returns the same digests as `send`, and sends nothing."""
        assert self._digests is not None and self._held is not None, "connect before digests"
        with _naming(self._link):
            _require_clear(self.layout, self._parameters)
            digests = self._digests.shares()
            held = digests.copy()
            held[self._held.indices] = self._held.shares()[self._held.indices]
            return Sent(digests=digests, held=held)

    def box_digests(self, tensor: str, regions: Sequence[Region], dtype: torch.dtype) -> dict[Region, int]:
        """Returns the digests of the `regions` of `tensor` that this rank holds."""
        return _region_digests(self._link, self.layout, self._parameters, tensor, regions, dtype)

    def hold(self, parameters: Sequence[str]) -> Held:
        """Copies the present weights of these parameters into host memory, in the place of the copy before."""
        if self._copy is None or self._copy.names != tuple(parameters):
            self._copy = HostCopy(self._parameters, parameters)
        return self._copy.update()

    def close(self) -> None:
        """Leaves the group of the transport, if there is one. The copy that is held stays."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._digests = self._held = None


class WeightDestination(DestinationRank):
    """One engine rank's end: pulls weights, and digests its memory."""

    def __init__(
        self,
        layout: MemoryLayout | None,
        parameters: Mapping[str, Tensor],
        *,
        tensors: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        formats: Mapping[str, torch.dtype] | None = None,
        refusal: str = "",
        reload: Reload | None = None,
        record_s: float | None = None,
    ):
        """Accepts the fields of DestinationInfo and the following.

        Args:
            parameters: the memory that `layout` describes.
            device: device of the staging memory of a reload.
            formats: number formats of tensors as the engine's loader keeps them, if `layout` does not tell.
            reload: the engine's full path, for reloads.
        """
        assert layout is not None or refusal, "an engine without a layout has a reason"
        self.layout = layout
        self._parameters, self._tensors, self._dtype, self._device = parameters, dict(tensors), dtype, device
        held = {name: layout.dtype(name) for name in layout.boxes} if layout else {}
        self._formats = finer(held | dict(formats or {}), dtype)
        self._refusal, self._reload, self._record_s = refusal, reload, record_s
        self._transport: Transport | None = None
        self._digests: DigestPlan | None = None
        self._staging: Staging | None = None
        self._link: Link | None = None
        self._num_bytes = 0
        self._received = False

    def describe(self) -> DestinationInfo:
        """Returns the recording and the location of this rank."""
        return DestinationInfo(
            layout=self.layout,
            refusal=self._refusal,
            can_reload=self._reload is not None,
            tensors=self._tensors,
            dtype=self._dtype,
            formats=self._formats,
            received=self._received,
            unseen=tuple(name for name, value in self._parameters.items() if not _can_digest(value)),
            record_s=self._record_s,
            **_where(self._device),
        )

    def connect(self, link: Link) -> None:
        """Connects to the sources. For a two-sided transport all ranks of both sides must connect at once."""
        self.close()
        self._link = link
        transport = find_transport(link.transport)()
        if link.reloads:
            assert self._reload is not None, "only an engine that can reload takes a reload"
            self._staging = Staging(link, self._tensors, self._device, self._reload)
            parameters = self._staging.parameters
        else:
            assert self.layout is not None, "an engine without a layout takes a reload"
            parameters = self._parameters
            self._digests = DigestPlan(self.layout, parameters, units=link.units, seed=link.seed)
            # Padding as left by the engine's own loading does not matter until here.
            self.clear_padding()
        transport.open_destination(parameters, link)
        self._transport = transport
        itemsize = {name: value.dtype.itemsize for name, value in parameters.items()}
        self._num_bytes = sum(
            int((part.column("rows") * part.column("cols") * _itemsizes(part.write_parameters, itemsize, part)).sum())
            for part in link.parts
        )

    @property
    def pulls_alone(self) -> bool:
        """Returns whether `receive` needs neither the engine's loader nor a source that sends at the same time, so that
        any thread of the process may call it."""
        return self._transport is not None and self._staging is None and not self._transport.two_sided

    def receive(self) -> Received:
        """Pulls every piece, then digests this rank's own memory."""
        assert self._transport is not None, "connect before receive"
        self._received = True
        start = time.perf_counter()
        if self._staging is not None:
            with _leaving(self._transport):
                digests, verify_s = self._staging.receive(self._transport)
            pull_s = time.perf_counter() - start - verify_s
        else:
            # No copy writes the padding, and a deep sleep may have lost it.
            self.clear_padding()
            with _leaving(self._transport):
                self._transport.pull()
            pull_s = time.perf_counter() - start
            digests = self.digests()
            verify_s = time.perf_counter() - start - pull_s
        return Received(digests=digests, pull_s=pull_s, verify_s=verify_s, num_bytes=self._num_bytes, memory=used())

    def digests(self) -> NDArray[np.uint64]:
        """Returns [tensors of the layout] digest shares of this rank's memory; after a reload, of the tensors it last
        passed to the loader.

        Raises:
            WeightSyncFailed: a reload was interrupted, so that the engine's weights are unknown; or padding is not
                zero.
        """
        if self._staging is not None:
            return self._staging.digests()
        assert self._digests is not None and self.layout is not None, "connect before digests"
        with _naming(self._link):
            _require_clear(self.layout, self._parameters)
            return self._digests.shares()

    def box_digests(self, tensor: str, regions: Sequence[Region]) -> dict[Region, int]:
        """Returns the digests of the `regions` of `tensor` that this rank holds. Empty for a reload, whose tensors are
        gone."""
        if self._staging is not None or self.layout is None:
            return {}
        return _region_digests(self._link, self.layout, self._parameters, tensor, regions)

    def snapshot(self) -> dict[str, int]:
        """Returns digests of each of this rank's own parameters, as they lie in memory, but of those that the engine
        has packed elsewhere and left empty, or whose number format digests do not support. It is for engines that take
        reloads, whose loader decides about their parameters."""
        held = {name: value for name, value in self._parameters.items() if _can_digest(value)}
        layout = identity_layout(held)
        shares = DigestPlan(layout, held, units=common_units([layout])).shares()
        return dict(zip(held, shares.tolist(), strict=True))

    @torch.no_grad()
    def disturb(self) -> str:
        """Changes one bit of this rank's weights until the next sync, so that proofs can be tested. Returns the name of
        the tensor."""
        if self.layout is not None:
            name, boxes = next(iter(self.layout.boxes.items()))
            held = boxes[0].view(self._parameters)
        else:
            name, held = next((name, value) for name, value in self._parameters.items() if _can_digest(value))
        first = held.as_strided((1,), (1,))
        first.view(torch.uint8)[:1].bitwise_xor_(1)
        return name

    def clear_padding(self) -> None:
        """Zeroes the padding that no tensor fills."""
        if self.layout is not None:
            clear_padding(self.layout, self._parameters)

    def close(self) -> None:
        """Releases the sources' memory."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._digests = self._staging = None


def _can_digest(parameter: Tensor) -> bool:
    return parameter.dtype in BITS and parameter.numel() > 0


@contextmanager
def _leaving(transport: Transport) -> Iterator[None]:
    """Leaves the group of a two-sided transport if the block fails, so that no peer waits for this rank."""
    try:
        yield
    except BaseException:
        if transport.two_sided:
            transport.close()
        raise


@contextmanager
def _naming(link: Link | None) -> Iterator[None]:
    """Puts the name of the rank in front of a failed check."""
    assert link is not None
    try:
        yield
    except WeightSyncFailed as error:
        raise WeightSyncFailed(f"{link.owner}: {error}") from error


def _region_digests(
    link: Link | None,
    layout: MemoryLayout,
    parameters: Mapping[str, Tensor],
    tensor: str,
    regions: Sequence[Region],
    dtype: torch.dtype | None = None,
) -> dict[Region, int]:
    boxes = layout.boxes.get(tensor, ())
    # Without a connection there are no chosen units and no seed.
    unit, seed = (link.units.get(tensor, 1), link.seed) if link else (1, 0)
    return region_digests(boxes, parameters, regions, dtype=dtype, unit=unit, seed=seed)


def _require_clear(layout: MemoryLayout, parameters: Mapping[str, Tensor]) -> None:
    if name := dirty_padding(layout, parameters):
        raise WeightSyncFailed(f"the padding of parameter {name}, which no tensor fills, is not zero")


def device_of(parameters: Mapping[str, Tensor]) -> torch.device:
    """Returns the one device on which the parameters are."""
    return next((value.device for value in parameters.values()), torch.device("cpu"))


def _where(device: torch.device) -> dict[str, Any]:
    """Returns the fields of RankInfo for this process."""
    uuid = "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    return {"host": this_host(), "device": uuid, "pid": os.getpid()}


def this_host() -> str:
    """Returns the name of this machine, which two containers on it do not share."""
    # Containers of one machine share the boot id, but not the processes.
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} ({boot.read_text().strip()[:8]})" if boot.exists() else socket.gethostname()


def _itemsizes(names: Sequence[str], itemsize: Mapping[str, int], part: Any) -> NDArray[np.int64]:
    """Returns [copies] the bytes per element that each copy writes."""
    return np.array([itemsize[name] for name in names], dtype=np.int64)[part.column("write_parameter")]
