"""One attempt: turns between policy and environment until it is over, and then its rewards."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial

import numpy as np

from rlframe.attempts.account.ledger import DropReason
from rlframe.attempts.dialogue import Dialogue, Open
from rlframe.attempts.engines import names
from rlframe.attempts.sessions.calls import SessionFailed, Trouble
from rlframe.attempts.waits import Waits
from rlframe.environments.config import EnvironmentConfig, Verdict
from rlframe.rollout.base.seeds import request_seed
from rlframe.types.input import ModelInput
from rlframe.types.rollout import (
    Completion,
    FinishReason,
    GenerationRequest,
    Group,
    Rollout,
    SamplingParams,
    by_attempt,
)
from rlframe.types.wait import Wait

DONE = "done"
FORKED = "forked"
"""End of a sequence whose attempt goes on in a further one."""
ALONE_AFTER = 2
"""Number of processes that may end under an attempt before it gets one of its own: the next one to end says whether it
was this attempt's doing."""
ENVIRONMENT = -1
"""Stands for the index of the attempt in the seed of the environment, which all attempts of a group share."""


class WaitsFor(StrEnum):
    """The sides that may have the next word in an attempt."""

    ENGINE = "engine"
    ENVIRONMENT = "environment"
    """The response is whole."""
    REWARD = "reward"
    """The environment has ended the attempt."""


