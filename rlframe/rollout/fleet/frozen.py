"""FrozenEngines: engines of a model that is not trained, and so never receive a weight sync."""

import logging
from collections.abc import Sequence

from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.weight_sync.frozen import FrozenProof

VERSION = 0
"""Constant policy version: the weights never change after loading."""
logger = logging.getLogger(__name__)


class FrozenEngines(RolloutGroup):
    """Engines that write responses, through `Attempts`."""

    proof: FrozenProof | None = None
    """Proves that the engines hold the model's files. None takes what they have loaded for the model."""

    def start(self) -> None:
        """Builds the engines and loads their weights."""
        super().start()
        self.rejoin = self._admit
        self._admit(None)
        if self.proof:
            self.audit = self._prove_again

    def _prove_again(self) -> None:
        """Proves that the engines still hold the model's files."""
        assert self.proof
        self.proof.prove()

    def _admit(self, engines: Sequence[int] | None) -> None:
        """Lets started engines sample, once they are proved."""
        if self.proof:
            count = "all" if engines is None else str(len(engines))
            if refusal := self.proof.prove(engines):
                logger.info("the weights of %s engines are not proved: an engine %s", count, refusal)
            else:
                logger.info("%s engines hold the model's files, tensor by tensor", count)
        self.commit(VERSION, engines=engines)


class JudgeEngines(FrozenEngines):
    """Engines of a judge."""

    role = "judge_engines"
