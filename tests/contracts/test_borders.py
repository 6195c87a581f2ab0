"""Each border between processes has one Protocol, and what is behind it has every method of it."""

import importlib
import inspect
from typing import Any

import pytest

from rlframe.megatron.driver.forward_only_group import ForwardOnlyWorker
from rlframe.megatron.messages.ranks import ForwardOnlyRank, TrainerRank
from rlframe.megatron.worker.worker import MegatronWorker
from rlframe.rollout.fleet.worker import EngineWorker, RolloutWorker
from rlframe.rollout.sglang import border as sglang_border
from rlframe.rollout.vllm import border as vllm_border
from rlframe.weight_sync.adapted import AdaptedDestination, AdaptedRank
from rlframe.weight_sync.border import DestinationRank, SourceRank
from rlframe.weight_sync.endpoints import WeightDestination, WeightSource


def methods(protocol: type) -> dict[str, Any]:
    """The methods of a Protocol, those of the Protocols it extends included."""
    return {name: value for name, value in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")}


def require_all(behind: type, protocol: type) -> None:
    """Every method is there, is not the Protocol's own empty one, and takes as many arguments."""
    for name, asked in methods(protocol).items():
        own = getattr(behind, name)
        assert inspect.unwrap(own) is not asked, f"{behind.__name__}.{name}"
        assert parameters(own) == parameters(asked), name


def parameters(method: Any) -> list[str]:
    """Returns the names of a method's parameters, without the one that Ray adds where it makes the class an actor's."""
    return [name for name in inspect.signature(method).parameters if name != "_ray_trace_ctx"]


@pytest.mark.parametrize(
    ("behind", "protocol"),
    [
        (WeightSource, SourceRank),
        (WeightDestination, DestinationRank),
        (AdaptedDestination, AdaptedRank),
        (MegatronWorker, TrainerRank),
        (ForwardOnlyWorker, ForwardOnlyRank),
        (RolloutWorker, EngineWorker),
    ],
    ids=lambda each: each.__name__,
)
def test_what_is_behind_a_border_has_its_methods(behind: type, protocol: type) -> None:
    require_all(behind, protocol)


@pytest.mark.parametrize(
    ("package", "file", "name", "protocol"),
    [
        ("vllm", "rlframe.rollout.vllm.worker", "RankExtension", vllm_border.Extension),
        ("sglang", "rlframe.rollout.sglang.worker", "Rank", sglang_border.SchedulerRank),
        ("sglang", "rlframe.rollout.sglang.host", "Host", sglang_border.EngineHost),
    ],
)
def test_what_is_in_an_engines_processes_has_the_methods_of_its_border(
    package: str, file: str, name: str, protocol: type
) -> None:
    pytest.importorskip(package)
    require_all(getattr(importlib.import_module(file), name), protocol)
