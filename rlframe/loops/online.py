"""The online loop: sample, judge, train, sync. One screen."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.data.prompts import PromptStream
from rlframe.loops.evaluate import evaluate
from rlframe.loops.phases import Phases
from rlframe.loops.probe import Probe
from rlframe.loops.reporting.advantage_stats import Signal
from rlframe.loops.reporting.metrics import MetricsLog, rollout_metrics
from rlframe.loops.sampling import Sampler
from rlframe.loops.saving.checkpoints import CRITIC, Checkpoints, RunState, score
from rlframe.loops.scoring import Scorer
from rlframe.loops.stop import Stop
from rlframe.megatron.driver.policy import CriticGroup, ModelGroup, PolicyGroup
from rlframe.ops.packing import pack
from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.run.config import RunConfig
from rlframe.types.batch import Batch
from rlframe.types.results import Output
from rlframe.types.rollout import Group, members
from rlframe.weight_sync.channel import SyncReport, WeightSync


@dataclass(kw_only=True)
class OnlineLoop:
    """GRPO and other training on rollouts. `rlframe.run.compose` makes its parts, which know nothing of each other."""

    config: RunConfig
    algorithm: OnlineAlgorithm
    prompts: PromptStream
    rollout: RolloutGroup
    judge: Scorer
    sampler: Sampler
    policy: PolicyGroup
    critic: CriticGroup | None
    """Critic: predicts values and is trained on returns. None for algorithms without a critic."""
    weight_sync: WeightSync
    phase: Phases
    metrics: MetricsLog
    checkpoints: Checkpoints
    export: Callable[[str], None]
    """Writes the model in Hugging Face format to a folder of the run."""
    teacher: Callable[[Batch], Batch] | None = None
    """Adds the teacher's log-probabilities to a batch. None if the algorithm does not distil."""
    probe: Probe | None = None
    """Compares engines and trainer on fixed prompts. None disables it."""
    prove: Callable[[int], None] = lambda _: None
    """Called after each step; makes the ranks prove their weights when it is due."""
    stop: Stop = field(default_factory=Stop)
    """Ends the run before its last step on request."""
    results: dict[str, float] = field(default_factory=dict)
    """Numbers for the closing paragraph, which are part of checkpoints."""

    def __post_init__(self) -> None:
        self.signal = Signal(self.results, by_advantages=self.algorithm.output is Output.TOKENS)

    def run(self, done_steps: int) -> None:
        """Runs all steps after the first `done_steps`, with probes, evaluations and checkpoints between them."""
        self.take_probe(done_steps, log=done_steps == 0)
        if done_steps == 0:
            self.evaluate(0)
        for step in self.stop.steps(done_steps + 1, self.config.steps, settle=self.checkpoints.finish):
            self.step(step)
            self.prove(step)
            self.checkpoints.check()
            every = self.config.weight_sync.probe_every_steps
            if every and step % every == 0:
                self.take_probe(step)
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
        """Samples one rollout batch and runs its optimizer steps."""
        groups = self.sampler.collect(step)  # [P], judged
        batch = pack(groups, mask_truncated=self.algorithm.mask_truncated)  # [T]
        if self.algorithm.needs_reference:
            with self.phase("reference", on=self.policy):
                batch.reference_logprobs = self.policy.logprobs(batch, reference=True)  # [T]
        if self.policy.updates_per_batch > 1 and not self.algorithm.bypass:
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
        if step > self.algorithm.critic_warmup_steps:
            with self.phase("train", on=self.policy):
                metrics |= self.policy.train(train_batch).metrics
            metrics |= self.algorithm.adapt(metrics)
        with self.phase("weight_sync"):
            sync = self.weight_sync.publish(version=step)
        self.metrics.log_samples(step, members(groups))
        signal = self.signal.of(step, train_batch)
        self.metrics.log(step, self.describe(groups, sync) | metrics | signal)

    def describe(self, groups: list[Group], sync: SyncReport) -> dict[str, float]:
        """Returns metrics of the rollouts, of the weight sync and of the step's time."""
        metrics = rollout_metrics(groups)
        metrics |= (
            {
                "weight_sync/bytes": float(sync.num_bytes),
                "time/weight_sync_pause_s": sync.pause_s,
                "time/weight_sync_pull_s": sync.pull_s,
                "time/weight_sync_verify_s": sync.verify_s,
                "time/weight_sync_audit_s": self.weight_sync.audit_s,
            }
            | self.sampler.metrics()
            | self.rollout.metrics()
            | self.policy.metrics
            | (self.critic.metrics if self.critic else {})
        )
        times = self.phase.step_times()
        return metrics | times | self.checkpoints.metrics() | {
            "throughput/tokens_per_s": metrics["rollout/tokens"] / times["time/step_s"],
            "data/epoch": float(self.prompts.epoch),
        }  # fmt: skip

    def take_probe(self, step: int, *, log: bool = True) -> None:
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
        """Evaluates greedy responses to held-out prompts. Writes metrics, and numbers for the closing paragraph."""
        prompts = self.prompts.evaluation_prompts()
        if not prompts:
            return
        sampling = self.config.rollout.sampling(greedy=True, max_tokens=self.config.evaluation.max_tokens)
        with self.phase("evaluation", on=self.rollout):
            metrics, rollouts = evaluate(self.rollout, self.judge, prompts, sampling=sampling)
        self.phase.next_step()
        self.metrics.log_samples(step, rollouts)
        self.metrics.log_evaluation(step, metrics)
        when = "before" if step == 0 else "after"
        self.results |= {f"{when}/{key.removeprefix('evaluation/')}": value for key, value in metrics.items()}
        self.results["held_out_prompts"] = float(len(prompts))

    def save(self, step: int) -> None:
        """Saves a checkpoint from which the run resumes bit for bit."""
        config = self.config.checkpoint

        def stage(model: ModelGroup, folder: Path) -> Callable[[], dict[str, float]]:
            self.phase.make_room(model)
            return model.save(folder, copy=config.asynchronous, verify=config.verify)

        state = RunState(
            step=step,
            num_optimizer_steps=self.policy.num_optimizer_steps,
            num_critic_optimizer_steps=self.critic.num_optimizer_steps if self.critic else 0,
            data=self.prompts.state(),
            results=self.results,
            algorithm=self.algorithm.state(),
            score=score(config, *self.metrics.measured(step)),
        )
        auxiliary = {CRITIC: partial(stage, self.critic)} if self.critic else {}
        with self.phase("checkpoint"):
            self.checkpoints.save(state, partial(stage, self.policy), auxiliary=auxiliary)
        self.phase.next_step()
