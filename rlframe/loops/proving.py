"""Between steps: whether the ranks' copies of weights are still equal, and frozen weights what was loaded."""

from collections.abc import Sequence

from rlframe.loops.phases import Phases
from rlframe.megatron.driver.rank_group import RankGroup


class Prover:
    """Has all groups of ranks prove their weights every so many steps."""

    def __init__(self, groups: Sequence[RankGroup], phase: Phases, *, every_steps: int):
        """
        Args:
            groups: all there are once the loop runs.
            every_steps: 0 is never.
        """
        self._groups, self._phase, self._every = groups, phase, every_steps

    def after(self, step: int) -> None:
        """Has them prove what they hold after `step`, if it is time.

        Raises:
            WeightsDrifted: some memory does not hold what it should.
        """
        if self._every and step % self._every == 0:
            # On nobody: parameters stay on their devices while optimizers and engines sleep.
            with self._phase("proof"):
                for group in self._groups:
                    group.prove()
            self._phase.next_step()
