"""Runs a loop at learning rate 0 and looks at it: after every step, and with a few experiments at the end."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from rlframe.cluster.worker_group import WorkerGroup
from rlframe.loops.callbacks import Callback
from rlframe.loops.offline import OfflineLoop
from rlframe.loops.online import OnlineLoop
from rlframe.loops.probe import Probe
from rlframe.loops.self_test.config import SelfTestConfig
from rlframe.loops.self_test.seen import (
    Facts,
    Nats,
    Repeats,
    Resampled,
    Rounding,
    Seen,
    StepSeen,
    SyncSeen,
    differences,
    gap_of,
    mean_difference,
)
from rlframe.megatron.driver.policy import PolicyGroup
from rlframe.types.batch import Batch, Sequences
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, Rollout, SamplingParams
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import NodeDied, RlframeError, WeightSyncFailed
from rlframe.utils.process.memory import MemoryUse, used
from rlframe.weight_sync.border import DestinationRank

logger = logging.getLogger(__name__)
AnyLoop = TypeVar("AnyLoop", OnlineLoop, OfflineLoop)
PHASE = "self_test"
FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)
"""Temperatures to try, as factors of that of the settings. 1 is tried too: no temperature at all."""
NUM_SEQUENCES = 64
"""Greatest number of sequences that are looked at several times."""
NUM_PROMPTS, NUM_ATTEMPTS, MAX_TOKENS = 8, 4, 32
"""Prompts, attempts at each and greatest number of tokens of a response, to test the seeds."""


class Noted(Callback):
    """Notes the newest batch and metrics of a loop."""

    rollouts: Sequence[Rollout] = ()
    batch: Sequences | None = None
    metrics: Mapping[str, float] = {}

    def on_batch(self, step: int, rollouts: Sequence[Rollout], batch: Sequences) -> None:
        """See Callback."""
        self.rollouts, self.batch = rollouts, batch

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See Callback."""
        self.metrics = metrics


@dataclass(kw_only=True)
class Procedure(ABC, Generic[AnyLoop]):
    """The steps and what is looked at after each of them."""

    loop: AnyLoop
    settings: SelfTestConfig
    facts: Facts
    noted: Noted
    """A callback of the loop."""
    groups: Mapping[str, WorkerGroup[Any]]
    """The processes whose memory is measured, by role."""
    seen: Seen = field(init=False)

    def __post_init__(self) -> None:
        self.seen = Seen(settings=self.settings, facts=self.facts)

    def run(self) -> Seen:
        """Runs the steps and the experiments. An error of the run ends it early, and is part of what was seen."""
        loop = self.loop
        try:
            self.seen.weights = self._digest()
            loop.schedule.begin()
            # Not as the steps of a run, which a signal lets end and be saved: nothing here is worth it.
            for step in range(1, self.settings.steps + 1):
                loop.schedule.stop.still_ours()
                loop.step(step)
                self.look(step)
                loop.phase.next_step()
            self.look_at_batch()
            self.experiment()
        except NodeDied:
            raise
        except RlframeError as error:
            logger.warning("the run ended early: %s", error)
            self.seen.refusal = str(error)
        return self.seen

    @abstractmethod
    def look(self, step: int) -> None:
        """Notes what there is to see after a step."""

    @abstractmethod
    def experiment(self) -> None:
        """Tries what a run does not do, after its steps."""

    def look_at_batch(self) -> None:
        """Notes what the policy makes of its last batch, twice."""
        loop, seen, batch = self.loop, self.seen, self.noted.batch
        assert batch is not None, "a step has trained"
        seen.batch, seen.rollouts = batch, self.noted.rollouts
        seen.token_weights = loop.algorithm.token_weights(batch)
        with loop.phase(PHASE, on=loop.policy):
            again = 0.0
            if self.has_logprobs:
                seen.logprobs = loop.policy.logprobs(batch)
                again = float((loop.policy.logprobs(batch) - seen.logprobs).abs().max())
                if loop.algorithm.needs_reference:
                    seen.reference = loop.policy.logprobs(batch, reference=True)
            whole = batch
            if loop.algorithm.needs_entropies:
                whole = loop.algorithm.with_entropies(batch, loop.policy.entropies(batch))
            losses = twice(lambda: loop.policy.evaluate(whole))
            trained = twice(lambda: loop.policy.train(batch).metrics)
        seen.repeats = Repeats(logprobs=again, losses=losses, trained=trained)

    @property
    def has_logprobs(self) -> bool:
        """Returns whether the model's head gives logprobs."""
        return self.loop.algorithm.model_outputs is None

    def memory(self) -> dict[str, MemoryUse]:
        """Returns the memory of the driver and of all processes."""
        found = {"driver": used()}
        for role, group in self.groups.items():
            found |= {f"{role}-{rank}": each for rank, each in enumerate(group.memory())}
        return found

    def _digest(self) -> str:
        with self.loop.phase(PHASE, on=self.loop.policy):
            return self.loop.policy.fingerprint()


