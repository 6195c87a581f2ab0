"""Between steps: whether the ranks' copies of weights are still equal, and frozen weights what was loaded."""

import logging
from collections.abc import Callable, Sequence
from threading import Event

from rlframe.loops.phases import Phases
from rlframe.megatron.driver.rank_group import RankGroup

logger = logging.getLogger(__name__)


class Prover:
    """Has all groups of ranks prove their weights every so many steps, and when somebody asks."""

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
            groups: all there are once the loop runs.
            every_steps: 0 is never.
            asked: is set when somebody asks.
            ask_engines: has the engines prove theirs as soon as they are awake; None where there are none.
        """
        self._groups, self._phase, self._every = groups, phase, every_steps
        self._asked, self._ask_engines = asked, ask_engines

    def after(self, step: int) -> None:
        """Has them prove what they hold after `step`, if it is time or somebody asks.

        Raises:
            WeightsDrifted: some memory does not hold what it should.
        """
        asked = self._asked.is_set()
        self._asked.clear()
        if asked or (self._every and step % self._every == 0):
            # On nobody: parameters stay on their devices while optimizers and engines sleep.
            with self._phase("proof"):
                for group in self._groups:
                    group.prove()
            self._phase.next_step()
        if asked:
            logger.info("audited: all ranks of the trainer hold what they should after step %d", step)
            if self._ask_engines:
                self._ask_engines()
