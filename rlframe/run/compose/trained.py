"""The training half of a run on rollouts: policy, critic and teacher. Engines or a recording feed it."""

from collections.abc import Callable

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.cluster.placement import Placement
from rlframe.cluster.roles import CRITIC
from rlframe.loops.phases import Sleeper
from rlframe.loops.saving.exporting import Exporter
from rlframe.megatron.driver.policy import CriticGroup, PolicyGroup
from rlframe.rollout.fleet.teacher import TeacherEngines
from rlframe.run.compose import models
from rlframe.run.compose.parts import Parts
from rlframe.types.batch import Batch


class Trained:
    """Models in their processes, which work after `start`. Processes of engines may begin meanwhile."""

    def __init__(self, parts: Parts, placement: Placement, algorithm: OnlineAlgorithm):
        self._parts, self._placement, self._algorithm = parts, placement, algorithm
        self.policy: PolicyGroup = models.policy(parts, placement, algorithm)
        self.critic: CriticGroup | None = None
        if algorithm.critic:
            self.critic = models.critic(parts, placement, algorithm.critic)
        self.engines: TeacherEngines | None = None
        """The teacher's engines."""
        self.teacher: Callable[[Batch], Batch] | None = None
        """Adds the teacher's outputs to a batch."""

    def start(self) -> None:
        """Starts all of them, and the teacher."""
        parts, placement = self._parts, self._placement
        self.engines = models.teacher_engines(parts, placement)
        self.teacher = models.teacher(parts, placement, self._algorithm, self.policy, self.engines)
        self.policy.start()
        if self.critic:
            self.critic.start()

    def exporter(self) -> Exporter:
        """Returns what exports the trained models."""
        auxiliary = {CRITIC: self.critic} if self.critic else {}
        return Exporter(self._parts.config.checkpoint, self._parts.folder, self.policy, auxiliary=auxiliary)

    def sleepers(self) -> list[Sleeper]:
        """Returns the models that leave their device's memory between their phases, as their settings say."""
        config = self._parts.config
        found: list[Sleeper] = [self.policy] if config.train.offload_optimizer else []
        if self.critic and config.critic_train.offload_optimizer:
            found.append(self.critic)
        return found