@dataclass(kw_only=True)
class OnlineProcedure(Procedure[OnlineLoop]):
    """Looks at engines too."""

    probe: Probe
    """Has the fixed sequences."""
    prompts: Sequence[Prompt]
    """To test the seeds."""

    def look(self, step: int) -> None:
        """See Procedure."""
        loop, batch = self.loop, self.noted.batch
        weights = self._digest()
        with loop.phase(PHASE, on=loop.policy):
            trainer = self.probe.trainer_nats(loop.policy)
            logprobs = loop.policy.logprobs(batch) if isinstance(batch, Batch) else None
        engines = self._engines()
        self.seen.steps.append(
            StepSeen(
                step=step,
                metrics=self.noted.metrics,
                weights=weights,
                trainer=trainer,
                engines=engines,
                gap=None if logprobs is None or not isinstance(batch, Batch) else gap_of(batch, logprobs),
                memory=self.memory(),
            )
        )

    def experiment(self) -> None:
        """See Procedure."""
        # What an asynchronous run has under way must not meet other weights.
        self.loop.forget()
        if not self.facts.float32:
            self.seen.rounding = self._rounding()
        self._try_temperatures()
        self._sample_again()
        self.seen.sync = self._test_sync()

    def _engines(self) -> list[Nats]:
        """Returns the engines' logprobs of the fixed sequences."""
        with self.loop.phase(PHASE, on=self.loop.rollout):
            return self.loop.rollout.score(self.probe.sequences)

    def _rounding(self) -> Rounding | None:
        """Returns how far the smallest change of the weights moves the trainer's logprobs. None if nothing is in the
        loss."""
        loop, batch = self.loop, self.seen.rollout_batch
        assert batch is not None and self.seen.logprobs is not None
        if not batch.loss_mask.any():
            return None
        with loop.phase(PHASE, on=loop.policy), flipped(loop.policy):
            logprobs, fixed = loop.policy.logprobs(batch), self.probe.trainer_nats(loop.policy)
        moved = (logprobs - self.seen.logprobs)[batch.loss_mask].abs()
        return Rounding(
            sampled_nats=float(moved.double().mean()), fixed_nats=mean_difference(fixed, self.seen.steps[-1].trainer)
        )

    def _try_temperatures(self) -> None:
        """Compares the engine's logprobs with the trainer's at several temperatures."""
        seen, loop, batch = self.seen, self.loop, self.seen.rollout_batch
        assert batch is not None
        part, stated = batch.part(0, min(NUM_SEQUENCES, batch.num_sequences)), self.facts.temperature
        with loop.phase(PHASE, on=loop.policy):
            seen.entropies = loop.policy.entropies(batch)
            seen.at_temperature = loop.policy.logprobs(part, temperature=stated)
            if not part.loss_mask.any():
                return
            tried = {stated, 1.0, *(stated * factor for factor in FACTORS)}
            gaps = {each: gap_of(part, loop.policy.logprobs(part, temperature=each)) for each in sorted(tried)}
        seen.gaps_by_temperature = {each: gap.mean_nats for each, gap in gaps.items() if gap}

    def _sample_again(self) -> None:
        """Samples responses to the same prompts twice with the same seeds, and then with other ones."""
        loop = self.loop
        usual = loop.rollout.setup.rollout.sampling()
        most = min(MAX_TOKENS, usual.max_tokens)
        sampling = replace(usual, max_tokens=most, min_tokens=min(most, usual.min_tokens))
        with loop.phase(PHASE, on=loop.rollout):
            sample = partial(self._attempts, sampling)
            self.seen.resampled = Resampled(first=sample(0), again=sample(0), others=sample(1))

    def _attempts(self, sampling: SamplingParams, again: int) -> list[list[int]]:
        """Returns the tokens after the prompt of each attempt.

        Args:
            again: part of the seeds.
        """
        size = min(NUM_ATTEMPTS, self.loop.algorithm.group_size)
        groups = self.loop.attempts.generate(
            list(self.prompts), group_size=size, step=self.settings.steps + 1, again=again, sampling=sampling
        )
        return responses_of(groups, size=size)

    def _test_sync(self) -> SyncSeen:
        """Changes the sign of every weight, syncs, and undoes it; then changes a bit in an engine."""
        sync, loop = SyncSeen(), self.loop
        before = self.seen.steps[-1].engines
        try:
            with loop.phase(PHASE, on=loop.policy):
                loop.policy.negate()
            try:
                with loop.phase(PHASE, on=loop.policy):
                    trainer = self.probe.trainer_nats(loop.policy)
                    if not self.facts.float32:
                        with flipped(loop.policy):
                            sync.rounding_nats = mean_difference(self.probe.trainer_nats(loop.policy), trainer)
                self._publish()
                engines = self._engines()
            finally:
                with loop.phase(PHASE, on=loop.policy):
                    loop.policy.negate()
            sync.moved_nats = min(mean_difference(*pair) for pair in zip(before, engines, strict=True))
            sync.gap_nats = max(mean_difference(each, trainer) for each in engines)
            self._publish()
            self._disturb(sync)
            self._publish()
            with loop.phase(PHASE, on=loop.rollout):
                loop.weight_sync.audit()
        except WeightSyncFailed as error:
            sync.refusal = str(error)
            return sync
        pairs = zip(before, self._engines(), strict=True)
        sync.returned_nats = max(size for pair in pairs for size in differences(*pair))
        return sync

    def _disturb(self, sync: SyncSeen) -> None:
        """Changes one bit in the memory of an engine, and notes what the audit says."""
        loop = self.loop
        call = RankCall.of(DestinationRank.disturb)
        with loop.phase(PHASE, on=loop.rollout):
            loop.weight_sync.audit()
            sync.disturbed = loop.rollout.on_ranks([call] * loop.rollout.engines().count(0), engines=[0])[0]
            try:
                loop.weight_sync.audit()
            except WeightSyncFailed as error:
                sync.noticed = str(error)

    def _publish(self) -> None:
        """Syncs the trainer's weights as the next version."""
        version = self.loop.weight_sync.policy_version
        assert version is not None, "calibrated"
        with self.loop.phase("weight_sync"):
            self.loop.weight_sync.publish(version=version + 1)


