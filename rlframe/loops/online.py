"""The online loop: sample, judge, train, sync. One screen.

What it does with rollouts is the `RolloutLoop`, which knows no engines; `replay.py` has the other loop of that kind.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.attempts.account.leases import Leases
from rlframe.attempts.fleet import Attempts
from rlframe.attempts.mending import Mender
from rlframe.cluster.roles import CRITIC, POLICY
from rlframe.data.prompts import PromptSource
from rlframe.loops.base import Loop
from rlframe.loops.config import HELD_OUT
from rlframe.loops.evaluation.evaluate import EvaluationBeside, evaluate, judged, metrics_of
from rlframe.loops.evaluation.sets import Evaluated, EvaluationSet
from rlframe.loops.probe import Probe
from rlframe.loops.reporting.advantage_stats import AdvantageStats
from rlframe.loops.reporting.metrics import Seen
from rlframe.loops.reporting.samples import Chosen
from rlframe.loops.reporting.trackers.base import EVALUATED
from rlframe.loops.sampling.scoring import Scorer
from rlframe.loops.sampling.source import GroupSource
from rlframe.loops.saving.checkpoints import Stage
from rlframe.loops.schedule import Event
from rlframe.megatron.driver.policy import CriticGroup, ModelGroup
from rlframe.ops.packing import pack
from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.types.batch import Batch, TrainBatch
from rlframe.types.results import Output
from rlframe.types.rollout import Group, members
from rlframe.utils.process.memory import of_role, used
from rlframe.weight_sync.channel import WeightSync

IN_FLIGHT = "in_flight"
"""Folder of a checkpoint with the leases, groups and attempts that were under way."""


@dataclass(kw_only=True)
class RolloutLoop(Loop):
    """GRPO and other training on rollouts, wherever they come from. `rlframe.run.compose` makes its parts, which know
    nothing of each other."""

    algorithm: OnlineAlgorithm
    sampler: GroupSource
    critic: CriticGroup | None
    """Critic: predicts values and is trained on returns. None for algorithms without a critic."""
    teacher: Callable[[Batch], Batch] | None = None
    """Adds the teacher's log-probabilities to a batch. None if the algorithm does not distil."""

    def __post_init__(self) -> None:
        self.advantage_stats = AdvantageStats(self.results, by_advantages=self.algorithm.output is Output.TOKENS)

    @property
    def auxiliary(self) -> dict[str, ModelGroup]:
        """The critic, if there is one."""
        return {CRITIC: self.critic} if self.critic else {}

    def step(self, step: int) -> None:
        """Samples one rollout batch and runs its optimizer steps."""
        groups = self.sampler.collect(step)  # [P], judged
        batch = pack(groups, mask_truncated=self.algorithm.mask_truncated)  # [T]
        if self.algorithm.needs_reference:
            with self.phase("reference", on=self.policy):
                batch.reference_logprobs = self.policy.logprobs(batch, reference=True)  # [T]
        if self.policy.updates_per_batch > 1 and self.algorithm.needs_old_logprobs:
            with self.phase("old_logprobs", on=self.policy):
                batch.old_logprobs = self.policy.logprobs(batch)  # [T]
        if self.teacher:
            with self.phase("teacher", on=self.policy):
                batch = self.teacher(batch)  # [T]
        metrics: dict[str, float] = {}
        if self.critic:
            with self.phase("values", on=self.critic):
                batch = self.algorithm.with_values(batch, self.critic.values(batch))  # [T]
            with self.phase("critic", on=self.critic):
                metrics |= self.critic.train(batch).metrics
        train_batch = self.algorithm.train_batch(batch)  # [T]
        samples, seen = self.look(step, groups, train_batch)
        if step > self.algorithm.critic_warmup_steps:
            with self.phase("train", on=self.policy):
                trained = self.policy.train(samples.marked(train_batch))
            samples.take_trainer_logprobs(trained.kept_logprobs)
            metrics |= trained.metrics
            metrics |= self.algorithm.adapt(metrics)
        with self.phase("weight_sync", beside=self.policy):
            synced = self.publish(version=step)
        with self.phase("account"):
            self.sampler.settle(step)
        self.metrics.log_samples(samples)
        counts = self.advantage_stats.of(step, train_batch)
        self.metrics.log(step, self.describe(step, seen, synced) | metrics | counts)

    def look(self, step: int, groups: list[Group], batch: TrainBatch) -> tuple[Chosen, Seen]:
        """Shows the batch to the callbacks. Returns the rollouts that the run keeps of a step, and the numbers of all
        of them: before the training, which drives these thousands of small objects out of the processor's caches."""
        rollouts = members(groups)
        self.metrics.callbacks.on_batch(step, rollouts, batch)
        return self.metrics.choose_samples(step, rollouts, batch), Seen.of(groups, batch)

    def describe(self, step: int, seen: Seen, synced: dict[str, float]) -> dict[str, float]:  # noqa: ARG002 - override
        """Returns metrics of the rollouts, of the models and of the step's time.

        Args:
            synced: metrics of the weight sync.
        """
        tokens = seen.tokens
        metrics = seen.metrics | synced | self.sampler.metrics() | self.policy.metrics
        metrics |= self.critic.metrics if self.critic else {}
        groups = {POLICY: self.policy, **self.auxiliary}
        times = self.phase.step_times(groups)
        spared = {role: group.spared for role, group in groups.items()}
        metrics |= self.throughput.of_training(times, tokens.lengths, seen.predicted, spared=spared)
        untrained = self.sampler.untrained
        metrics |= self.throughput.of_sampling(times, tokens.lengths, tokens.sampled, untrained=untrained)
        return metrics | times | self.checkpoints.metrics() | of_role("driver", [used()]) | {
            "throughput/tokens_per_s": metrics["rollout/tokens"] / times["time/step_s"],
        }  # fmt: skip

    def algorithm_state(self) -> dict[str, float]:
        """Returns the coefficients that the algorithm has adapted, such as its KL coefficient."""
        return self.algorithm.state()

    def restore_algorithm(self, state: Mapping[str, float]) -> None:
        """Sets the coefficients that the algorithm has adapted."""
        self.algorithm.restore(state)


