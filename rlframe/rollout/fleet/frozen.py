"""FrozenEngines: engines of a model that is not trained, and so never receive a weight sync."""

from rlframe.rollout.fleet.group import RolloutGroup

VERSION = 0
"""Constant policy version: the weights never change after loading."""


class FrozenEngines(RolloutGroup):
    """Engines that write responses, through `Attempts`."""

    def start(self) -> None:
        """Builds the engines and loads their weights."""
        super().start()
        # No trainer holds these weights, so there is nothing to compare: what was loaded is the model.
        self.rejoin = lambda engines: self.commit(VERSION, engines=engines)
        self.commit(VERSION)


class JudgeEngines(FrozenEngines):
    """Engines of a judge."""

    role = "judge_engines"
