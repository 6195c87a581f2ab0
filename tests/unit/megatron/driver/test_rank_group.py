"""The start of groups of ranks, whose calls are answered here as ranks would."""

from types import SimpleNamespace
from typing import Any

import torch

from rlframe.megatron.config.parallel import Coordinates, Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.driver.rank_group import RankGroup
from rlframe.megatron.messages.ranks import ForwardOnlyRank, ScoringRank
from rlframe.megatron.messages.setup import RankSetup
from rlframe.models.config import ModelConfig
from rlframe.run.compose.parts import Parts

SETUP = RankSetup(
    model=ModelConfig(path="tiny"), train=TrainConfig(), device=torch.device("cpu"), temperature=1.0, timeout_s=1.0
)


class Ranks(RankGroup[ForwardOnlyRank]):
    """Two data-parallel ranks of two stages; what they are asked goes into a list that groups may share."""

    def __init__(self, role: str, asked: list[tuple[str, str, int]]):
        type(self).role = role
        self.name, self.asked = role, asked
        self.parallel = Parallel.parse("d2p2")
        self.start_timeout_s = 1.0
        self.workers: Any = SimpleNamespace(ask=self.ask, wait=self.wait, restart=lambda: None)

    def begin(self) -> None:
        self.join_world(ForwardOnlyRank.start, SETUP)

    def ask(self, rank: int, method: Any, *given: RankSetup) -> Any:
        self.asked.append((self.name, method.__name__, rank))
        if method is ScoringRank.lead:
            return "host:1"
        assert [(each.rank, each.init_method) for each in given] == [(rank, "tcp://host:1")]
        return Coordinates(
            rank=rank, dp_rank=rank % 2, tp_rank=0, pp_rank=rank // 2, cp_rank=0, ep_rank=0, reports=rank >= 2
        )

    def wait(self, calls: list[Any], *, doing: str, **_: Any) -> list[Any]:
        self.asked.append((self.name, f"wait for {doing}", len(calls)))
        return calls


def test_groups_build_their_models_at_the_same_time() -> None:
    asked: list[tuple[str, str, int]] = []
    parts: Any = SimpleNamespace(groups=[Ranks("policy", asked), Ranks("critic", asked)])
    Parts.start_groups(parts)
    starts = [(name, method) for name, method, _ in asked if method == "start" or "wait for start" in method]
    assert [name for name, method in starts if method == "start"] == ["policy"] * 4 + ["critic"] * 4
    assert [method == "start" for _, method in starts] == [True] * 8 + [False] * 2, "none is waited for before"


def test_ranks_are_asked_once_and_again_after_a_restart() -> None:
    asked: list[tuple[str, str, int]] = []
    group = Ranks("policy", asked)
    group.begin()
    group.start()
    assert [rank for _, method, rank in asked if method == "start"] == [0, 1, 2, 3]
    assert group.dp_rank == [0, 1, 0, 1] and group.reporters == [2, 3]
    group.restart()
    assert [rank for _, method, rank in asked if method == "start"] == [0, 1, 2, 3] * 2
