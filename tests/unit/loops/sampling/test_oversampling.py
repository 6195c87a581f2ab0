"""Oversampling: the step ends with the first groups that are done, and what becomes of the others is counted."""

import asyncio
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlframe.attempts.account.leases import Leases
from rlframe.attempts.account.ledger import Ledger, read_ledger
from rlframe.attempts.buffer import Buffer, oversampled
from rlframe.data.cursor import Cursor
from rlframe.data.ordered import Stages
from rlframe.loops.sampling.buffered import BufferedSampler
from rlframe.rollout.base.config import OversampleRest
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Rollout
from tests.local_attempts import LocalAttempts

PROMPTS = [Prompt(id=f"p{index}", text="", input=ModelInput((index,))) for index in range(12)]
WHOLE = [7, 8, 9]
"""The response to every prompt."""


class Engines:
    """As many engines as groups, so that each group has one. Slow prompts have a token when they are interrupted."""

    def __init__(self, count: int, *slow: str):
        self.slow = set(slow)
        self.asked: list[tuple[str, int]] = []
        """Prompt and first position of each request."""
        self._interrupted = asyncio.Event()
        self.attempts = LocalAttempts([self._ask] * count, lambda rollout: setattr(rollout, "reward", 1.0))
        self.attempts.rollout.abort = self._interrupted.set

    async def _ask(self, requests: list[GenerationRequest]) -> list[Completion]:
        (prompt,) = {f"p{request.input.token_ids[0]}" for request in requests}
        self.asked += [(prompt, request.first_position) for request in requests]
        if prompt in self.slow:
            self._interrupted.clear()
            await self._interrupted.wait()
        return [self._completion(request, whole=prompt not in self.slow) for request in requests]

    def _completion(self, request: GenerationRequest, *, whole: bool) -> Completion:
        first = request.first_position
        tokens = WHOLE[first:] if whole else WHOLE[first : first + 1]
        return Completion(
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            versions=[self.attempts.rollout.version] * len(tokens),
            finish_reason=FinishReason.STOP if whole else FinishReason.ABORT,
        )


def sampler(
    engines: Engines, *, rest: OversampleRest, prompts_per_step: int, oversample: float, last_step: int = 100
) -> BufferedSampler:
    """A sampler of groups of two, with a lag of 1 if it carries groups over."""
    ids, tokens = [prompt.id for prompt in PROMPTS], [prompt.input.token_ids for prompt in PROMPTS]
    cursor: Any = Cursor(PROMPTS, ids=ids, tokens=tokens, seed=0, shuffle=False)
    return BufferedSampler(
        leases=Leases(cursor, Ledger(Path(tempfile.mkdtemp()))),
        attempts=engines.attempts,
        scorer=None,
        phase=lambda name, on=None: nullcontext(),  # type: ignore[arg-type]
        prompts_per_step=prompts_per_step,
        group_size=2,
        buffer=Buffer(
            prompts_per_step=prompts_per_step,
            max_policy_lag=int(rest is OversampleRest.CARRY),
            pipeline_depth=1,
            oversample=oversample,
            rest=rest,
        ),
        last_step=last_step,
    )


def collected(made: BufferedSampler, step: int) -> list[str]:
    """The prompts of the groups of a step, which is then trained on."""
    made.attempts.rollout.version = step - 1
    groups = made.collect(step)
    made.settle(step)
    return [group.prompt.id for group in groups]


class InStages:
    """A curriculum whose prompts are of stage a until step 2, then of stage b."""

    last_epoch = 0

    def __init__(self) -> None:
        streams = {
            name: Cursor(own, ids=[one.id for one in own], tokens=[[0]] * 6, seed=0, shuffle=False)
            for name, own in (("a", PROMPTS[:6]), ("b", PROMPTS[6:]))
        }
        self._stages = Stages(streams, firsts={"a": 1, "b": 3})
        self.reach, self.next = self._stages.reach, self._stages.next

    def passes_over(self, prompt: Prompt) -> bool:
        return False

    def measure(self, prompt: Prompt, rollouts: list[Rollout]) -> None: ...

    def metrics(self, step: int) -> dict[str, float]:
        return {}


