"""What the online and the offline loop share: between steps they save, export and resume alike."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlframe.algorithms.base import Algorithm
from rlframe.loops.phases import Phases
from rlframe.loops.reporting.metrics import MetricsLog
from rlframe.loops.saving.checkpoints import Checkpoints, RunState, score
from rlframe.loops.schedule import Schedule
from rlframe.megatron.driver.policy import ModelGroup, PolicyGroup


class Source(Protocol):
    """Deals prompts or training items, and knows where it is."""

    def state(self) -> dict[str, Any]:
        """Returns the position, as plain JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a position."""
        ...


@dataclass(kw_only=True)
class Loop(ABC):
    """Holds what every loop has, and does what is the same in all of them."""

    schedule: Schedule
    algorithm: Algorithm
    policy: PolicyGroup
    phase: Phases
    metrics: MetricsLog
    checkpoints: Checkpoints
    export: Callable[[str], None]
    """Writes the model in Hugging Face format to a folder of the run."""
    results: dict[str, float] = field(default_factory=dict)
    """Numbers for the closing paragraph; part of checkpoints."""

    @property
    @abstractmethod
    def source(self) -> Source:
        """Where the loop's data comes from."""

    @property
    def auxiliary(self) -> dict[str, ModelGroup]:
        """The models in training besides the policy, by role."""
        return {}

    @abstractmethod
    def run(self, done_steps: int) -> None:
        """Does all steps after the first `done_steps`, and what is due between them."""

    def publish(self, version: int) -> None:  # noqa: B027 - an offline loop has no engines
        """Syncs the policy's weights, as `version`, into the engines, if there are any."""

    def reattach(self, version: int) -> None:  # noqa: B027 - as publish
        """Has the weight sync, if there is one, read from the policy's new ranks, which hold `version`."""

    def prepare(self) -> None:  # noqa: B027 - most loops need nothing
        """Does what needs the first weights, also in a resumed run. The policy has them."""

    def algorithm_state(self) -> dict[str, float]:
        """Returns what the algorithm has adapted."""
        return {}

    def restore_algorithm(self, state: Mapping[str, float]) -> None:  # noqa: B027 - as algorithm_state
        """Sets what the algorithm has adapted."""

    def export_step(self, step: int) -> None:
        """Writes the model as it is after `step`."""
        with self.phase("export", on=self.policy):
            self.export(f"exports/step-{step:08d}")
        self.phase.next_step()

    def save(self, step: int) -> None:
        """Writes a checkpoint from which the run goes on bit by bit as if it had never stopped."""
        config = self.checkpoints.config

        def stage(model: ModelGroup, folder: Path) -> Callable[[], dict[str, float]]:
            self.phase.make_room(model)
            return model.save(folder, copy=config.asynchronous, verify=config.verify)

        state = RunState(
            step=step,
            num_optimizer_steps=self.policy.num_optimizer_steps,
            num_auxiliary_optimizer_steps={role: each.num_optimizer_steps for role, each in self.auxiliary.items()},
            data=self.source.state(),
            results=self.results,
            algorithm=self.algorithm_state(),
            score=score(config, *self.metrics.measured(step)),
        )
        auxiliary = {role: partial(stage, model) for role, model in self.auxiliary.items()}
        with self.phase("checkpoint"):
            self.checkpoints.save(state, partial(stage, self.policy), auxiliary=auxiliary)
        self.phase.next_step()
