"""Which transport is taken, and what the reason says."""

import pytest
import torch

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationInfo, SourceInfo
from rlframe.weight_sync.choice import choose
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.layout.memory import MemoryLayout

EMPTY = MemoryLayout(boxes={}, tensors={}, parameters={})
REPACKED = "keeps model.layers.0.mlp.experts.w13_weight repacked (FlashInfer)"


def source(host: str = "one", device: str = "cpu") -> SourceInfo:
    """A trainer rank."""
    return SourceInfo(host=host, device=device, pid=1, layout=EMPTY)


def engine(host: str = "one", device: str = "cpu", *, refusal: str = "", can_reload: bool = False) -> DestinationInfo:
    """An engine rank; one with a refusal has no layout."""
    layout = None if refusal else EMPTY
    return DestinationInfo(
        host=host,
        device=device,
        pid=2,
        layout=layout,
        refusal=refusal,
        can_reload=can_reload,
        tensors={},
        dtype=torch.bfloat16,
    )


def test_one_cpu_host_takes_shm() -> None:
    assert str(choose([source()], [engine()], [0])) == "transport shm: every rank is on the CPU of one host"


def test_nccl_does_not_take_engines_that_share_a_gpu() -> None:
    pair = [engine(device="GPU-1"), engine(device="GPU-1")]
    assert choose([source(device="GPU-0")], pair, [0, 1]).carrier == "cuda_ipc"
    with pytest.raises(WeightSyncFailed, match=r"nccl has one rank on a GPU, and 2 engines share one"):
        choose([source(device="GPU-0")], pair, [0, 1], "nccl")


def test_hosts_apart_take_nccl_and_say_so() -> None:
    assert str(choose([source()], [engine("two")], [0])).startswith("transport nccl: ranks are on 2 hosts")


def test_an_engine_that_refuses_recording_is_streamed_to_with_its_reason() -> None:
    choice = choose([source()], [engine(), engine(refusal=REPACKED, can_reload=True)][1:], [0])
    assert str(choice) == f"transport reload over shm: engine 0 {REPACKED}"


def test_a_reload_can_be_asked_for() -> None:
    choice = choose([source()], [engine(can_reload=True)], [0], "reload")
    assert str(choice) == "transport reload over shm: requested; every rank is on the CPU of one host"


def test_an_engine_that_can_neither_be_recorded_nor_reload_is_refused_with_both_reasons() -> None:
    with pytest.raises(WeightSyncFailed, match="engine 1 has none, and engine 1 keeps model.layers.0"):
        choose([source()], [engine(can_reload=True), engine(refusal=REPACKED)], [0, 1])


@pytest.mark.parametrize(
    ("wish", "there", "message"),
    [
        (
            "shm",
            engine("two"),
            "weight_sync.transport=shm is not possible: shm works within one host, not from one to two",
        ),
        (
            "shm",
            engine(device="GPU-1"),
            "weight_sync.transport=shm is not possible: shm works between parameters on the CPU",
        ),
        ("nccl", engine(device="GPU-1"), "weight_sync.transport=nccl is not possible: nccl works between GPUs"),
        ("shm", engine(refusal=REPACKED), f"weight_sync.transport=shm is not possible: engine 0 {REPACKED[:30]}"),
        ("reload", engine(), "transport reload needs an engine's own loader, but engine 0 has none"),
    ],
)
def test_a_transport_that_cannot_work_is_refused_with_the_reason(
    wish: str, there: DestinationInfo, message: str
) -> None:
    with pytest.raises(WeightSyncFailed, match=message):
        choose([source()], [there], [0], wish)


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ValueError, match="transport must be one of auto, .*shm, reload, got 'pigeon'"):
        WeightSyncConfig(transport="pigeon")
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1024, got 3"):
        WeightSyncConfig(bucket_bytes=3)
