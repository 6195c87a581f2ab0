"""A trainer and two engines inside the test process, and the version of the weights that each of them should hold."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from rlframe.models.families.base import Architecture, Shard
from rlframe.models.families.qwen3_moe import FAMILY
from rlframe.weight_sync.channel import WeightDestination, WeightSource, WeightSync
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.layout.memory import MemoryLayout, clear_padding, load_tensor, record
from rlframe.weight_sync.transports.base import Link
from tests.unit.models.parameters import SMALL_MOE, empty, shards
from tests.unit.weight_sync.groups import LocalDestinations, LocalSources, destination

MODEL = FAMILY.architecture(SMALL_MOE)


class World:
    """Trainer ranks in float32 (TP2 PP2 EP2 unless told otherwise), and two engines in bfloat16: one whole, one on two
    ranks. The engines also take streams."""

    def __init__(
        self, config: WeightSyncConfig | None = None, *, trainer: list[Shard] | None = None, model: Architecture = MODEL
    ) -> None:
        self.tensors = FAMILY.tensors(model)
        trainer = trainer or shards(model, tp=2, pp=2, ep=2, vocab_multiple=8)
        self.trainer = [rank(model, shard, torch.float32) for shard in trainer]
        engines = [shards(model), shards(model, tp=2, etp=1)]
        self.engines = [[rank(model, shard, torch.bfloat16) for shard in group] for group in engines]
        self.fill(self.trainer, 0)
        for engine in self.engines:
            self.fill(engine, 0)
        self.sources = LocalSources([WeightSource(*pair) for pair in self.trainer])
        self.destinations = LocalDestinations(
            [
                [destination(*pair, dtype=torch.bfloat16, reload=Loader(*pair)) for pair in ranks]
                for ranks in self.engines
            ]
        )
        self.links: dict[int, Link] = {}
        for end in self.destinations.ranks:
            self.listen(end)
        self.sync = WeightSync(self.sources, self.destinations, config or WeightSyncConfig())
        self.plan = self.sync.connect()

    def listen(self, end: WeightDestination) -> None:
        """Keeps what the rank is told."""
        connect = end.connect

        def heard(link: Link) -> None:
            self.links[link.rank] = link
            connect(link)

        end.connect = heard

    def values(self, version: int) -> dict[str, Tensor]:
        """The weights of that version."""
        generator = torch.Generator().manual_seed(version)
        return {name: torch.randn(shape, generator=generator) for name, shape in self.tensors.items()}

    def fill(self, ranks: list[tuple[MemoryLayout, dict[str, Tensor]]], version: int) -> None:
        """Loads that version into `ranks`."""
        values = self.values(version)
        for layout, parameters in ranks:
            clear_padding(layout, parameters)
            for name, value in values.items():
                load_tensor(layout, parameters, name, value)

    def train_to(self, version: int) -> None:
        """The optimizer's doing: new values in place."""
        self.fill(self.trainer, version)

    def restart(self, engine: int) -> None:
        """A new process in the engine's place: other memory, the first checkpoint, not connected."""
        for index, (layout, parameters) in enumerate(self.engines[engine]):
            fresh = {name: torch.empty_like(value) for name, value in parameters.items()}
            self.engines[engine][index] = (layout, fresh)
            self.destinations.ranks[self.destinations.engines().index(engine) + index] = destination(layout, fresh)
        self.fill(self.engines[engine], 0)
        self.destinations.gates[engine] = None

    def restart_trainer(self) -> None:
        """Puts new processes in the place of all trainer ranks: other memory, the first checkpoint, not connected."""
        self.trainer = [
            (layout, {name: torch.empty_like(value) for name, value in parameters.items()})
            for layout, parameters in self.trainer
        ]
        self.fill(self.trainer, 0)
        self.sources.ranks = [WeightSource(*pair) for pair in self.trainer]

    def expect(self, version: int) -> None:
        """Every engine rank holds that version, bit for bit, and zeros in its padding."""
        for engine in self.engines:
            for layout, parameters in engine:
                expected = {name: torch.full_like(value, 7.0) for name, value in parameters.items()}
                self.fill([(layout, expected)], version)
                assert all(torch.equal(parameters[name], expected[name]) for name in parameters)


def after_pull(rank: WeightDestination, fault: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `fault` happen whenever this rank has its pieces."""
    transport = rank._transport
    assert transport is not None
    pull = transport.pull

    def damaged(part: int = 0) -> None:
        pull(part)
        fault()

    monkeypatch.setattr(transport, "pull", damaged)


def rank(a: Architecture, shard: Shard, dtype: torch.dtype) -> tuple[MemoryLayout, dict[str, Tensor]]:
    """The layout and the parameters of a rank."""
    parameters = empty(a, shard, dtype)
    return record(lambda p, c: FAMILY.load(p, c, a, shard), parameters, FAMILY.tensors(a)), parameters


class Loader:
    """What an engine does with the whole tensors of a reload: loads them at once."""

    def __init__(self, layout: MemoryLayout, parameters: dict[str, Tensor]):
        self._held = layout, parameters

    def begin(self) -> None:
        """Nothing to prepare."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Into place."""
        for name, value in tensors:
            load_tensor(*self._held, name, value)

    def finish(self) -> None:
        """Nothing is pending."""
