"""The runner's bookkeeping: engines that die, attempts that are left out, and who gets what."""

import asyncio
import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from rlframe.attempts import busy as busy_module
from rlframe.attempts import runner as runner_module
from rlframe.attempts.account.ledger import DropReason
from rlframe.attempts.engines import Abort, Ask, EngineLost, EngineQueue
from rlframe.attempts.runner import Ended, News, Runner
from rlframe.attempts.scoring import Judge
from rlframe.attempts.turns import Progress, Sides, Task
from rlframe.rewards.config import RewardConfig, RewardTerm
from rlframe.rewards.runner import RewardRunner
from rlframe.types.input import ModelInput
from rlframe.types.packed import Packed
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, SamplingParams
from rlframe.utils.errors import RlframeError
from tests.local_attempts import opening
from tests.unit.attempts.simulated.clock import simulated

SAMPLING = SamplingParams(max_tokens=4)
COMPLETION = Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)


def task(name: str, *, length: int = 1, size: int = 1) -> Task:
    """A task with a prompt of `length` tokens."""
    prompt = Prompt(id=name, text="", input=ModelInput([1] * length))
    return Task(group=Group.begin(name, prompt, size), sampling=SAMPLING, step=1)


def runner_of(
    *asks: Ask,
    observe: Any = lambda rollout: None,
    attempt_timeout_s: float = 1e6,
    max_calls: int = 1,
    aborts: list[Abort] | None = None,
) -> Runner:
    """A runner on these engines, without rewards."""

    async def nothing(rollout: Rollout) -> None:
        pass

    sides = Sides(decode=str, open=opening(observe), score=nothing)
    return Runner(
        asks,
        sides,
        run_seed=0,
        max_calls=max_calls,
        max_positions=1024,
        attempt_timeout_s=attempt_timeout_s,
        aborts=aborts,
    )


def test_tasks_and_news_arrive_in_another_process_as_they_were() -> None:
    begun = [task("a", size=2).begun(), task("b", length=3).begun()]
    begun[0].group.rollouts[0].append(COMPLETION)
    begun[0].progress[1].ended = "done"
    found = pickle.loads(pickle.dumps(Packed(begun), protocol=5)).objects()
    assert found == begun and found[0].progress[0] == Progress() is not found[1].progress[0]
    news = News(ended=[Ended(group=each.group) for each in begun], busy=[1])
    assert pickle.loads(pickle.dumps(news, protocol=5)) == news


async def news_of(runner: Runner, groups: int) -> News:
    """The news when so many groups have ended."""
    news = News()
    while len(news.ended) < groups:
        more = await runner.news(5.0)
        news.ended += more.ended
        news.lost += more.lost
    return news


async def answers(requests: list[GenerationRequest]) -> list[Completion]:
    """Answers at once."""
    return [COMPLETION for _ in requests]


async def dies(requests: list[GenerationRequest]) -> list[Completion]:
    """Fails at once."""
    raise EngineLost("call")


def test_news_of_one_moment_come_together_and_the_last_ones_at_once():
    async def by_seconds(requests: list[GenerationRequest]) -> list[Completion]:
        # A prompt of n tokens is answered after n milliseconds.
        await asyncio.sleep(max(len(each.input) for each in requests) / 1000)
        return [COMPLETION for _ in requests]

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        runner = runner_of(*[by_seconds] * 3)
        runner.start([task("a", length=1), task("b", length=2), task("c", length=500)], version=0)
        begun = clock()
        assert sorted(each.group.id for each in (await runner.news(5.0)).ended) == ["a", "b"]
        assert clock() - begun == pytest.approx(0.001 + runner_module.GATHER_S)
        assert [each.group.id for each in (await runner.news(5.0)).ended] == ["c"]
        assert clock() - begun == pytest.approx(0.5)

    simulated(run())


def test_a_lost_engine_that_is_replaced_is_not_told_of_any_more():
    async def run() -> None:
        runner = runner_of(dies)
        runner.start([task("a")], version=0)
        for _ in range(5):
            await asyncio.sleep(0)
        # A weight sync has found it dead, and replaced it.
        runner.replace(0, answers)
        news = await news_of(runner, 1)
        assert news.lost == [] and [each.group.id for each in news.ended] == ["a"]

    simulated(run())


def test_attempts_left_out_are_told_of_with_the_reason_and_what_they_had():
    def observe(rollout: Rollout) -> None:
        if rollout.sample_index == 0:
            raise KeyError("a tool")

    async def slow(requests: list[GenerationRequest]) -> list[Completion]:
        await asyncio.sleep(0.2)
        return [COMPLETION for _ in requests]

    async def ended(*arguments: Any, **named: Any) -> Any:
        runner = runner_of(*arguments, **named)
        runner.start([task("a", size=2)], version=0)
        return (await news_of(runner, 1)).ended[0]

    failed = simulated(ended(answers, observe=observe))
    assert [each.sample_index for each in failed.group.rollouts] == [1]
    (lost,) = failed.lost[DropReason.FAILED]
    assert lost.sample_index == 0 and lost.num_sampled_tokens == 1 and len(failed.lost) == 1
    late = simulated(ended(slow, attempt_timeout_s=0.05))
    assert late.group.rollouts == [] and [each.num_tokens for each in late.lost[DropReason.TIMED_OUT]] == [1, 1]


