"""The ends of AdapterSync in the worker processes."""

from typing import Any, Protocol, TypeVar

from rlframe.utils.calls import RankCall
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.endpoints import WeightDestination

T = TypeVar("T")

BASE, ADAPTERS = " base", " adapters"
"""Ends of the names of the trainer's two channels: the weights without adapters, and the adapters."""


class AdaptedRank(DestinationRank, Protocol):
    """The driver's calls to an engine rank that holds adapters beside its base. Those of DestinationRank are about the
    adapters."""

    def base(self, call: "RankCall[DestinationRank, T]") -> T:
        """Makes a call about the base."""
        ...


class AdaptedDestination(WeightDestination, AdaptedRank):
    """One engine rank's end for adapters, with the end for its base."""

    def __init__(self, base: WeightDestination, **adapters: Any):
        """Accepts the end for the base, and the arguments of WeightDestination for the adapters."""
        super().__init__(**adapters)
        self._base = base

    def base(self, call: "RankCall[DestinationRank, T]") -> T:
        """See AdaptedRank."""
        return call.on(self._base)
