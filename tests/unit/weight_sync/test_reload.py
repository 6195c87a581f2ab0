"""Streams: whole tensors, bucket by bucket, through an engine's own loader."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from rlframe.rollout.served.recording import formats_of
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.channel import WeightDestination, WeightSource, WeightSync
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.layout.memory import MemoryLayout, identity_layout, load_tensor, record
from rlframe.weight_sync.reload import make_buckets, staging_layout
from tests.unit.weight_sync.groups import LocalDestinations, LocalSources, destination

TENSORS = {"a": (6, 5), "b": (7,), "c": (2, 3, 4), "d": (), "e": (40, 9)}
BFLOAT16 = dict.fromkeys(TENSORS, torch.bfloat16)


class Repacking:
    """An engine that keeps what it loads in a form of its own, and references until a version is complete."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._pending: dict[str, Tensor] = {}
        self.held: dict[str, Tensor] = {}

    def begin(self) -> None:
        self.calls.append("begin")
        self._pending = {}

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        new = dict(tensors)
        self.calls.append("+".join(new))
        self._pending |= new

    def finish(self) -> None:
        self.calls.append("finish")
        self.held = {name: value.flatten().flip(0) for name, value in self._pending.items()}


class World:
    """A trainer that holds the rows of the large tensors on two ranks, and engines that reload."""

    def __init__(self, config: WeightSyncConfig, *, num_engines: int = 1, refusal: str = "keeps a repacked"):
        self.trainer = [self._trainer_rank(0), self._trainer_rank(1)]
        self.fill(0)
        self.loaders = [Repacking() for _ in range(num_engines)]
        engines = [[self.engine(loader, refusal)] for loader in self.loaders]
        self.destinations = LocalDestinations(engines)
        self.sources = LocalSources([WeightSource(*pair) for pair in self.trainer])
        self.sync = WeightSync(self.sources, self.destinations, config)

    @staticmethod
    def engine(loader: Repacking | None, refusal: str) -> WeightDestination:
        return destination(None, {}, tensors=TENSORS, dtype=torch.bfloat16, refusal=refusal, reload=loader)

    @staticmethod
    def _trainer_rank(rank: int) -> tuple[MemoryLayout, dict[str, Tensor]]:
        parameters = {name: torch.empty(TENSORS[name]) for name in ("b", "c", "d")}
        parameters |= {name: torch.empty(TENSORS[name][0] // 2, TENSORS[name][1]) for name in ("a", "e")}

        def load(p: dict[str, Tensor], checkpoint: dict[str, Tensor]) -> None:
            for name, parameter in p.items():
                source = checkpoint[name]
                parameter.copy_(source.chunk(2)[rank] if name in "ae" else source)

        return record(load, parameters, TENSORS), parameters

    @staticmethod
    def values(version: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {name: torch.randn(shape, generator=generator) for name, shape in TENSORS.items()}

    def fill(self, version: int) -> None:
        for layout, parameters in self.trainer:
            for name, value in self.values(version).items():
                load_tensor(layout, parameters, name, value)

    def expect(self, version: int) -> None:
        """Every loader was given that version, cast to its format."""
        for loader in self.loaders:
            for name, value in self.values(version).items():
                assert torch.equal(loader.held[name], value.bfloat16().flatten().flip(0)), name


def test_buckets_keep_the_order_and_the_bound() -> None:
    # Bytes of bfloat16 in staging, in multiples of 16: a 64, b 16, c 48, d 16, e 720.
    assert make_buckets(TENSORS, BFLOAT16, 80) == (("a", "b"), ("c", "d"), ("e",))
    assert make_buckets(TENSORS, BFLOAT16, 1 << 20) == (tuple(TENSORS),)
    layout = staging_layout((("a", "b"), ("c", "d"), ("e",)), TENSORS, BFLOAT16)
    assert layout.boxes["b"][0].offset == 32
    assert layout.parameters["bucket 1 bfloat16"].shape == (32,)


@pytest.mark.parametrize("carrier", ["shm", "nccl"])
def test_a_tensor_that_the_engine_holds_in_more_digits_arrives_with_all_of_them(
    carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlframe.weight_sync.choice.ORDER", (carrier,))
    world = World(WeightSyncConfig(bucket_bytes=1024, timeout_s=30))
    # The bias of a router, which vLLM keeps in float32. No rank of an engine holds every tensor.
    ranks = [
        destination(None, {}, tensors=TENSORS, dtype=torch.bfloat16, refusal="keeps a repacked", **kind)
        for kind in ({"reload": world.loaders[0]}, {"reload": Repacking(), "formats": {"b": torch.float32}})
    ]
    sync = WeightSync(world.sources, LocalDestinations([ranks]), WeightSyncConfig(bucket_bytes=1024, timeout_s=30))
    sync.connect()
    sync.calibrate(version=0)
    for version in (0, 1):
        held, values = world.loaders[0].held, world.values(version)
        assert torch.equal(held["b"], values["b"].flip(0))
        assert torch.equal(held["e"], values["e"].bfloat16().flatten().flip(0))
        world.fill(1)
        if version == 0:
            sync.publish(version=1)
    sync.close()


@pytest.mark.parametrize("carrier", ["shm", "nccl"])
def test_every_bucket_reaches_the_loader_as_published(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.weight_sync.choice.ORDER", (carrier,))
    world = World(WeightSyncConfig(bucket_bytes=1024, chunk_bytes=1024, timeout_s=30), num_engines=2)
    world.sync.connect()
    assert str(world.sync.choice) == f"transport reload over {carrier}: engine 0 keeps a repacked"
    world.sync.calibrate(version=0)
    world.expect(0)
    world.fill(1)
    report = world.sync.publish(version=1)
    world.expect(1)
    assert report.transport == f"reload over {carrier}"
    assert world.loaders[0].calls == ["begin", "a+b+c+d+e", "finish"] * 2
    assert world.destinations.gates == {0: 1, 1: 1}
    world.sync.close()


@pytest.mark.parametrize("recorded", [True, False])
def test_the_formats_of_tensors_are_those_that_the_engine_creates(recorded: bool) -> None:
    created = {"gate.bias": torch.zeros(4), "qkv": torch.zeros(2, 4, dtype=torch.bfloat16)}
    layout = identity_layout(created) if recorded else None
    found = formats_of(layout, created, ["gate.bias", "qkv", "experts.0.up_proj"])
    assert found == {"gate.bias": torch.float32, "qkv": torch.bfloat16}


def test_staging_is_written_again_while_the_loader_still_has_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.weight_sync.connection.make_buckets", lambda *_: (("a", "b"), ("c", "d"), ("e",)))
    world = World(WeightSyncConfig())
    world.sync.connect()
    world.sync.calibrate(version=0)
    world.expect(0)
    assert world.loaders[0].calls == ["begin", "a+b", "c+d", "e", "finish"]


def test_a_reload_that_is_damaged_on_its_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(WeightSyncConfig())
    world.sync.connect()
    world.sync.calibrate(version=0)
    world.fill(1)
    transport = world.destinations.ranks[0]._transport
    assert transport is not None
    pull = transport.pull

    def damaged(part: int = 0) -> None:
        pull(part)
        world.destinations.ranks[0]._staging.parameters["bucket 0 bfloat16"][3] += 1

    monkeypatch.setattr(transport, "pull", damaged)
    with pytest.raises(WeightSyncFailed, match="engine 0 does not hold version 1: a differs.*holds neither version 0"):
        world.sync.publish(version=1)


def test_a_loader_that_fails_half_way_leaves_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(WeightSyncConfig())
    world.sync.connect()
    world.sync.calibrate(version=0)

    def refuse(tensors: object) -> None:
        raise WeightSyncFailed("no room")

    monkeypatch.setattr(world.loaders[0], "load", refuse)
    with pytest.raises(WeightSyncFailed, match=r"no room\. engine 0 does not answer \(the engine has not received"):
        world.sync.publish(version=1)


def test_an_engine_that_moved_its_weights_fails_calibration_and_the_text_names_the_reload() -> None:
    world = World(WeightSyncConfig())
    parameters = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in TENSORS.items()}
    layout = record(lambda p, c: [p[name].copy_(c[name]) for name in TENSORS], parameters, TENSORS)
    engine = destination(layout, parameters, dtype=torch.bfloat16, reload=world.loaders[0])
    world.destinations.ranks[0] = engine
    world.sync.connect()
    assert world.sync.choice.name == "shm"
    with pytest.raises(WeightSyncFailed, match="calibration: .*a differs.*set weight_sync.transport=reload"):
        world.sync.calibrate(version=0)