@dataclass(kw_only=True)
class OfflineProcedure(Procedure[OfflineLoop]):
    """Looks at the trainer alone."""

    def look(self, step: int) -> None:
        """See Procedure."""
        loop, trainer = self.loop, Nats()
        weights = self._digest()
        if self.has_logprobs:
            fixed = loop.examples.batch(loop.examples.first(max(loop.algorithm.smallest_step, loop.prompts_per_step)))
            with loop.phase(PHASE, on=loop.policy):
                nats = loop.policy.logprobs(fixed).split(fixed.lengths.tolist())
            trainer = [each[1:].tolist() for each in nats]
        self.seen.steps.append(
            StepSeen(step=step, metrics=self.noted.metrics, weights=weights, trainer=trainer, memory=self.memory())
        )

    def experiment(self) -> None:
        """See Procedure. There are no engines to experiment with."""


@contextmanager
def flipped(policy: PolicyGroup) -> Iterator[None]:
    """Changes the last bit of every weight of the policy while it is entered."""
    policy.flip_last_bits()
    try:
        yield
    finally:
        policy.flip_last_bits()


def responses_of(groups: Sequence[Group], *, size: int) -> list[list[int]]:
    """Returns the tokens after the prompt of each attempt, those of all of its sequences one after the other. None of
    an attempt that is left out of its group.

    Args:
        size: number of attempts at each prompt.
    """
    found: list[list[int]] = [[] for _ in range(size * len(groups))]
    for place, group in enumerate(groups):
        for each in group.rollouts:
            found[place * size + each.sample_index] += each.token_ids[len(each.prompt.input) :].tolist()
    return found


def twice(measure: Callable[[], Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Returns the metrics of two measurements."""
    one, other = measure(), measure()
    return {name: (value, other[name]) for name, value in one.items()}