@pytest.mark.parametrize("rest", OversampleRest)
def test_a_stage_begins_at_its_step_however_many_groups_are_begun(rest: OversampleRest) -> None:
    made = sampler(Engines(4), rest=rest, prompts_per_step=2, oversample=2.0)
    made.leases.prompts = made.leases.curriculum = InStages()  # type: ignore[assignment]
    early = {prompt.id for prompt in PROMPTS[:6]}
    assert [set(collected(made, step)) <= early for step in (1, 2, 3, 4)] == [True, True, False, False]
    made.reset()


def events(made: BufferedSampler) -> list[tuple[Any, ...]]:
    """What the ledger says of ends, and of groups that are carried over."""
    said = read_ledger(made.leases.ledger.file.parent).events
    return [
        (each.step, each.lease, getattr(each, "reason", each.event), each.tokens)
        for each in said
        if each.event != "leased"
    ]


@pytest.mark.parametrize(
    ("prompts", "factor", "begun"), [(10, 1.1, 11), (3, 1.5, 5), (4, 1.5, 6), (1, 1.01, 2), (7, 1.0, 7)]
)
def test_as_many_are_begun_as_the_factor_says_in_whole_groups(prompts: int, factor: float, begun: int) -> None:
    assert oversampled(prompts, factor) == begun
    buffer = Buffer(prompts_per_step=prompts, max_policy_lag=0, pipeline_depth=1, oversample=factor)
    assert buffer.room == begun


def test_a_group_that_is_carried_over_goes_on_where_it_was() -> None:
    engines = Engines(3, "p1")
    made = sampler(engines, rest=OversampleRest.CARRY, prompts_per_step=2, oversample=1.5)
    assert collected(made, 1) == ["p0", "p2"]
    assert events(made) == [(1, 1, "carried", 2), (1, 0, "trained", [3, 3]), (1, 2, "trained", [3, 3])]
    metrics = made.metrics()
    assert (metrics["rollout/carried_groups"], metrics["rollout/carried_tokens"]) == (1.0, 2.0)
    assert engines.attempts.state().attempts["engine"] == 2 and len(engines.asked) == 6, "nothing runs between steps"
    engines.slow.clear()
    made.attempts.rollout.version = 1
    group = made.collect(2)[0]
    made.settle(2)
    assert group.prompt.id == "p1" and engines.asked[6:8] == [("p1", 1), ("p1", 1)]
    for rollout in group.rollouts:
        assert rollout.token_ids.tolist() == [1, *WHOLE] and rollout.versions.tolist() == [-1, 0, 1, 1]
    # Of 12 tokens of two groups two are one version behind.
    assert made.metrics()["rollout/lag_mean"] == pytest.approx(2 / 12) and made.metrics()["rollout/lag_max"] == 1
    assert made.metrics()["rollout/carried_groups"] == 0


def test_a_group_that_is_dropped_is_counted_with_what_it_had() -> None:
    engines = Engines(3, "p1")
    made = sampler(engines, rest=OversampleRest.DROP, prompts_per_step=2, oversample=1.5)
    assert collected(made, 1) == ["p0", "p2"] and not made.in_flight
    assert events(made) == [(1, 1, "oversampled", 2), (1, 0, "trained", [3, 3]), (1, 2, "trained", [3, 3])]
    assert made.metrics() == {"rollout/dropped_oversampled_groups": 1.0, "rollout/dropped_tokens": 2.0}
    assert made.buffer.open == [] and sum(engines.attempts.state().attempts.values()) == 0
    # It is consumed, and what is done but one too many is dropped too.
    engines.slow.clear()
    assert collected(made, 2) == ["p3", "p4"]
    assert events(made)[3] == (2, 5, "oversampled", 6)


def test_a_step_waits_for_a_group_that_would_become_too_old() -> None:
    engines = Engines(2, "p0")
    made = sampler(engines, rest=OversampleRest.CARRY, prompts_per_step=1, oversample=2.0)
    assert collected(made, 1) == ["p1"]
    engines.slow.clear()
    # p2 is done at once too, but p0 was begun at version 0, and may not be trained on at version 2.
    assert collected(made, 2) == ["p0"] and collected(made, 3) == ["p2"]


def test_the_last_step_begins_no_more_than_it_trains_on() -> None:
    engines = Engines(3, "p1")
    made = sampler(engines, rest=OversampleRest.CARRY, prompts_per_step=2, oversample=1.5, last_step=2)
    assert collected(made, 1) == ["p0", "p2"]
    engines.slow.clear()
    assert collected(made, 2) == ["p1", "p3"]
    assert made.leases.num_taken == 4 and made.buffer.open == []
