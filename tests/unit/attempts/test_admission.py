"""Admission: how many attempts of an evaluation run beside those of training."""

import asyncio

import pytest

from rlframe.attempts.admission import Admission
from rlframe.attempts.runner import News, Runner
from rlframe.attempts.turns import Sides, Task
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, SamplingParams
from tests.local_attempts import opening
from tests.unit.attempts.simulated.clock import simulated


@pytest.mark.parametrize(
    ("share", "others", "begin"),
    # 2 of 8, 6 of 12, 9 of 10, all; and one in any case; all where nothing else is under way.
    [(0.25, 6, 2), (0.5, 6, 6), (0.9, 1, 9), (1.0, 1, 10), (0.05, 6, 1), (0.01, 0, 10)],
)
def test_work_beside_other_work_is_a_share_of_what_is_under_way(share: float, others: int, begin: int) -> None:
    admission = Admission[int](share)
    admission.begin(others)
    for number in range(10):
        admission.wait(number, size=1)
    assert admission.admitted() == list(range(begin)) and admission.admitted() == []


def test_work_begins_when_other_work_of_its_kind_has_ended() -> None:
    admission = Admission[str](0.25)
    admission.begin(6)
    for name in "abcd":
        admission.wait(name, size=1)
    assert admission.admitted() == ["a", "b"]
    admission.end(aside=False)
    assert admission.admitted() == []
    admission.end(aside=True)
    # 2 of 7 are too many, but one may always begin.
    assert admission.admitted() == []
    admission.end(aside=True)
    assert admission.admitted() == ["c"]
    admission.lift()
    assert admission.admitted() == ["d"]
    # For what comes later the limit is there again.
    admission.wait("e", size=1)
    assert admission.admitted() == []


def test_the_runner_begins_tasks_aside_as_they_are_admitted() -> None:
    asked: list[str] = []
    gates = {name: asyncio.Event() for name in ("training", "aside")}

    async def ask(requests: list[GenerationRequest]) -> list[Completion]:
        (request,) = requests
        kind = "aside" if request.input.token_ids[0] else "training"
        asked.append(kind)
        await gates[kind].wait()
        return [Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)]

    async def nothing(rollout: Rollout) -> None:
        pass

    def task(name: str, *, size: int, aside: bool) -> Task:
        prompt = Prompt(id=name, text="", input=ModelInput([int(aside)]))
        return Task(group=Group.begin(name, prompt, size), sampling=SamplingParams(max_tokens=4), step=1, aside=aside)

    async def run() -> None:
        runner = Runner(
            [ask],
            Sides(decode=str, open=opening(lambda rollout: None), score=nothing),
            run_seed=0,
            max_calls=64,
            max_positions=64,
            attempt_timeout_s=1e6,
            aside_share=0.25,
        )
        runner.start([task(f"e{index}", size=1, aside=True) for index in range(7)], version=0)
        await asyncio.sleep(0.01)
        # Nothing else was under way.
        assert asked == ["aside"] * 7
        # What the state counts is work of training.
        state = runner.state()
        assert sum(state.attempts.values()) == state.oldest_s == 0
        gates["aside"].set()
        await ended(runner, 7)
        gates["aside"].clear()
        asked.clear()
        runner.start([task("t", size=6, aside=False)], version=0)
        runner.start([task(f"f{index}", size=1, aside=True) for index in range(7)], version=0)
        await asyncio.sleep(0.01)
        assert asked == ["training"] * 6 + ["aside"] * 2 and runner.state().attempts["engine"] == 6
        gates["aside"].set()
        assert {each.group.id for each in (await ended(runner, 7)).ended} == {f"f{index}" for index in range(7)}
        gates["aside"].clear()
        runner.start([task(f"g{index}", size=1, aside=True) for index in range(7)], version=0)
        await asyncio.sleep(0.01)
        assert asked[8:].count("aside") == 5 + 2
        runner.hurry()
        await asyncio.sleep(0.01)
        assert asked[8:].count("aside") == 5 + 7

    async def ended(runner: Runner, count: int) -> News:
        news = News()
        while len(news.ended) < count:
            news.ended += (await runner.news(5.0)).ended
        return news

    simulated(run())