class Event(StrEnum):
    """Events of attempts that are counted, besides each Trouble."""

    RETRIED = "retried"
    """An attempt began again."""
    BEGUN_ANEW = "begun_anew"
    """A resumed attempt lost its responses, because its environment does not give the same answers twice."""
    TOO_MANY_TURNS = "too_many_turns"
    """`environment.max_turns` was reached."""
    NO_ROOM = "no_room"
    """The next response might have exceeded the greatest number of tokens."""
    FORKED = "forked"
    """An attempt went on in a further sequence, because the chat template rewrites its history."""
    CUT_OFF = "cut_off"
    """A response reached its limit, so that the environment was not asked."""
    CALLS_LOST = "calls_lost"
    """An agent did not wait for a response, which is in no sequence."""
    CALLS_REFUSED = "calls_refused"
    """A request of an agent was refused."""
    PARAMETERS_IGNORED = "parameters_ignored"
    """An agent wanted a response sampled otherwise than the run samples."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """The progress of one attempt."""

    turn: int = 0
    """Number of responses that the environment has answered."""
    begun: int = 0
    """Number of tokens of the present response that were sampled before it was interrupted. They are in the rollout."""
    waits_for: str = WaitsFor.ENGINE
    """A WaitsFor."""
    ended: str = ""
    """The end of the attempt: DONE, or a DropReason. Empty while it is under way."""
    retries: int = 0
    """Number of times that the attempt has begun again."""
    neighbours: int = 0
    """Number of processes that have ended under it on another session's account."""

    def begin_again(self) -> None:
        """Forgets all responses."""
        self.turn, self.begun, self.waits_for = 0, 0, WaitsFor.ENGINE


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A group to attempt."""

    group: Group
    """Attempts without any response, or with as much as `progress` says. Earlier sequences of attempts are among
    them."""
    progress: Sequence[Progress] = ()
    """Progress of each attempt. Empty if none has begun."""
    sampling: SamplingParams
    step: int
    """Part of the seeds."""
    epoch: int = 0
    """Part of the seeds: a step may have a prompt twice, at the end of an epoch and at the beginning of the next."""
    again: int = 0
    """Part of the seeds."""
    repeat: int = 0
    """Part of the seeds: number of times that the step has had the prompt in this epoch before."""
    aside: bool = False
    """Whether it begins only as long as such tasks are at most a share of what is under way."""
    counted: bool = True
    """Whether the events of its attempts are counted: not those of an evaluation, which are no part of a step."""

    def begun(self) -> "Task":
        """Returns the same task, whose lists change as its attempts go on."""
        progress = list(self.progress) or [Progress() for _ in self.group.rollouts]
        return replace(self, group=replace(self.group, rollouts=list(self.group.rollouts)), progress=progress)

    def pairs(self) -> list[tuple[Rollout, Progress]]:
        """Returns each rollout with its progress."""
        return list(zip(self.group.rollouts, self.progress, strict=True))

    def earlier(self, rollout: Rollout) -> list[Rollout]:
        """Returns the earlier sequences of an attempt."""
        if not rollout.sequence:
            return []
        return [
            each
            for each, progress in self.pairs()
            if progress.ended == FORKED and each.sample_index == rollout.sample_index
        ]

    def fork(self, rollout: Rollout, input: ModelInput) -> None:
        """Keeps the sequence of an attempt as an earlier one, and begins a further one."""
        assert isinstance(self.progress, list)
        self.group.rollouts.append(replace(rollout))
        self.progress.append(Progress(ended=FORKED))
        known = {name: getattr(rollout, name) for name in ("messages", "numbers", "records")}
        sequence, turns = rollout.sequence + 1, rollout.num_turns
        sampled = rollout.num_sampled_by_attempt
        rollout.restart(input)
        for name, value in known.items():
            setattr(rollout, name, value)
        rollout.sequence, rollout.first_turn, rollout.first_sampled = sequence, turns, sampled

    def unfork(self, rollout: Rollout) -> None:
        """Replaces the last sequence of an attempt, in which there is no response, by the one before."""
        before = self.earlier(rollout)[-1]
        for each in fields(Rollout):
            setattr(rollout, each.name, getattr(before, each.name))
        self._forget([before])

    def forget_earlier(self, rollout: Rollout) -> None:
        """Forgets the earlier sequences of an attempt, which begins again."""
        self._forget(
            [
                each
                for each, progress in self.pairs()
                if progress.ended == FORKED and each.sample_index == rollout.sample_index
            ]
        )

    def _forget(self, sequences: Sequence[Rollout]) -> None:
        assert isinstance(self.progress, list)
        gone = {id(each) for each in sequences}
        for place in reversed([place for place, each in enumerate(self.group.rollouts) if id(each) in gone]):
            del self.group.rollouts[place], self.progress[place]

    def finished(self) -> list[Rollout]:
        """Returns the last sequence of each attempt that became a rollout, in the order of sample indices."""
        done = [rollout for rollout, progress in self.pairs() if progress.ended == DONE]
        return sorted(done, key=lambda rollout: rollout.sample_index)

    def ends(self) -> dict[str, list[Rollout]]:
        """Returns the rollouts by the end of their attempts, in the order of sample indices and sequences. Earlier
        sequences get the reward of the last one."""
        pairs = self.pairs()
        ended = {rollout.sample_index: progress.ended for rollout, progress in pairs if progress.ended != FORKED}
        found: dict[str, list[Rollout]] = {}
        for sequences in by_attempt(rollout for rollout, _ in pairs):
            last = sequences[-1]
            for each in sequences[:-1]:
                each.take_rewards(last)
                each.records, each.ending = last.records, last.ending
            found.setdefault(ended[last.sample_index], []).extend(sequences)
        return found


async def leave(rollouts: Sequence[Rollout]) -> None:
    """Leaves rollouts as they are."""


Sample = Callable[[GenerationRequest], Awaitable[Completion]]
"""Returns a response of the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosted:
    """An attempt of an agent, which asks for responses by itself."""

    task: Task
    rollout: Rollout
    progress: Progress
    sample: Sample
    seed: Callable[[int], int]
    """Returns the seed of the response with this index, or with ENVIRONMENT the environment's."""
    most: int
    """Greatest number of tokens of a sequence."""
    count: Callable[[str], None]
    """Counts a Trouble or an Event."""


