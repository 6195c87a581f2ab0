"""The offline loop: train on given sequences. Same workers, checkpoints and metrics as online, no engine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlframe.algorithms.base import Model, OfflineAlgorithm
from rlframe.data.training import TrainingStream
from rlframe.loops.phases import Phases
from rlframe.loops.reference import batches
from rlframe.loops.reporting.metrics import MetricsLog
from rlframe.loops.saving.checkpoints import Checkpoints, RunState, score
from rlframe.loops.stop import Stop
from rlframe.megatron.driver.policy import PolicyGroup
from rlframe.run.config import RunConfig


@dataclass(kw_only=True)
class OfflineLoop:
    """Supervised fine-tuning and other training on given sequences: one optimizer step per step."""

    config: RunConfig
    algorithm: OfflineAlgorithm
    examples: TrainingStream[Any]
    policy: PolicyGroup
    model: Model
    """Model that prepares batches: the policy, or a substitute with precomputed reference logprobs."""
    teacher: Callable[[Any], Any] | None
    """Adds the teacher's outputs to a batch. None if the algorithm does not distil."""
    phase: Phases
    metrics: MetricsLog
    checkpoints: Checkpoints
    export: Callable[[str], None]
    """Writes the model in Hugging Face format to a folder of the run."""
    prove: Callable[[int], None] = lambda _: None
    """Called after each step; makes the ranks prove their weights when it is due."""
    stop: Stop = field(default_factory=Stop)
    """Ends the run before its last step on request."""
    results: dict[str, float] = field(default_factory=dict)
    """Numbers for the closing paragraph, which are part of checkpoints."""

    def run(self, done_steps: int) -> None:
        """Runs all steps after the first `done_steps`, with evaluations and checkpoints between them."""
        if done_steps == 0:
            if warning := self.algorithm.warning(batches(self.examples, self.examples.first(len(self.examples)))):
                self.metrics.say(f"warning: {warning}")
            self.evaluate(0)
        for step in self.stop.steps(done_steps + 1, self.config.steps, settle=self.checkpoints.finish):
            self.step(step)
            self.prove(step)
            self.checkpoints.check()
            every = self.config.evaluation.every_steps
            if step == self.config.steps or (every and step % every == 0):
                self.evaluate(step)
            every = self.config.checkpoint.export_every_steps
            if every and step % every == 0:
                with self.phase("export", on=self.policy):
                    self.export(f"exports/step-{step:08d}")
                self.phase.next_step()
            # Last: a run that resumes from the checkpoint of a step has nothing of that step left to do.
            every = self.config.checkpoint.every_steps
            if self.stop.wants_save(step) or step == self.config.steps or (every and step % every == 0):
                self.save(step)
        self.checkpoints.finish()

    def step(self, step: int) -> None:
        """Runs one optimizer step."""
        with self.phase("data"):
            batch = self.examples.batch(self.examples.next(self.config.prompts_per_step))  # [T]
        with self.phase("prepare", on=self.policy):
            batch = self.prepared(batch)
        with self.phase("train", on=self.policy):
            result = self.policy.train(batch)
        times = self.phase.step_times()
        loss = result.metrics["train/loss"]
        self.results |= {"last_loss": loss} if "first_loss" in self.results else {"first_loss": loss, "last_loss": loss}
        self.metrics.log(
            step,
            result.metrics
            | times
            | self.checkpoints.metrics()
            | {
                "throughput/tokens_per_s": batch.num_tokens / times["time/step_s"],
                "data/epoch": float(self.examples.epoch),
                "data/dropped": float(self.examples.dropped.total()),
            },
        )

    def prepared(self, batch: Any) -> Any:
        """Returns the batch with further inputs of the loss."""
        batch = self.algorithm.prepare(batch, self.model)
        return self.teacher(batch) if self.teacher else batch

    def evaluate(self, step: int) -> None:
        """Evaluates the loss on the held-out items as one step. Writes metrics, and numbers for the closing
        paragraph."""
        items = self.examples.held_out()
        if not items:
            return
        with self.phase("evaluation", on=self.policy):
            batch = self.prepared(self.examples.batch(items))
            measured = self.policy.evaluate(batch)
        self.phase.next_step()
        metrics = {f"evaluation/{key.removeprefix('train/')}": value for key, value in measured.items()}
        self.metrics.log_evaluation(step, metrics)
        when = "before" if step == 0 else "after"
        self.results |= {f"{when}/{key.removeprefix('evaluation/')}": value for key, value in metrics.items()}
        self.results["held_out_items"] = float(len(items))

    def save(self, step: int) -> None:
        """Saves a checkpoint from which the run resumes bit for bit."""
        config = self.config.checkpoint
        state = RunState(
            step=step,
            num_optimizer_steps=self.policy.num_optimizer_steps,
            data=self.examples.state(),
            results=self.results,
            score=score(config, *self.metrics.measured(step)),
        )
        with self.phase("checkpoint", on=self.policy):
            self.checkpoints.save(state, partial(self.policy.save, copy=config.asynchronous, verify=config.verify))
        self.phase.next_step()