@dataclass(kw_only=True)
class OnlineLoop(RolloutLoop):
    """Training on rollouts that engines sample with the policy's newest weights."""

    prompts: PromptSource
    leases: Leases
    rollout: RolloutGroup
    attempts: Attempts
    """Attempts at prompts, for training and for evaluation."""
    scorer: Scorer | None
    """Scores evaluations by the reward model. None if there is none."""
    weight_sync: WeightSync
    in_flight_updates: bool = True
    """Whether responses under way go on with new weights. Otherwise they are finished first."""
    evaluation_sets: Sequence[EvaluationSet] = ()
    """The prompts to evaluate: those held out of the training data, if there are any, and those of further sets."""
    mender: Mender | None = None
    """Brings engines back that die while the policy trains. None if they wait for the end of the step."""
    evaluation: EvaluationBeside | None = None
    """Evaluations during which training goes on. None if training waits for them."""
    probe: Probe | None = None
    """Compares engines and trainer on fixed prompts. None disables it."""

    @property
    def source(self) -> Leases:
        """The leases of the prompts."""
        return self.leases

    def run(self, done_steps: int) -> None:
        """Runs all steps after the first `done_steps`, and the events that are due between them."""
        self.run_probe(done_steps, log=done_steps == 0)
        if done_steps == 0:
            self.evaluate(0)
        after = {
            Event.PROBE: self.run_probe,
            Event.EVALUATION: self.evaluate,
            Event.EXPORT: self.export_step,
            Event.CHECKPOINT: self.save,
        }
        self.schedule.run(done_steps, self.step, after)

    def describe(self, step: int, seen: Seen, synced: dict[str, float]) -> dict[str, float]:  # noqa: ARG002 - of engines
        """Returns also metrics of the engines and of the data."""
        metrics = super().describe(step, seen, synced)
        metrics |= self.rollout.metrics() | self.attempts.metrics() | self.leases.metrics(step)
        metrics |= self.evaluation.metrics() if self.evaluation else {}
        return metrics | {"data/epoch": float(self.prompts.epoch)}

    def run_probe(self, step: int, *, log: bool = True) -> None:
        """Runs the probe; see `probe.py`. The trainer computes first: after a sync the engines still sleep for it, and
        then stay awake for the rollouts that follow.

        Args:
            log: False if the run's files have this probe already, from before it was resumed.
        """
        if self.probe is None:
            return
        with self.phase("probe", on=self.policy):
            trainer = self.probe.trainer_nats(self.policy)
        with self.phase("probe", on=self.rollout):
            engines = self.rollout.score(self.probe.sequences)
        metrics = self.probe.compare(engines, trainer, version=self.rollout.version)
        self.phase.next_step()
        if log:
            self.metrics.log_evaluation(step, metrics)

    def evaluate(self, step: int) -> None:
        """Evaluates responses to the prompts of all sets, or begins to, if training does not wait for it. Writes
        metrics, and numbers for the closing paragraph."""
        if self.evaluation:
            if self.evaluation.step is not None:
                self.finish_evaluation()
            self.evaluation.begin(step)
            if step == self.schedule.last_step:
                self.finish_evaluation()
            return
        if not self.evaluation_sets:
            return
        with self.phase("evaluation", on=self.rollout):
            evaluated = evaluate(self.attempts, self.scorer, self.evaluation_sets)
        self.phase.next_step()
        self._log_evaluation(step, evaluated, {})

    def finish_evaluation(self) -> None:
        """Waits for the evaluation that is under way, if there is one, and writes its numbers."""
        if self.evaluation and self.evaluation.step is not None:
            self._judge_evaluation(self._sampled_evaluation())
        self.phase.next_step()

    def _sampled_evaluation(self) -> tuple[int, list[list[Group]]] | None:
        """Waits for the evaluation that is under way. Returns its step and the groups of each set, or None if it is
        left out."""
        assert self.evaluation and (step := self.evaluation.step) is not None
        with self.phase("evaluation"):
            groups = self.evaluation.finish()
        return None if groups is None else (step, groups)

    def _judge_evaluation(self, sampled: tuple[int, list[list[Group]]] | None) -> None:
        """Scores an evaluation, and writes its numbers as those of the step whose weights sampled it."""
        if sampled:
            step, groups = sampled
            with self.phase("evaluation"):
                pairs = zip(self.evaluation_sets, groups, strict=True)
                evaluated = [judged(each, own, self.scorer) for each, own in pairs]
            self._log_evaluation(step, evaluated, {EVALUATED: float(step)})

    def _log_evaluation(self, step: int, evaluated: list[Evaluated], further: dict[str, float]) -> None:
        metrics = metrics_of(evaluated) | further
        for each in evaluated:
            chosen = self.metrics.choose_samples(step, members(each.groups), evaluation=each.set.name)
            self.metrics.log_samples(chosen)
        self.metrics.log_evaluation(step, metrics)
        when = "before" if step == 0 else "after"
        self.results |= {f"{when}/{key.removeprefix('evaluation/')}": value for key, value in metrics.items()}
        counts = {each.set.name: float(len(each.set.prompts)) for each in evaluated}
        self.results["held_out_prompts"] = counts.get(HELD_OUT, 0.0)

    def save(self, step: int) -> None:
        """See Loop. The checkpoint needs the numbers of the evaluation if they decide whether it is kept, or are of
        weights that it does not have."""
        if self.checkpoints.config.keep_best or (self.evaluation and self.evaluation.step not in (None, step)):
            self.finish_evaluation()
        super().save(step)

    def publish(self, version: int) -> dict[str, float]:
        """Syncs the policy's weights into the engines, after the evaluation of those before, unless it has engines of
        its own. Returns metrics."""
        if self.mender:
            self.mender.end()
        evaluated = self._sampled_evaluation() if self.evaluation and self.evaluation.must_end else None
        # Engines that slept take their weights' memory for the sync; of the policy it needs the parameters alone.
        self.phase.make_room(self.rollout)
        with nullcontext() if self.in_flight_updates else self.attempts.between_responses():
            sync = self.weight_sync.publish(version=version)
        # Not before the sync: a reward model may need the policy's memory.
        self._judge_evaluation(evaluated)
        return {
            "weight_sync/bytes": float(sync.num_bytes),
            "time/weight_sync_pause_s": sync.pause_s,
            "time/weight_sync_pull_s": sync.pull_s,
            "time/weight_sync_verify_s": sync.verify_s,
            "time/weight_sync_audit_s": self.weight_sync.audit_s,
        } | self.weight_sync.hold_metrics

    def rewind(self, done_steps: int | None) -> None:
        """See Loop."""
        super().rewind(done_steps)
        self.leases.ledger.rewind(done_steps or 0)

    def in_flight(self, step: int) -> dict[str, Stage]:
        """See Loop."""
        return {IN_FLIGHT: partial(self._hold, self.sampler.hold(step))} if self.sampler.in_flight else {}

    def _hold(self, write: Callable[[Path], None], folder: Path) -> Callable[[], dict[str, float]]:
        write(folder)
        if self.evaluation:
            self.evaluation.hold(folder)
        return dict

    def go_on(self, checkpoint: Path) -> None:
        """See Loop."""
        self.sampler.go_on(checkpoint / IN_FLIGHT)
        if self.evaluation:
            self.evaluation.go_on(checkpoint / IN_FLIGHT, is_done=self.metrics.has_evaluation)

    def forget(self) -> None:
        """See Loop."""
        self.sampler.reset()
        if self.evaluation:
            self.evaluation.forget()

    def reattach(self, version: int) -> None:
        """Makes the weight sync read from the policy's new ranks."""
        self.weight_sync.reattach(version=version)
        if self.evaluation:
            self.evaluation.reattach(version)