def test_work_that_has_ended_no_longer_counts_against_its_engine():
    asked: list[tuple[int, int]] = []

    def engine(index: int) -> Ask:
        async def ask(requests: list[GenerationRequest]) -> list[Completion]:
            asked.extend((index, len(request.input)) for request in requests)
            return [COMPLETION for _ in requests]

        return ask

    async def run() -> None:
        runner = runner_of(engine(0), engine(1))
        for length in (9, 5, 7):
            runner.start([task(f"{length}", length=length)], version=0)
            await news_of(runner, 1)

    simulated(run())
    # Each time both are free, so that the first one gets it.
    assert asked == [(0, 9), (0, 5), (0, 7)]


def test_a_call_of_the_engine_before_says_nothing_about_the_next_one():
    async def run() -> None:
        late, losses = asyncio.Event(), []

        async def first(requests: list[GenerationRequest]) -> list[Completion]:
            if requests[0].seed:
                await late.wait()
            raise EngineLost("call")

        queue = EngineQueue(first, max_calls=2, lost=losses.append)
        requests = [GenerationRequest(input=ModelInput((1,)), sampling=SAMPLING, seed=seed) for seed in (0, 1)]
        waits = [asyncio.ensure_future(queue.generate(request)) for request in requests]
        while not losses:
            await asyncio.sleep(0)
        queue.replace(answers)
        late.set()
        assert await asyncio.gather(*waits) == [COMPLETION, COMPLETION] and len(losses) == 1

    simulated(run())


