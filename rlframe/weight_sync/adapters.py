"""AdapterSync: sends the policy's adapters only, and proves the base that nothing trains where it lies.

An engine then holds the base as it has loaded it, and computes y = x W' + (x A') (s B)' itself. Each version is A and
s B of every adapted matrix, by PEFT's names; a 4 B model with rank 32 has 0.13 GB of them, in the place of 8 GB.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.adapted import AdaptedRank
from rlframe.weight_sync.border import DestinationGroup, DestinationRank, Received, SourceGroup
from rlframe.weight_sync.channel import WeightSync
from rlframe.weight_sync.config import HoldIn, WeightSyncConfig
from rlframe.weight_sync.plan.planner import Plan

T = TypeVar("T")


class Bases(DestinationGroup):
    """The bases of all engines. Engines sample only after their adapters are proved too, so nothing opens a gate."""

    def __init__(self, engines: DestinationGroup):
        self._engines = engines

    def engines(self) -> list[int]:
        """See DestinationGroup."""
        return self._engines.engines()

    def on_ranks(
        self, calls: Sequence[RankCall[DestinationRank, T]], *, engines: Sequence[int] | None = None
    ) -> list[T]:
        """See DestinationGroup."""
        return self._engines.on_ranks([RankCall.of(AdaptedRank.base, call) for call in calls], engines=engines)

    def receive(self, version: int, *, engines: Sequence[int] | None = None) -> list[Received]:  # noqa: ARG002
        """Raises an error, because a base is never sent."""
        raise WeightSyncFailed("the base of adapters is not sent to engines; set weight_sync.lora=merged")

    def commit(self, version: int, *, engines: Sequence[int] | None = None) -> None:
        """Does nothing: the adapters' sync opens the gates."""

    def fail(self, reason: str, *, engines: Sequence[int] | None = None) -> None:
        """See DestinationGroup."""
        self._engines.fail(reason, engines=engines)


class BaseProof(WeightSync):
    """Proves that engines hold the base of the trainer's adapters. It is `calibrate` and `audit` of a sync that
    publishes nothing."""

    def connect(self) -> Plan:
        """See WeightSync.

        Raises:
            WeightSyncFailed: also if an engine repacks its weights, so that its base cannot be compared.
        """
        plan = super().connect()
        if self.choice.reloads:
            raise WeightSyncFailed(
                "weight_sync.lora=adapter needs engines whose base can be compared with the trainer's, but "
                f"{self.choice.reason}; set weight_sync.lora=merged"
            )
        return plan

    def admit(self, engines: Sequence[int]) -> None:
        """Connects the present processes, and proves that restarted engines hold the base."""
        self._admit(engines)
        if engines:
            connection, digests = self._connected, self._destinations.call(DestinationRank.digests, engines=engines)
            self._audit.admit(connection.stack(connection.ranks_of(engines), digests))


class AdapterSync(WeightSync):
    """The WeightSync of adapters. Its version is the policy's version."""

    def __init__(
        self,
        base: SourceGroup,
        adapters: SourceGroup,
        destinations: DestinationGroup,
        config: WeightSyncConfig | None = None,
    ):
        """
        Args:
            base: the trainer's weights without adapters.
            adapters: the trainer's adapters.
            destinations: engines whose ranks are `AdaptedDestination`s.
        """
        config = config or WeightSyncConfig()
        super().__init__(adapters, destinations, config)
        self._base = BaseProof(base, Bases(destinations), replace(config, hold=HoldIn.NONE))

    def connect(self) -> Plan:
        """See WeightSync. Connects to the base, then to the adapters, whose plan is returned."""
        self._base.connect()
        return super().connect()

    def calibrate(self, version: int) -> None:
        """Proves the base without a copy, then sends the first adapters, because an engine starts without any."""
        self._base.calibrate(version)
        self.overwrite(version)
        self._initial = self._totals

    def audit(self) -> None:
        """See WeightSync. Audits the base too."""
        self._base.audit()
        super().audit()
        self.audit_s += self._base.audit_s

    def close(self) -> None:
        """See WeightSync."""
        self._base.close()
        super().close()

    def reattach(self, version: int) -> None:
        """See WeightSync. The restarted trainer's base is proved too."""
        super().reattach(version)
        self._base.audit()

    def _require_initial(self, engines: Sequence[int]) -> None:
        """Proves the base of restarted engines, which have no adapters yet."""
        self._base.admit(engines)
