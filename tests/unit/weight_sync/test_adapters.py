"""AdapterSync: adapters move, the base is proved and never moved."""

import pytest
import torch
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.adapted import AdaptedDestination
from rlframe.weight_sync.adapters import AdapterSync
from rlframe.weight_sync.channel import WeightDestination, WeightSource
from rlframe.weight_sync.layout.memory import identity_layout
from tests.unit.weight_sync.groups import LocalDestinations, LocalSources, destination

CPU = torch.device("cpu")


def base_weights() -> dict[str, Tensor]:
    return {"w": torch.arange(24.0).view(4, 6)}


def adapters(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((2, 6), value), "b": torch.full((4, 2), -value)}


class World:
    """A trainer of one rank, and two engines of one rank, which start without adapters."""

    def __init__(self) -> None:
        self.base, self.adapters = base_weights(), adapters(1.0)
        self.held = [self.engine(), self.engine()]
        self.engines = LocalDestinations([[self.end(*held)] for held in self.held])
        self.sync = AdapterSync(source(self.base), source(self.adapters), self.engines)

    @staticmethod
    def engine() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return base_weights(), adapters(0.0)

    @staticmethod
    def end(base: dict[str, Tensor], held: dict[str, Tensor]) -> AdaptedDestination:
        layout = identity_layout(held)
        return AdaptedDestination(
            destination(identity_layout(base), base),
            layout=layout,
            parameters=held,
            tensors=layout.tensors,
            dtype=torch.float32,
            device=CPU,
        )

    def restart(self, engine: int) -> None:
        """A new process in the engine's place."""
        self.held[engine] = self.engine()
        self.engines.ranks[engine] = self.end(*self.held[engine])
        self.engines.gates[engine] = None

    def train_to(self, version: int) -> None:
        for name, value in adapters(version + 1.0).items():
            self.adapters[name].copy_(value)

    def expect(self, version: int) -> None:
        for base, held in self.held:
            assert torch.equal(base["w"], base_weights()["w"])
            assert all(torch.equal(held[name], value) for name, value in adapters(version + 1.0).items())
        assert set(self.engines.gates.values()) == {version}


def source(parameters: dict[str, Tensor]) -> LocalSources:
    return LocalSources([WeightSource(identity_layout(parameters), parameters)])


def test_calibrate_sends_the_first_adapters_and_publish_sends_nothing_else() -> None:
    world = World()
    plan = world.sync.connect()
    world.sync.calibrate(version=0)
    world.expect(0)
    world.train_to(1)
    report = world.sync.publish(version=1)
    world.expect(1)
    assert report.num_bytes == plan.total_bytes == 2 * (12 + 8) * 4


def test_an_engine_with_another_base_is_refused_before_it_samples() -> None:
    world = World()
    world.held[1][0]["w"][0, 0] += 1
    world.sync.connect()
    with pytest.raises(WeightSyncFailed, match="calibration: .*engine 1 does not hold version 0: w differs"):
        world.sync.calibrate(version=0)
    assert 0 not in world.engines.gates.values()


def test_an_audit_finds_a_changed_base_and_changed_adapters() -> None:
    world = World()
    world.sync.connect()
    world.sync.calibrate(version=0)
    world.sync.audit()
    for held, name in ((world.held[0][1], "a"), (world.held[1][0], "w"), (world.base, "w")):
        before = held[name].clone()
        held[name][1, 1] += 1
        with pytest.raises(WeightSyncFailed, match=f"no longer holds version 0: {name} has changed"):
            world.sync.audit()
        held[name].copy_(before)


def test_an_engine_that_comes_back_gets_the_present_adapters_on_a_proved_base() -> None:
    world = World()
    world.sync.connect()
    world.sync.calibrate(version=0)
    world.train_to(1)
    world.sync.publish(version=1)
    world.restart(1)
    assert world.sync.rejoin([1])
    world.expect(1)
    world.held[1][0]["w"][0, 0] += 1
    with pytest.raises(WeightSyncFailed, match="engine 1 no longer holds version 0: w has changed"):
        world.sync.audit()


def test_an_engine_that_comes_back_with_another_base_is_refused() -> None:
    world = World()
    world.sync.connect()
    world.sync.calibrate(version=0)
    world.restart(0)
    world.held[0][0]["w"][3, 5] = 0
    with pytest.raises(WeightSyncFailed, match="engine 0 does not hold the initial checkpoint .*: w differs"):
        world.sync.rejoin([0])


def test_a_trainer_that_comes_back_sends_its_adapters_again() -> None:
    world = World()
    world.sync.connect()
    world.sync.calibrate(version=0)
    world.train_to(1)
    world.sync.publish(version=1)
    world.train_to(0)
    world.sync.reattach(version=0)
    world.expect(0)


def test_an_engine_that_repacks_its_base_is_refused_with_the_way_out() -> None:
    world = World()
    for end in world.engines.ranks:
        assert isinstance(end, AdaptedDestination)
        end._base = repacked()
    with pytest.raises(WeightSyncFailed, match=r"engine 0 keeps w repacked; set weight_sync.lora=merged"):
        world.sync.connect()


def repacked() -> WeightDestination:
    """An engine rank whose loader cannot be recorded."""
    return destination(None, {}, tensors={"w": (4, 6)}, refusal="keeps w repacked", reload=Nothing())


class Nothing:
    """A loader of an engine that is never asked to load."""

    def begin(self) -> None: ...
    def load(self, tensors: object) -> None: ...
    def finish(self) -> None: ...
