"""Agents in sessions, as the runner sees them: each is one counted attempt, whatever it does."""

import asyncio
import os
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlframe.attempts.account.ledger import DropReason
from rlframe.attempts.dialogue import single_turn
from rlframe.attempts.endpoint.agents import Agents
from rlframe.attempts.endpoint.server import Server
from rlframe.attempts.rendering.config import RenderingConfig
from rlframe.attempts.rendering.renderer import Renderer
from rlframe.attempts.runner import Ended, Runner
from rlframe.attempts.sessions.calls import CannotStart, Setup, Trouble
from rlframe.attempts.sessions.pool import SessionPool, try_start
from rlframe.attempts.turns import Event, Sides, Task
from rlframe.data.config import DataConfig
from rlframe.environments.config import EnvironmentConfig, Verdict
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, SamplingParams
from rlframe.types.wait import Wait
from rlframe.utils.errors import WeightSyncFailed
from tests.unit.attempts.endpoint.bench import END, load_words
from tests.until import PATIENCE_S, under_a_fair_limit

pytestmark = pytest.mark.later
HERE = "tests.unit.attempts.endpoint.behaving"
LONG_S = 600.0


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    return load_words()


class Bench:
    """The real runner, server and sessions, and a policy that says yes."""

    def __init__(
        self, words: PreTrainedTokenizerBase, config: EnvironmentConfig, *, version: int = 0, places: int = 1000
    ):
        self.words, self.version = words, version
        self.pool = SessionPool(Setup(environment=config, folder=os.getcwd(), sources={}))
        self.server = Server("127.0.0.1")
        self.aborted: list[str] = []
        self.slow: dict[str, asyncio.Event] = {}
        self.slow_is_there = asyncio.Event()
        self.judged: list[Rollout] = []
        agents = Agents(
            pool=self.pool,
            server=self.server,
            language=Renderer(words, RenderingConfig(), data=DataConfig()),
            decode=lambda ids: str(words.decode(ids, skip_special_tokens=True)),
            config=config,
            places=asyncio.Semaphore(places),
        )
        self.runner = Runner(
            [self.ask],
            Sides(decode=str, open=single_turn, score=self.score, host=agents.attempt, waits=agents.waits),
            run_seed=0,
            max_calls=100,
            max_positions=1024,
            attempt_timeout_s=LONG_S,
            environment=config,
            aborts=[self.abort],
        )

    async def score(self, rollout: Rollout) -> None:
        self.judged.append(rollout)

    def abort(self, names: list[str]) -> None:
        for name in names:
            if name in self.slow:
                self.aborted.append(name)
                self.slow[name].set()

    async def ask(self, requests: list[GenerationRequest]) -> list[Completion]:
        (request,) = requests
        before = str(self.words.decode(request.input.token_ids))
        reason = FinishReason.STOP
        if "<|user|>slow<" in before:
            self.slow[request.name] = asyncio.Event()
            self.slow_is_there.set()
            await self.slow[request.name].wait()
            reason = FinishReason.ABORT
        said = ("no" if "is it there?" in before and not self.slow else "yes") + END
        ids = self.words.encode(said, add_special_tokens=False)
        return [
            Completion(
                token_ids=ids,
                logprobs=[-1.0] * len(ids),
                versions=[self.version] * len(ids),
                finish_reason=reason,
            )
        ]

    async def run(self, *tasks: Task, version: int = 0) -> tuple[dict[str, Ended], Counter[str], list[str]]:
        self.runner.start(tasks, version=version)
        ended: dict[str, Ended] = {}
        events: Counter[str] = Counter()
        texts: list[str] = []
        while len(ended) < len(tasks):
            news = await self.runner.news(5.0)
            if news.failure:
                raise news.failure
            ended |= {each.group.id: each for each in news.ended}
            events += news.events
            texts += [text for _, text in news.warnings]
        return ended, events, texts

    async def close(self) -> None:
        self.pool.close()
        await self.server.stop()


def task(kind: str, *, size: int = 1) -> Task:
    prompt = Prompt(id=kind, messages=({"role": "user", "content": "2+3="},), text="", input=ModelInput((1, 2)))
    return Task(group=Group.begin(kind, prompt, size), sampling=SamplingParams(max_tokens=20), step=1)


def attempted(
    words: PreTrainedTokenizerBase, config: EnvironmentConfig, *kinds: str, **named: Any
) -> tuple[Bench, dict[str, Ended], Counter[str], list[str]]:
    """How attempts of these kinds end, all at the same time."""

    async def run() -> tuple[Bench, dict[str, Ended], Counter[str], list[str]]:
        bench = Bench(words, config, **named)
        try:
            return bench, *await bench.run(*map(task, kinds))
        finally:
            await bench.close()

    return asyncio.run(run())


