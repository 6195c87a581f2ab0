"""Proofs between steps: that copies of weights on several ranks are equal, and that frozen weights are as loaded."""

import logging
from collections.abc import Callable, Sequence
from threading import Event

from rlframe.loops.phases import Phases
from rlframe.megatron.driver.rank_group import RankGroup

logger = logging.getLogger(__name__)


class Prover:
    """Makes all groups of ranks prove their weights at regular steps, and on request."""

    def __init__(
        self,
        groups: Sequence[RankGroup],
        phase: Phases,
        *,
        every_steps: int,
        asked: Event,
        ask_engines: Callable[[], None] | None,
    ):
        """
        Args:
            groups: all groups that exist when the loop runs.
            every_steps: number of steps between proofs; 0 disables them.
            asked: event that is set on request.
            ask_engines: makes the engines prove theirs as soon as they are awake; None if there are none.
        """
        self._groups, self._phase, self._every = groups, phase, every_steps
        self._asked, self._ask_engines = asked, ask_engines

    def after(self, step: int) -> None:
        """Runs the proofs after `step`, if they are due or were requested.

        Raises:
            WeightsDrifted: some memory does not hold the right weights.
        """
        asked = self._asked.is_set()
        self._asked.clear()
        if asked or (self._every and step % self._every == 0):
            # On no role: parameters stay on their devices while optimizers and engines sleep.
            with self._phase("proof"):
                for group in self._groups:
                    group.prove()
            self._phase.next_step()
        if asked:
            logger.info("audited: all ranks of the trainer hold the right weights after step %d", step)
            if self._ask_engines:
                self._ask_engines()