def test_nobody_waits_for_a_call_that_has_failed_otherwise() -> None:
    async def unreadable(requests: list[GenerationRequest]) -> list[Completion]:
        raise ValueError("not a message")

    async def run() -> None:
        queue = EngineQueue(unreadable, max_calls=2, lost=lambda error: None)
        with pytest.raises(RlframeError, match=r"a call of an engine has failed: ValueError\('not a message'\)"):
            await queue.generate(GenerationRequest(input=ModelInput((1,)), sampling=SAMPLING, seed=0))

    simulated(run())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a runner and of what counts its work is that of the simulated loop."""
    simulated_time = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(runner_module, "time", simulated_time)
    monkeypatch.setattr(busy_module, "time", simulated_time)


def test_the_state_says_who_waits_for_what_and_how_long_engines_were_busy(clock: None):
    async def slow(requests: list[GenerationRequest]) -> list[Completion]:
        await asyncio.sleep(0.2)
        return [COMPLETION for _ in requests]

    async def observe(rollout: Rollout) -> None:
        await asyncio.sleep(0.2 if rollout.prompt.id == "b" else 0)

    async def run() -> None:
        runner = runner_of(slow, answers, observe=observe)
        runner.start([task("a"), task("b")], version=0)
        await asyncio.sleep(0.1)
        state = runner.state()
        # "a" is with the slow engine; "b" has its response from the other, and waits for its environment.
        assert state.attempts == {"engine": 1, "environment": 1, "reward": 0}
        assert state.busy_s == pytest.approx([0.1, 0.0]) and state.oldest_s == pytest.approx(0.1)
        await news_of(runner, 2)
        before = runner.state()
        await asyncio.sleep(0.05)
        after = runner.state()
        assert after.busy_s == before.busy_s == pytest.approx([0.2, 0.0]), "idle engines are not busy"
        assert sum(after.attempts.values()) == 0 and after.oldest_s == 0.0
        assert after.now_s - before.now_s == pytest.approx(0.05)

    simulated(run())


def test_the_time_in_which_attempts_are_interrupted_is_not_theirs():
    async def slow(requests: list[GenerationRequest]) -> list[Completion]:
        await asyncio.sleep(0.15)
        return [COMPLETION for _ in requests]

    async def observe(rollout: Rollout) -> None:
        await asyncio.sleep(3600 * rollout.sample_index)

    async def run() -> None:
        runner = runner_of(slow, observe=observe, attempt_timeout_s=0.3)
        runner.start([task("a", size=2)], version=0)
        await asyncio.sleep(0.05)
        runner.interrupt()
        await asyncio.sleep(0.5)
        assert runner.state().attempts == {"engine": 0, "environment": 1, "reward": 0}
        runner.release()
        begun = asyncio.get_running_loop().time()
        (ended,) = (await news_of(runner, 1)).ended
        # What is left of the second attempt's time is 0.25 s, then it is over.
        assert asyncio.get_running_loop().time() - begun == pytest.approx(0.25)
        assert [each.sample_index for each in ended.group.rollouts] == [0]
        assert [each.sample_index for each in ended.lost[DropReason.TIMED_OUT]] == [1]

    simulated(run())


def test_the_time_of_attempts_that_begin_while_others_are_interrupted_begins_afterwards():
    async def slow(requests: list[GenerationRequest]) -> list[Completion]:
        await asyncio.sleep(0.15)
        return [COMPLETION for _ in requests]

    async def run() -> None:
        runner = runner_of(slow, attempt_timeout_s=0.3)
        # As after the death of a runner, whose successor gets the attempts.
        runner.interrupt()
        runner.start([task("a", size=2)], version=0)
        await asyncio.sleep(0.5)
        runner.release()
        (ended,) = (await news_of(runner, 1)).ended
        assert len(ended.group.rollouts) == 2 and not ended.lost

    simulated(run())


def test_attempts_that_follow_interrupted_ones_that_were_forgotten_have_their_limit():
    async def run() -> None:
        runner = runner_of(answers, observe=lambda rollout: asyncio.sleep(3600), attempt_timeout_s=0.3)
        runner.start([task("a")], version=0)
        await asyncio.sleep(0.1)
        # As in a step that drops what it did not take, with rollout.oversample.
        runner.interrupt()
        runner.cancel()
        runner.start([task("b")], version=0)
        begun = asyncio.get_running_loop().time()
        (ended,) = (await news_of(runner, 1)).ended
        assert asyncio.get_running_loop().time() - begun == pytest.approx(0.3)
        assert ended.group.id == "b" and list(ended.lost) == [DropReason.TIMED_OUT]

    simulated(run())


def test_the_engine_ends_requests_of_attempts_that_have_run_out_of_time():
    running: dict[str, asyncio.Event] = {}
    aborted: list[str] = []

    def abort(names: list[str]) -> None:
        for name in names:
            aborted.append(name)
            # The first one had not reached the engine.
            if name != aborted[0] or aborted.count(name) > 1:
                running[name].set()

    async def run() -> None:
        async def asked(requests: list[GenerationRequest]) -> list[Completion]:
            running[requests[0].name] = event = asyncio.Event()
            await (event.wait() if len(requests[0].input) == 1 else asyncio.sleep(0))
            return [COMPLETION]

        runner = runner_of(asked, attempt_timeout_s=0.05, max_calls=8, aborts=[abort])
        runner.start([task("slow", size=2), task("quick", length=2)], version=0)
        news = await news_of(runner, 2)
        assert {each.group.id: len(each.group.rollouts) for each in news.ended} == {"slow": 0, "quick": 1}
        await asyncio.sleep(1.5)
        # Both; and again the one that has not answered, until it has.
        assert sorted(Counter(aborted).values()) == [1, 2] and set(aborted) <= set(running)
        await asyncio.sleep(1.2)
        assert len(aborted) == 3

    simulated(run())


def test_the_engine_ends_requests_of_attempts_that_were_forgotten_while_they_were_on_their_way():
    running: dict[str, asyncio.Event] = {}
    aborted: list[str] = []

    def abort(names: list[str]) -> None:
        aborted.extend(names)
        for name in names:
            # The first abort comes before the request.
            if aborted.count(name) > 1:
                running[name].set()

    async def run() -> None:
        async def asked(requests: list[GenerationRequest]) -> list[Completion]:
            running[requests[0].name] = event = asyncio.Event()
            await event.wait()
            return [COMPLETION]

        runner = runner_of(asked, max_calls=8, aborts=[abort])
        runner.start([task("a", size=2)], version=0)
        await asyncio.sleep(0.1)
        runner.cancel()
        await asyncio.sleep(1.5)
        assert len(running) == 2 and all(event.is_set() for event in running.values())
        await asyncio.sleep(5)
        assert sorted(Counter(aborted).values()) == [2, 2], "what has ended is not aborted any more"

    simulated(run())


def test_an_attempt_that_failed_while_all_were_forgotten_says_nothing_to_those_that_follow():
    async def run() -> None:
        runner = runner_of(answers)  # Answers with version 0.
        runner.start([task("a"), task("b")], version=1)
        begun = list(runner._tasks)
        while not any(each.done() for each in begun):
            await asyncio.sleep(0)
        runner.cancel()
        assert (await runner.news(0.05)).failure is None
        runner.start([task("c")], version=0)
        assert [each.group.id for each in (await news_of(runner, 1)).ended] == ["c"]

    simulated(run())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_the_thread_of_rewards_ends_every_wait_for_them() -> None:
    # A part that starts no process, and that nothing gets as far as.
    endpoint = {"base_url": "http://127.0.0.1:9", "model": "nobody"}
    config = RewardConfig(parts={"judge": RewardTerm(name="judge", options={"endpoint": endpoint})})
    broken: Any = SimpleNamespace(records=[], finish_reason="stop", num_turns=1)
    whole = task("a").group.rollouts[0]

    async def waits() -> list[Any]:
        judge = Judge(RewardRunner(config), asyncio.get_running_loop())
        found = await asyncio.wait_for(
            asyncio.gather(*map(judge.score, [broken, whole]), return_exceptions=True), timeout=60
        )
        found += await asyncio.gather(judge.score(whole), return_exceptions=True)
        judge.close()
        return found

    for error in asyncio.run(waits()):
        assert isinstance(error, RlframeError) and "the thread of rewards failed: AttributeError(" in str(error)
