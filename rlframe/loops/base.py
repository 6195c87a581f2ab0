"""The common base of the online and the offline loop: saving, exporting and resuming between steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlframe.algorithms.base import Algorithm
from rlframe.loops.phases import Phases
from rlframe.loops.reporting.metrics import MetricsLog
from rlframe.loops.reporting.throughput import Throughput
from rlframe.loops.saving.background import choose
from rlframe.loops.saving.checkpoints import Checkpoints, RunState, Stage, require_measured
from rlframe.loops.schedule import Schedule
from rlframe.megatron.driver.policy import ModelGroup, PolicyGroup


class Source(Protocol):
    """Deals prompts or training items, and has a position that can be saved."""

    def state(self) -> dict[str, Any]:
        """Returns the position, as plain JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves to a position."""
        ...


@dataclass(kw_only=True)
class Loop(ABC):
    """Common state and operations of all loops."""

    schedule: Schedule
    algorithm: Algorithm
    policy: PolicyGroup
    phase: Phases
    metrics: MetricsLog
    checkpoints: Checkpoints
    export: Callable[[str], None]
    """Writes the model in Hugging Face format to a folder of the run."""
    throughput: Throughput = field(default_factory=Throughput)
    """Measures tokens a second and device."""
    background: bool | None = None
    """Whether training goes on while the next checkpoint is written, by what is known. None before the first ranks have
    started."""
    results: dict[str, float] = field(default_factory=dict)
    """Numbers for the closing paragraph, which are part of checkpoints."""
    first_weights: str = ""
    """Identity of the weights with which the run began, if it needs them when it is resumed."""
    auxiliary_first_weights: dict[str, str] = field(default_factory=dict)
    """The same of further models, by role."""

    @property
    @abstractmethod
    def source(self) -> Source:
        """The source of the loop's data."""

    @property
    def auxiliary(self) -> dict[str, ModelGroup]:
        """The trained models other than the policy, by role."""
        return {}

    @property
    def trained(self) -> list[ModelGroup]:
        """The trained models."""
        return [self.policy, *self.auxiliary.values()]

    @abstractmethod
    def run(self, done_steps: int) -> None:
        """Runs all steps after the first `done_steps`, and the events that are due between them."""

    def publish(self, version: int) -> dict[str, float]:  # noqa: ARG002 - not every loop has engines
        """Syncs the policy's weights, as `version`, into the engines, if there are any. Returns metrics."""
        return {}

    def reattach(self, version: int) -> None:  # noqa: B027 - as publish
        """Makes the weight sync, if there is one, read from the policy's new ranks, which hold `version`."""

    def rewind(self, done_steps: int | None) -> None:
        """Removes what the run has written of steps after `done_steps`, which are done again. None means all steps."""
        self.metrics.rewind(done_steps)

    def prepare(self) -> None:  # noqa: B027 - most loops need nothing
        """Computes everything that needs the first weights, also in a resumed run. The policy has them."""

    def algorithm_state(self) -> dict[str, float]:
        """Returns the coefficients that the algorithm has adapted."""
        return {}

    def restore_algorithm(self, state: Mapping[str, float]) -> None:  # noqa: B027 - as algorithm_state
        """Sets the coefficients that the algorithm has adapted."""

    def in_flight(self, step: int) -> dict[str, Stage]:  # noqa: ARG002 - most loops have nothing under way
        """Returns what else a checkpoint after `step` holds, by the name of its folder. May move the position of the
        source."""
        return {}

    def go_on(self, checkpoint: Path) -> None:  # noqa: B027 - as in_flight
        """Begins again what was under way in a checkpoint. The engines have its weights."""

    def forget(self) -> None:  # noqa: B027 - as in_flight
        """Forgets what is under way."""

    def prepare_checkpoints(self) -> None:
        """Decides how checkpoints are written, says so once, and has room made for what that needs. The ranks have
        their optimizers."""
        choice = choose(self.checkpoints.config.copies, self.trained)
        if choice.background != self.background:
            self.background = choice.background
            self.metrics.print_line(choice.said)
        if choice.background:
            for model in self.trained:
                model.reserve_copy()

    def export_step(self, step: int) -> None:
        """Writes the model of `step`."""
        with self.phase("export", on=self.policy):
            self.export(f"exports/step-{step:08d}")
        self.phase.next_step()

    def save(self, step: int) -> None:
        """Writes a checkpoint from which the run resumes bit for bit."""
        config = self.checkpoints.config
        with self.phase("checkpoint"):
            # The one before may still be in the memory that this one needs.
            self.checkpoints.finish()
            choice = choose(config.copies, self.trained)
            in_flight = self.in_flight(step)
        if choice.background != self.background:
            self.background = choice.background
            self.metrics.print_line(choice.said)

        def stage(model: ModelGroup, folder: Path) -> Callable[[], dict[str, float]]:
            self.phase.sleep_others(model)
            return model.save(folder, copy=choice.background, read_back=config.read_back if config.verify else 0.0)

        measured, known = self.metrics.measured(step)
        state = RunState(
            step=step,
            num_optimizer_steps=self.policy.num_optimizer_steps,
            num_auxiliary_optimizer_steps={role: each.num_optimizer_steps for role, each in self.auxiliary.items()},
            data=self.source.state(),
            results=self.results,
            algorithm=self.algorithm_state(),
            score=measured.get(config.best_metric) if config.best_metric else None,
            first_weights=self.first_weights,
            auxiliary_first_weights=self.auxiliary_first_weights,
        )
        auxiliary = {role: partial(stage, model) for role, model in self.auxiliary.items()} | in_flight
        with self.phase("checkpoint"):
            folder = self.checkpoints.save(
                state, partial(stage, self.policy), auxiliary=auxiliary, background=choice.background
            )
        self.phase.next_step()
        self.metrics.callbacks.on_checkpoint(step, folder)
        # While a critic warms up, nothing of the policy's training is measured.
        if self.policy.num_optimizer_steps:
            require_measured(config, known)