def functions(name: str = "by_prompt", *, limit_s: float = LONG_S, **settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig(
        name="endpoint",
        options={"function": f"{HERE}:{name}"},
        workers=1,
        max_turns=22,
        step_timeout_s=limit_s,
        memory_gb=2.0,
        **settings,
    )


ENDS: dict[str, DropReason | float] = {
    "good": 1.0,
    "says_more": 0.5,
    "masks": DropReason.MASKED,
    "raises": DropReason.FAILED,
    "exits": DropReason.FAILED,
    "never_calls": DropReason.FAILED,
    "says_nonsense": DropReason.FAILED,
    "says_too_much": DropReason.FAILED,
    "sends_garbage": DropReason.FAILED,
    "calls_twenty_times_at_once": 1.0,
    "calls_for_ever": 0.0,
    "heeds_the_limit": 0.25,
    "leaves_a_call_behind": 1.0,
}
"""The reward of each kind of agent, or the reason for which its attempt is left out."""


def test_each_agent_is_one_attempt_whatever_it_does(words: PreTrainedTokenizerBase) -> None:
    bench, ended, events, texts = attempted(words, functions(), *ENDS)
    found: dict[str, Any] = {}
    for kind, each in ended.items():
        if each.group.rollouts:
            found[kind] = sum(rollout.total_reward for rollout in each.group.rollouts)
        else:
            (found[kind],) = each.lost
    assert found == ENDS
    del events[Event.FORKED]
    assert events == {
        Trouble.RAISED: 5,
        Trouble.NEVER_CALLED: 1,
        Event.TOO_MANY_TURNS: 2,
        Event.CALLS_REFUSED: 3 + 2,
    }
    (rollout,) = ended["good"].group.rollouts
    assert [len(rollout.turns), rollout.text, len(rollout.messages)] == [2, "yes", 4]
    assert rollout.finish_reason is FinishReason.STOP and rollout in bench.judged
    assert [record.reward for record in rollout.records] == [0.0, 1.0]
    assert ended["says_more"].group.rollouts[0].numbers.keys() == {"seed"}
    assert len(ended["calls_twenty_times_at_once"].group.rollouts) == 20
    assert ended["heeds_the_limit"].group.rollouts[-1].finish_reason is FinishReason.LENGTH
    assert len(bench.aborted) >= 1, "the call that was left behind is aborted by its name"
    assert any(text.startswith("attempt 1 that failed, at prompt") for text in texts)


@pytest.mark.parametrize(
    ("name", "kinds", "trouble"),
    [
        ("by_prompt_in_the_loop", ["hangs", "ignores_its_cancellation"], Trouble.TOOK_TOO_LONG),
        ("by_prompt", ["blocks_the_process"], Trouble.DIED),
    ],
)
def test_an_agent_that_does_nothing_for_long_is_ended(
    words: PreTrainedTokenizerBase, name: str, kinds: list[str], trouble: Trouble
) -> None:
    _, ended, events, _ = under_a_fair_limit(
        lambda limit_s: attempted(words, functions(name, limit_s=limit_s), *kinds),
        # A process that is too late to say which of its agents is late has ended itself.
        lambda found: found[2] == {trouble: len(kinds)},
        first_s=2.0,
    )
    assert {kind: list(each.lost) for kind, each in ended.items()} == {kind: [DropReason.FAILED] for kind in kinds}
    assert events == {trouble: len(kinds)}


def test_no_more_agents_run_at_once_than_may(words: PreTrainedTokenizerBase) -> None:
    # Each waits in a thread of its own for the others of its three.
    _, ended, events, _ = attempted(words, functions(), *(f"waits_for_three_{name}" for name in "abcdef"), places=3)
    rewards = sorted(each.group.rollouts[0].total_reward for each in ended.values())
    assert rewards == [3.0] * 6 and events == {}


def test_the_runner_tells_how_many_attempts_wait_for_agents_and_for_places(words: PreTrainedTokenizerBase) -> None:
    async def run() -> list[Wait]:
        bench = Bench(words, functions("by_prompt_in_the_loop"), places=2)
        try:
            bench.runner.start([task("hangs", size=5)], version=0)
            waits: list[Wait] = []
            while [wait.number for wait in waits] != [2, 3]:
                waits = (await bench.runner.news(0.01)).waits
            return waits
        finally:
            bench.runner.cancel()
            await bench.close()

    agent, place = asyncio.run(run())
    assert agent.what == "the agent endpoint" and place.what == "the end of another agent endpoint"
    assert agent.limit == "it may be without a call for 600 s: environment.step_timeout_s"
    assert place.limit == "2 run at present"


class Looking(Bench):
    """Looks what attempts wait for while an engine answers."""

    seen: list[list[Wait]]

    async def ask(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.seen.append(self.runner._turns.waits())
        return await super().ask(requests)


def test_an_attempt_whose_agent_has_a_call_under_way_waits_for_an_engine(words: PreTrainedTokenizerBase) -> None:
    async def run() -> list[list[Wait]]:
        bench = Looking(words, functions())
        bench.seen = []
        try:
            await bench.run(task("good"))
            assert bench.runner._turns.waits() == []
            return bench.seen
        finally:
            await bench.close()

    assert asyncio.run(run()) == [[], []]


def test_a_failed_agent_may_begin_again_or_be_trained_on(words: PreTrainedTokenizerBase) -> None:
    _, ended, events, _ = attempted(words, functions(on_failure=Verdict.RETRY, max_retries=2), "raises")
    assert list(ended["raises"].lost) == [DropReason.FAILED] and events == {Trouble.RAISED: 3, Event.RETRIED: 2}
    bench, ended, events, _ = attempted(words, functions(on_failure=Verdict.TRAIN), "raises", "never_calls")
    (rollout,) = ended["raises"].group.rollouts
    assert len(rollout.turns) == 2 and bench.judged == [rollout]
    assert list(ended["never_calls"].lost) == [DropReason.FAILED]


def test_weights_that_are_too_old_end_the_run(words: PreTrainedTokenizerBase) -> None:
    async def run() -> None:
        bench = Bench(words, functions(), version=3)
        try:
            with pytest.raises(WeightSyncFailed, match="version 3, expected at least 4"):
                await bench.run(task("good"), version=4)
        finally:
            await bench.close()

    asyncio.run(run())


def test_an_attempt_that_was_under_way_begins_anew_and_is_counted(words: PreTrainedTokenizerBase) -> None:
    async def run() -> tuple[Ended, Counter[str]]:
        first = Bench(words, functions())
        first.runner.start([task("leaves_a_call_behind")], version=0)
        await asyncio.wait_for(first.slow_is_there.wait(), LONG_S)
        first.runner.interrupt()
        first.abort(list(first.slow))
        (begun,) = await first.runner.snapshot()
        first.runner.cancel()
        await first.close()
        second = Bench(words, functions())
        try:
            ended, events, _ = await second.run(begun)
        finally:
            await second.close()
        return ended["leaves_a_call_behind"], events

    ended, events = asyncio.run(run())
    assert sum(each.total_reward for each in ended.group.rollouts) == 1.0 and events[Event.BEGUN_ANEW] == 1


def commands(script: str, *, limit_s: float = LONG_S) -> EnvironmentConfig:
    command = [sys.executable, "-c", textwrap.dedent(script), "{task}"]
    return EnvironmentConfig(name="endpoint", options={"command": command}, workers=1, step_timeout_s=limit_s)


ASKS = """
    import json, os, sys, urllib.request
    prompt = json.load(open(os.environ["RLFRAME_PROMPT"]))
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"messages": prompt["messages"]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    assert said == "yes" and sys.argv[1] == "2+3=" and os.environ["RLFRAME_SEED"].isdigit()
"""


@pytest.mark.parametrize(
    ("then", "reward", "why"),
    [
        ("", 0.0, ""),
        ('json.dump({"reward": 0.5}, open(os.environ["RLFRAME_OUTCOME"], "w"))', 0.5, ""),
        ('print("it broke"); sys.exit(1)', None, "exit code 1; it printed last: it broke"),
        ('open(os.environ["RLFRAME_OUTCOME"], "w").write("{")', None, "JSONDecodeError"),
        ("os.kill(os.getpid(), 9)", None, "exit code -9"),
    ],
)
def test_a_command_is_an_agent(words: PreTrainedTokenizerBase, then: str, reward: float | None, why: str) -> None:
    _, ended, events, texts = attempted(words, commands(ASKS + "    " + then), "good")
    if reward is None:
        assert list(ended["good"].lost) == [DropReason.FAILED] and events == {Trouble.RAISED: 1}
        assert any(why in text for text in texts)
    else:
        (rollout,) = ended["good"].group.rollouts
        assert rollout.total_reward == reward and events == {}


STARTS_ANOTHER = """
    import os, subprocess, sys, time
    other = subprocess.Popen(["sleep", "1000"])
    with open("{pids}-", "w") as file:
        file.write(f"{{os.getpid()}} {{other.pid}}")
    os.rename("{pids}-", "{pids}")
    time.sleep(1000)
"""


@pytest.mark.parametrize("what", ["attempt", "process"])
def test_a_command_ends_with_its_attempt_and_with_the_process_that_has_started_it(
    words: PreTrainedTokenizerBase, tmp_path: Path, what: str
) -> None:
    pids = tmp_path / "pids"

    async def run() -> list[int]:
        bench = Bench(words, commands(STARTS_ANOTHER.format(pids=pids)))
        bench.runner.start([task("good")], version=0)
        async with asyncio.timeout(PATIENCE_S):
            while not pids.exists():
                await asyncio.sleep(0.02)
        found = [int(each) for each in pids.read_text().split()]
        assert all(map(is_running, found))
        bench.runner.cancel() if what == "attempt" else bench.pool.close()
        async with asyncio.timeout(PATIENCE_S):
            while any(map(is_running, found)):
                await asyncio.sleep(0.02)
        bench.runner.cancel()
        await bench.close()
        return found

    assert len(asyncio.run(run())) == 2


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"function": "tests.nowhere:f"}, "cannot be imported"),
    ({"function": f"{HERE}:nothing"}, "has no 'nothing'"),
    ({"command": ["no-such-program"]}, "must begin with a program"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED)
def test_an_agent_that_is_not_there_is_refused_before_the_run(options: dict[str, Any], why: str) -> None:
    config = EnvironmentConfig(name="endpoint", options=options, workers=1)
    with pytest.raises(CannotStart, match=why):
        try_start(Setup(environment=config, folder=os.getcwd(), sources={}))
