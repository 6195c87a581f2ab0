"""The training half of a run on rollouts: policy, critic and teacher. Engines or a recording feed it."""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Models and their processes."""

    policy: PolicyGroup
    critic: CriticGroup | None
    teacher: Callable[[Batch], Batch] | None
    """Adds the teacher's outputs to a batch."""
    engines: TeacherEngines | None
    """The teacher's engines."""

    def start(self, parts: Parts) -> None:
        """Builds the models and loads their weights."""
        if self.engines:
            self.engines.start()
        parts.start_groups()

    def exporter(self, parts: Parts) -> Exporter:
        """Returns what exports the trained models."""
        auxiliary = {CRITIC: self.critic} if self.critic else {}
        return Exporter(
            parts.config.checkpoint,
            parts.folder,
            self.policy,
            auxiliary=auxiliary,
            chat_template=parts.chat_template(),
        )

    def sleepers(self, parts: Parts) -> list[Sleeper]:
        """Returns the models that leave their device's memory between their phases, as their settings say."""
        found: list[Sleeper] = [self.policy] if parts.config.train.sleeps else []
        if self.critic and parts.config.critic_train.sleeps:
            found.append(self.critic)
        return found


def trained(parts: Parts, placement: Placement, algorithm: OnlineAlgorithm) -> Trained:
    """Returns the models that an algorithm trains on rollouts, and its teacher, not started."""
    policy = models.policy(parts, placement, algorithm)
    critic = models.critic(parts, placement, algorithm.critic) if algorithm.critic else None
    engines = models.teacher_engines(parts, placement)
    teacher = models.teacher(parts, placement, algorithm, policy, engines)
    return Trained(policy=policy, critic=critic, teacher=teacher, engines=engines)