Host = Callable[[Hosted], Awaitable[Verdict]]
"""Lets an agent run to its end, and fills the sequences of its attempt.

Raises:
    SessionFailed: the agent failed.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """The functions that attempts use besides the engines."""

    decode: Callable[[list[int]], str]
    """Returns the text of tokens, special tokens left out."""
    open: Open
    """Begins the dialogue of an attempt with its environment."""
    score: Callable[[Rollout], Awaitable[None]]
    """Fills the rewards of a finished rollout, but those that compare it with others."""
    score_group: Callable[[Sequence[Rollout]], Awaitable[None]] = leave
    """Adds the rewards that compare the attempts of a group, each of which is one rollout, its last sequence."""
    host: Host | None = None
    """Runs agents, if sessions are such. There are no dialogues then."""
    waits: Callable[[], list[Wait]] = list
    """Returns what attempts wait for in `score`, `score_group` and `host`."""


class Turns:
    """Runs single attempts."""

    def __init__(self, sides: Sides, config: EnvironmentConfig, *, run_seed: int, max_positions: int):
        """
        Args:
            max_positions: greatest number of tokens of a sequence that engine and trainer take.
        """
        self._sides, self._config, self._run_seed = sides, config, run_seed
        self._most = min(max_positions, config.max_tokens or max_positions)
        self.events: Counter[str] = Counter()
        """Number of each Trouble and each Event since they were last looked at."""
        self.last_failure: SessionFailed | None = None
        self._names = names()
        self._waits = Waits()
        """Attempts that wait in a dialogue."""

    @property
    def num_answers(self) -> int:
        """The number of answers of environments so far."""
        return self._waits.num_ended

    def waits(self) -> list[Wait]:
        """Returns what attempts wait for, besides engines."""
        limit = f"a turn may take {self._config.step_timeout_s:g} s: environment.step_timeout_s"
        return [*self._waits.told(f"the environment {self._config.name}", limit), *self._sides.waits()]

    async def run(self, task: Task, rollout: Rollout, progress: Progress, sample: Sample) -> str:
        """Runs an attempt to its end. Returns DONE, or the DropReason with which it is left out."""
        while True:
            reason = DropReason.MASKED
            try:
                if progress.waits_for == WaitsFor.REWARD:
                    verdict = Verdict.TRAIN
                elif self._sides.host:
                    verdict = await self._sides.host(self._hosted(task, rollout, progress, sample))
                else:
                    verdict = await self._converse(task, rollout, progress, sample)
            except SessionFailed as failure:
                verdict, reason = self._after(task, failure, progress), DropReason.FAILED
                if verdict is Verdict.TRAIN and progress.waits_for == WaitsFor.ENGINE:
                    self._to_last_response(task, rollout, progress)
                rollout.ending = str(failure.trouble)
                if rollout.num_turns > len(rollout.records):
                    failure.answer.note(rollout, trouble=str(failure.trouble))
            if verdict is Verdict.RETRY and progress.retries < self._config.max_retries + progress.neighbours:
                progress.retries += 1
                self._count(task, Event.RETRIED)
                progress.begin_again()
                task.forget_earlier(rollout)
                rollout.restart(rollout.prompt.input)
                continue
            if verdict is Verdict.TRAIN and (rollout.loss_mask.any() or rollout.sequence):
                progress.waits_for = WaitsFor.REWARD
                await self._sides.score(rollout)
                return DONE
            return reason

    def _to_last_response(self, task: Task, rollout: Rollout, progress: Progress) -> None:
        """Leaves an attempt, which is judged, as it was when its last whole response had ended: half a response, of an
        interrupted attempt, is none."""
        half = rollout.num_tokens - progress.begun
        progress.begun = 0
        whole = [end for _, end in rollout.turns if end <= half]
        if not whole and rollout.sequence:
            task.unfork(rollout)
            return
        rollout.cut(whole[-1] if whole else half)
        if whole and rollout.records:
            rollout.finish_reason = FinishReason(rollout.records[-1].finish_reason)
            start, end = rollout.turns[-1]
            rollout.text = self._sides.decode(rollout.token_ids[start:end].tolist())

    def _after(self, task: Task, failure: SessionFailed, progress: Progress) -> Verdict:
        """Returns what becomes of an attempt whose environment has failed."""
        self._count(task, failure.trouble)
        if failure.trouble is not Trouble.NEIGHBOUR:
            self.last_failure = failure
            return self._config.on_failure
        progress.neighbours += 1
        return Verdict.RETRY

    async def _converse(self, task: Task, rollout: Rollout, progress: Progress, sample: Sample) -> Verdict:
        """Takes turns until the attempt is over."""
        with self._waits.one():
            dialogue = await self._sides.open(
                rollout,
                earlier=task.earlier(rollout),
                answered=progress.turn,
                seed=self._seed(task, rollout.prompt.id, ENVIRONMENT, 0),
                alone=progress.neighbours >= ALONE_AFTER,
            )
        had_begun = progress.turn or progress.begun or progress.waits_for == WaitsFor.ENVIRONMENT
        if had_begun and not (rollout.loss_mask.any() or rollout.sequence):
            self._begin_anew(task, rollout, progress)
        try:
            verdict = None
            while verdict is None:
                if progress.waits_for == WaitsFor.ENGINE:
                    verdict = await self._sample(task, rollout, progress, sample)
                else:
                    verdict = await self._respond(task, rollout, progress, dialogue)
        finally:
            dialogue.abandon()
        return verdict

    def _hosted(self, task: Task, rollout: Rollout, progress: Progress, sample: Sample) -> Hosted:
        """Returns what the host of an agent needs. An agent always begins anew."""
        if progress.turn:
            self._begin_anew(task, rollout, progress)
            rollout.restart(rollout.prompt.input)

        def seed(turn: int) -> int:
            index, turn = (ENVIRONMENT, 0) if turn == ENVIRONMENT else (rollout.sample_index, turn)
            return self._seed(task, rollout.prompt.id, index, turn)

        count = partial(self._count, task)
        return Hosted(
            task=task, rollout=rollout, progress=progress, sample=sample, seed=seed, most=self._most, count=count
        )

    def _count(self, task: Task, event: str) -> None:
        if task.counted:
            self.events[event] += 1

    def _begin_anew(self, task: Task, rollout: Rollout, progress: Progress) -> None:
        self._count(task, Event.BEGUN_ANEW)
        progress.begin_again()
        task.forget_earlier(rollout)

    async def _sample(self, task: Task, rollout: Rollout, progress: Progress, sample: Sample) -> Verdict | None:
        """Appends a response of the policy, or what it had when it was aborted."""
        if rollout.messages and not progress.begun and rollout.num_tokens + task.sampling.max_tokens > self._most:
            return self._limit(task, rollout, Event.NO_ROOM)
        request = GenerationRequest(
            input=rollout.input,
            sampling=task.sampling,
            first_position=progress.begun,
            name=next(self._names),
            seed=self._seed(task, rollout.prompt.id, rollout.sample_index, progress.turn),
        )
        completion = await sample(request)
        rollout.append(completion)
        progress.begun += len(completion.token_ids)
        rollout.text = self._sides.decode(rollout.token_ids[rollout.num_tokens - progress.begun :].tolist())
        if completion.finish_reason is not FinishReason.ABORT:
            progress.begun, progress.waits_for = 0, WaitsFor.ENVIRONMENT
        return None

    async def _respond(self, task: Task, rollout: Rollout, progress: Progress, dialogue: Dialogue) -> Verdict | None:
        """Appends what the environment answers."""
        with self._waits.one():
            answer = await dialogue.respond(rollout)
            try:
                if answer.verdict:
                    await dialogue.close()
            except SessionFailed as failure:
                failure.answer = answer
                raise
        # Nothing waits from here on, so that an interrupted attempt has either the whole answer or nothing of it.
        answer.note(rollout)
        if answer.cut_off:
            return self._limit(task, rollout, Event.CUT_OFF)
        if answer.verdict:
            rollout.ending = DONE
            return answer.verdict
        if progress.turn + 1 >= self._config.max_turns:
            return self._limit(task, rollout, Event.TOO_MANY_TURNS)
        before = 0 if answer.begins_anew else rollout.num_tokens
        if before + len(answer.token_ids) + task.sampling.max_tokens > self._most:
            return self._limit(task, rollout, Event.NO_ROOM)
        if answer.begins_anew:
            self._count(task, Event.FORKED)
            task.fork(rollout, ModelInput(np.array(answer.token_ids)))
        else:
            rollout.observe(answer.token_ids)
        progress.turn, progress.waits_for = progress.turn + 1, WaitsFor.ENGINE
        return None

    def _limit(self, task: Task, rollout: Rollout, event: Event) -> Verdict:
        """Ends an attempt at a limit, like one that reached max_tokens."""
        self._count(task, event)
        rollout.finish_reason, rollout.ending = FinishReason.LENGTH, str(event)
        return self._config.on_limit

    def _seed(self, task: Task, prompt_id: str, sample_index: int, turn: int) -> int:
        return request_seed(
            run_seed=self._run_seed,
            prompt_id=prompt_id,
            sample_index=sample_index,
            step=task.step,
            epoch=task.epoch,
            again=task.again,
            repeat=task.repeat,
            turn=turn,
        )
