"""BufferedSampler: takes the groups of a step from a buffer, which attempts fill."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig, Flat, flat
from rlframe.attempts.account.leases import Lease
from rlframe.attempts.account.ledger import DropReason
from rlframe.attempts.account.stored import read_groups, write_groups
from rlframe.attempts.buffer import Buffer, Finished, LeftOut, main_reason
from rlframe.attempts.mending import Mender
from rlframe.attempts.runner import Ended, Load
from rlframe.attempts.turns import Progress
from rlframe.cluster.watch.activities import learn
from rlframe.loops.reporting.metrics import mean_of, scored
from rlframe.loops.reporting.timeline import Timeline
from rlframe.loops.sampling.base import REPLACEMENT_ROUNDS, Sampler, sizes
from rlframe.rollout.base.config import OversampleRest
from rlframe.types.rollout import OFFLINE_VERSION, Group, Rollout, attempts_in, by_attempt
from rlframe.utils.errors import RlframeError
from rlframe.utils.files.sealed import read_sealed, write_sealed

LEASES, GROUPS = "leases.json", "groups"
"""Names of the files of leases in flight."""


@dataclass(kw_only=True, slots=True)
class Counts:
    """The numbers of what a step has sampled and dropped."""

    rounds: int = 0
    """Number of times that attempts were begun."""
    leased: int = 0
    """Number of prompts whose attempts were begun."""
    sampled: int = 0
    """Number of sequences that were sampled."""
    rewards: list[float] = field(default_factory=list)
    """The reward of each attempt among them that was scored."""
    dropped: dict[Flat, int] = field(default_factory=lambda: dict.fromkeys(Flat, 0))
    left_over: int = 0
    dropped_tokens: int = 0
    """Number of sampled tokens of the groups that were dropped."""
    untrained: list[tuple[int, int]] = field(default_factory=list)
    """See `GroupSource.untrained`."""
    unsuccessful: int = 0
    """Number of groups none of whose attempts, or only one, became a rollout."""
    oversampled: int = 0
    """Number of groups that were thrown away because the step had enough without them."""
    carried: int = 0
    """Number of groups that were not finished and go on in the next step."""
    carried_tokens: int = 0
    """Number of tokens that were sampled for those."""


@dataclass(kw_only=True)
class BufferedSampler(Sampler):
    """Takes the groups of a step from a buffer, which attempts fill. With a lag of 0 they are those of the step itself.

    With oversampling the step takes the first groups that are done. The engines are then interrupted, because they take
    turns with the policy, and the other groups are carried over or dropped.

    Groups that cannot teach anything are dropped and replaced: with dynamic sampling those whose rewards are all equal,
    always those without successful attempts. With a lag of 0 this happens in rounds, each of as many prompts as are
    missing, so that what is sampled does not depend on what is finished first. Dropped prompts are consumed: they
    return in the next epoch.
    """

    buffer: Buffer
    last_step: int
    """The last step of the run, for which nothing is sampled ahead."""
    dynamic: DynamicSamplingConfig | None = None
    mender: Mender | None = None
    """Looks after the engines from `collect` until the next sync. None if dead ones wait for it."""
    num_minibatches: int = 1
    """Number of groups of which a batch that does not get full keeps a multiple."""
    timeline: Timeline | None = None
    """Notes how busy each engine was. None if nothing does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._counts = Counts()
        self._next = Counts()
        """Numbers of what was judged for a checkpoint, which belong to the next step."""
        self._ended: dict[int, Ended] = {}
        """Groups that were received and not judged yet, by ordinal."""
        self._lags: list[int] = []
        self._begun_s: dict[int, float] = {}
        """Time at which the attempts of each open lease began."""
        self._load: Load | None = None
        """Load of the engines at the last look."""

    @property
    def in_flight(self) -> bool:
        """Returns whether groups are under way between steps."""
        return self.buffer.max_policy_lag > 0

    @property
    def untrained(self) -> Sequence[tuple[int, int]]:
        """See GroupSource."""
        return self._counts.untrained

    @property
    def _one_by_one(self) -> bool:
        """Returns whether groups are received, judged and replaced as they are done. Otherwise they are in rounds."""
        return self.in_flight or self.buffer.oversamples

    def collect(self, step: int) -> list[Group]:
        """Returns P groups, or fewer after all rounds of sampling.

        Raises:
            RlframeError: too few groups for an optimizer step, after all rounds.
        """
        self._counts, self._next, version = self._next, Counts(), step - 1
        while True:
            with self.phase("rollout", on=self.attempts.rollout):
                self.attempts.resume()
                self._fill(step)
                with self.attempts.waiting():
                    while not self._is_ready(version):
                        self._receive(self.attempts.next())
                        self._fill(step)
                begun = self._interrupt() if self.buffer.oversamples else {}
                self.attempts.audit()
            self._judge()
            taken = self.buffer.take(version)
            if taken is None and not (self._has_left(step) or self.buffer.unfinished):
                taken = self._what_there_is(step)
            if taken is not None:
                break
        self._leave(begun)
        self._taken = taken
        for each in taken:
            self._counts.untrained += sizes(chain(*each.lost.values()))
        begun_s = [self._begun_s.pop(each.lease.ordinal) for each in taken]
        if self.in_flight:
            # Their next wait may be for all of such a time, however short this one was.
            learn(time.monotonic() - min(begun_s), phase="rollout", role=self.attempts.rollout.role, name="generate")
        self._lags = [lag for each in taken for lag in lags(each, version)]
        assert max(self._lags, default=0) <= self.buffer.max_policy_lag, "admission keeps the lag"
        if self.mender:
            self.mender.begin()
        return [each.group for each in taken]

    def settle(self, step: int) -> None:
        """See Sampler."""
        super().settle(step)
        self.buffer.settle()

    def reset(self) -> None:
        """See Sampler."""
        if self.mender:
            self.mender.forget()
        super().reset()
        if self.buffer.open:
            self.attempts.cancel()
        self._next = Counts()
        self._ended.clear()
        self._begun_s.clear()
        self.buffer.clear()

    def hold(self, step: int) -> Callable[[Path], None]:
        """See Sampler."""
        self._counts = self._next
        with self.attempts.interrupted() as (tasks, ended):
            self._receive(ended)
            self._judge()
        self.leases.ledger.write(step)
        unfinished = {int(task.group.id): task for task in tasks}
        finished = {each.lease.ordinal: each for each in self.buffer.waiting}
        described, groups = [], []
        for lease in self.buffer.open:
            progress, lost = None, {}
            if done := finished.get(lease.ordinal):
                groups.append(replace(done.group, rollouts=[*done.group.rollouts, *chain(*done.lost.values())]))
                lost = {reason: len(attempts) for reason, attempts in done.lost.items()}
            else:
                task = unfinished[lease.ordinal]
                groups.append(task.group)
                progress = [asdict(each) for each in task.progress]
            described.append({**lease.description(), "progress": progress, "lost": lost})
        held = {"leases": described, "judged": asdict(self._next), "events": self.attempts.events}

        def write(folder: Path) -> None:
            write_sealed(folder / LEASES, held)
            write_groups(folder / GROUPS, groups)

        return write

    def go_on(self, folder: Path) -> None:
        """See Sampler."""
        if not (folder / LEASES).exists():
            return
        groups = {group.id: group for group in read_groups(folder / GROUPS)}
        tasks, held = [], read_sealed(folder / LEASES)
        # Older checkpoints do not say.
        self._next = Counts(**held.get("judged", {}))
        self.attempts.recall(held.get("events", {}))
        for described in held["leases"]:
            progress, lost = described.pop("progress"), described.pop("lost")
            group = groups[str(described["ordinal"])]
            lease = Lease(prompt=group.prompt, **described)
            self.buffer.add(lease)
            self._begun_s[lease.ordinal] = time.monotonic()
            if progress is None:
                self.buffer.put(lease.ordinal, *divided(group, lost))
                continue
            begun = tuple(Progress(**each) for each in progress)
            tasks.append(replace(self._task(lease, group), progress=begun))
        if self.buffer.oversamples:
            # The engines may have to sleep before they sample.
            self.attempts.pause()
        self.attempts.start(tasks)

    def _interrupt(self) -> dict[int, Group]:
        """Leaves the engines without requests. Returns the unfinished groups as far as they have come, by ordinal."""
        tasks, ended = self.attempts.pause()
        self._receive(ended)
        return {int(task.group.id): task.group for task in tasks}

    def _leave(self, begun: Mapping[int, Group]) -> None:
        """Carries the groups over that the step did not take, or drops them, with oversampling.

        Args:
            begun: the unfinished ones.
        """
        if self.buffer.rest is OversampleRest.CARRY:
            self._counts.carried = len(begun)
            for ordinal, group in begun.items():
                self._counts.carried_tokens += sum(each.num_sampled_tokens for each in group.rollouts)
                self.leases.ledger.carried(ordinal, group.rollouts)
        elif self.buffer.rest is OversampleRest.DROP:
            self.attempts.cancel()
            rest = {ordinal: group.rollouts for ordinal, group in begun.items()}
            rest |= {
                each.lease.ordinal: [*each.group.rollouts, *chain(*each.lost.values())] for each in self.buffer.waiting
            }
            self._counts.oversampled = len(rest)
            for ordinal, attempts in rest.items():
                self._drop(ordinal, DropReason.OVERSAMPLED, attempts)

    def _has_left(self, step: int) -> bool:
        """Returns whether more may be sampled in this step."""
        most = self.dynamic.max_rounds if self.dynamic else REPLACEMENT_ROUNDS
        # Groups that are replaced one by one, as they end, make no rounds: as many prompts may be sampled.
        return (self._counts.leased < most * self._per_round) if self._one_by_one else self._counts.rounds < most

    @property
    def _per_round(self) -> int:
        """The number of prompts that are as many as a round of sampling begins with."""
        return self.buffer.limit if self.buffer.oversamples else self.prompts_per_step

    @property
    def _rounds(self) -> int:
        """The number of rounds that the step took. Of groups that are replaced one by one, the rounds that begin as
        many."""
        return -(-self._counts.leased // self._per_round) if self._one_by_one else self._counts.rounds

    def _fill(self, step: int) -> None:
        """Opens as many leases as there is room for, and begins their attempts."""
        if (self.buffer.unfinished and not self._one_by_one) or not self._has_left(step):
            return
        count = self.buffer.room
        if self.buffer.rest is not OversampleRest.DROP:
            count = min(count, self.prompts_per_step * (self.last_step - step + 1) - len(self.buffer.open))
        if count <= 0:
            return
        leases = self._lease(count, step)
        self._counts.rounds += 1
        self._counts.leased += count
        tasks = []
        for lease in leases:
            self.buffer.add(lease)
            self._begun_s[lease.ordinal] = time.monotonic()
            tasks.append(self._task(lease, lease.begin(self.group_size)))
        self.attempts.start(tasks)

    def _lease(self, count: int, step: int) -> list[Lease]:
        if not self._one_by_one:
            return self.leases.take(count, step=step, again=self._counts.rounds, version=step - 1)
        leases: list[Lease] = []
        for place in range(len(self.buffer.open), len(self.buffer.open) + count):
            ahead = 0 if self.buffer.rest is OversampleRest.DROP else place // self.prompts_per_step
            # What is sampled ahead depends on the lease, not on when it happens to begin.
            own = self.leases.num_taken // self.prompts_per_step + 1
            leases += self.leases.take(1, step=own, version=step - 1, trained_at=step + ahead)
        return leases

    def _is_ready(self, version: int) -> bool:
        """Returns whether there is no reason to wait for further groups."""
        return not self.buffer.unfinished or (self._one_by_one and self.buffer.is_ready(version))

    def _receive(self, ended: Iterable[Ended]) -> None:
        for each in ended:
            ordinal = int(each.group.id)
            self.buffer.put(ordinal, each.group, each.lost)
            self._ended[ordinal] = each
        if self._one_by_one and not self.scorer:
            self._judge()

    def _judge(self) -> None:
        """Scores the groups that were received, in the order of their leases, and drops those that teach nothing."""
        received, self._ended = sorted(self._ended.items()), {}
        if received:
            self.score([each.group for _, each in received])
        for ordinal, each in received:
            rollouts = each.group.rollouts
            self._counts.sampled += len(rollouts)
            self._counts.rewards += scored(attempts_in(rollouts))
            self.leases.measure(self.buffer.lease(ordinal), rollouts)
            if len(by_attempt(rollouts)) < min(2, self.group_size):
                self._counts.unsuccessful += 1
                self._drop(ordinal, main_reason(each.lost), [*rollouts, *chain(*each.lost.values())])
            elif self.dynamic and (reason := flat(rollouts, self.dynamic.reward_part)):
                self._counts.dropped[reason] += 1
                self._drop(ordinal, DropReason(f"flat_{reason}"), [*rollouts, *chain(*each.lost.values())])

    def _what_there_is(self, step: int) -> list[Finished]:
        """Returns the finished groups in whole minibatches, after all rounds. Drops those that are left over and would
        become too old."""
        ordinals = sorted(each.lease.ordinal for each in self.buffer.waiting)
        whole = len(ordinals) // self.num_minibatches * self.num_minibatches
        if not whole:
            raise RlframeError(self._exhausted(step))
        taken = self.buffer.release(ordinals[:whole])
        for each in self.buffer.waiting:
            if each.lease.version + self.buffer.max_policy_lag < step:
                self._counts.left_over += 1
                attempts = [*each.group.rollouts, *chain(*each.lost.values())]
                self._drop(each.lease.ordinal, DropReason.LEFT_OVER, attempts)
        return taken

    def _drop(self, ordinal: int, reason: DropReason, attempts: list[Rollout]) -> None:
        self.buffer.drop(ordinal)
        del self._begun_s[ordinal]
        self._counts.dropped_tokens += sum(each.num_sampled_tokens for each in attempts)
        self._counts.untrained += sizes(attempts)
        self.leases.ledger.dropped(ordinal, reason, attempts)

    def _exhausted(self, step: int) -> str:
        if self.dynamic is None:
            return (
                f"step {step}: too few groups had two successful attempts, in {self._rounds} rounds of "
                "sampling; the warnings above say why attempts failed. Mend the environment, or raise "
                "rollout.attempt_timeout_s"
            )
        counts = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in self._counts.dropped.items())
        return (
            f"step {step}: fewer than the {self.num_minibatches} groups that an update needs had "
            f"different rewards, in {self._rounds} rounds (algorithm.dynamic_sampling.max_rounds); groups with "
            f"equal rewards: {counts}. Use prompts that are neither too easy nor too hard, larger groups "
            "or a higher rollout.temperature"
        )

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of kept and dropped groups, and the lag of the tokens."""
        counts = self._counts
        metrics: dict[str, float] = {}
        if self.dynamic:
            metrics |= {
                "rollout/rounds": float(self._rounds),
                "rollout/sampled": float(counts.sampled),
                **({"reward/sampled_mean": mean_of(counts.rewards)} if counts.rewards else {}),
                **{f"rollout/dropped_{reason}_groups": float(count) for reason, count in counts.dropped.items()},
            }
        if self.dynamic or self.in_flight or self.buffer.rest is OversampleRest.DROP or counts.dropped_tokens:
            metrics["rollout/dropped_tokens"] = float(counts.dropped_tokens)
        if self.dynamic or counts.left_over:
            metrics["rollout/dropped_left_over_groups"] = float(counts.left_over)
        if counts.unsuccessful:
            metrics["rollout/dropped_unsuccessful_groups"] = float(counts.unsuccessful)
        if self.buffer.rest is OversampleRest.DROP:
            metrics["rollout/dropped_oversampled_groups"] = float(counts.oversampled)
        elif self.buffer.rest is OversampleRest.CARRY:
            metrics["rollout/carried_groups"] = float(counts.carried)
            metrics["rollout/carried_tokens"] = float(counts.carried_tokens)
        if self.in_flight:
            metrics |= {
                "rollout/lag_mean": sum(self._lags) / len(self._lags),
                "rollout/lag_max": float(max(self._lags)),
                "rollout/waiting_groups": float(len(self.buffer.waiting)),
                "rollout/open_groups": float(len(self.buffer.open)),
            }
            metrics |= self._in_flight_metrics()
        return metrics

    def _in_flight_metrics(self) -> dict[str, float]:
        """Returns metrics of the attempts under way."""
        state = self.attempts.state()
        metrics = {f"rollout/attempts_at_{side}": float(count) for side, count in state.attempts.items()}
        metrics["rollout/oldest_attempt_s"] = state.oldest_s
        before, self._load = self._load, state
        if self.timeline and before and before.now_s < state.now_s and state.goes_on_from(before):
            busy_s = [now - then for now, then in zip(state.busy_s, before.busy_s, strict=True)]
            self.timeline.engines_sampled(state.now_s - before.now_s, busy_s)
        return metrics


def divided(group: Group, lost: Mapping[str, int]) -> tuple[Group, LeftOut]:
    """Returns a group without those of its attempts that were left out, and those.

    Args:
        lost: number of attempts left out, by reason, which are the last ones in that order.
    """
    rollouts = iter(group.rollouts)
    kept = list(islice(rollouts, len(group.rollouts) - sum(lost.values())))
    return replace(group, rollouts=kept), {
        DropReason(reason): list(islice(rollouts, count)) for reason, count in lost.items()
    }


def lags(finished: Finished, version: int) -> list[int]:
    """Returns by sampled token how many versions older than `version` the policy was that sampled it."""
    found: list[int] = []
    for rollout in finished.group.rollouts:
        sampled = rollout.versions[rollout.loss_mask & (rollout.versions != OFFLINE_VERSION)]
        found += (version - sampled).tolist()
    return found
