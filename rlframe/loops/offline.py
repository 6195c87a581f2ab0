"""The offline loop: train on given sequences. Same workers, checkpoints and metrics as online, no engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlframe.algorithms.base import ForwardModel, OfflineAlgorithm
from rlframe.cluster.roles import POLICY
from rlframe.data.training import TrainingSource
from rlframe.loops.base import Loop
from rlframe.loops.reference import PrecomputedReference, batches
from rlframe.loops.schedule import Event
from rlframe.utils.process.memory import of_role, used


@dataclass(kw_only=True)
class OfflineLoop(Loop):
    """Supervised fine-tuning and other training on given sequences: one optimizer step per step."""

    algorithm: OfflineAlgorithm
    examples: TrainingSource[Any]
    prompts_per_step: int
    """Number of items of a step, over all ranks."""
    model: ForwardModel
    """Model that prepares batches: the policy, or a substitute with precomputed reference logprobs."""
    teacher: Callable[[Any], Any] | None
    """Adds the teacher's outputs to a batch. None if the algorithm does not distil."""

    @property
    def source(self) -> TrainingSource[Any]:
        """The items to train on."""
        return self.examples

    def run(self, done_steps: int) -> None:
        """Runs all steps after the first `done_steps`, and the events that are due between them."""
        if done_steps == 0:
            if warning := self.algorithm.warning(batches(self.examples, self.examples.of_an_epoch())):
                self.metrics.print_line(f"warning: {warning}")
            self.evaluate(0)
        after = {Event.EVALUATION: self.evaluate, Event.EXPORT: self.export_step, Event.CHECKPOINT: self.save}
        self.schedule.run(done_steps, self.step, after)

    def prepare(self) -> None:
        """Computes the reference's logprobs of all items, if the ranks are to hold no reference."""
        if isinstance(self.model, PrecomputedReference):
            self.model.fill(self.examples, print_line=self.metrics.print_line)

    def step(self, step: int) -> None:
        """Runs one optimizer step."""
        with self.phase("data"):
            batch = self.examples.batch(self.examples.next(self.prompts_per_step))  # [T]
        with self.phase("prepare", on=self.policy):
            batch = self.prepared(batch)
        self.metrics.callbacks.on_batch(step, (), batch)
        with self.phase("train", on=self.policy):
            result = self.policy.train(batch)
        times = self.phase.step_times({POLICY: self.policy})
        spared = {POLICY: self.policy.spared}
        loss = result.metrics["train/loss"]
        self.results |= {"last_loss": loss} if "first_loss" in self.results else {"first_loss": loss, "last_loss": loss}
        self.metrics.log(
            step,
            result.metrics
            | times
            | self.checkpoints.metrics()
            | self.examples.metrics()
            | self.throughput.of_training(times, batch.lengths.numpy(), int(batch.loss_mask.sum()), spared=spared)
            | self.policy.metrics
            | of_role("driver", [used()])
            | {
                "throughput/tokens_per_s": batch.num_tokens / times["time/step_s"],
                "data/epoch": float(self.examples.epoch),
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
