"""Environments of the package verifiers, played as the package runs them."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.attempts.sessions.calls import Setup
from rlframe.attempts.sessions.pool import SessionPool
from rlframe.attempts.turns import Event, Task
from rlframe.data.builtin.arithmetic import Split
from rlframe.data.builtin.verifiers import known_as, parsed, records
from rlframe.data.config import DataConfig
from rlframe.data.sources import load
from rlframe.data.text.conversations import understand
from rlframe.environments.base import Step, Turn
from rlframe.environments.config import EnvironmentConfig
from rlframe.environments.verifiers import Verifiers, VerifiersConfig
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, Group, SamplingParams
from rlframe.utils.errors import ConfigError, DataError

pytestmark = pytest.mark.later

pytest.importorskip("verifiers")
GUESSING = "verifiers:tests.unit.environments.guessing"
HINTING = f"verifiers:{Path(__file__).with_name('hinting.py')}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package keeps folders of its runs below the home, as it is when it is imported."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path)


def prompt_of(path: str, index: int = 0) -> Prompt:
    """The prompt of a task."""
    fields = [*records(path, Split.TRAIN), *records(path, Split.HELD_OUT)][index].fields
    return Prompt(id=fields["id"], text="", input=ModelInput(np.zeros(0)), fields=fields)


def said(text: str, *calls: tuple[str, dict[str, Any]]) -> Turn:
    """What the policy says."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": f"call{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return Turn(message=message, text=text, finish_reason=FinishReason.STOP)


def played(path: str, *turns: Turn, index: int = 0, **settings: Any) -> tuple[Verifiers, list[Any], list[Step]]:
    """Returns a session after these turns, its beginning, and the answers."""

    async def run() -> tuple[Verifiers, list[Any], list[Step]]:
        config = VerifiersConfig(**settings)
        Verifiers.prepare(config)
        session = Verifiers(config)
        try:
            opened = list(await session.reset(prompt_of(path, index), seed=0))
            return session, opened, [await session.step(turn) for turn in turns]
        finally:
            await session.close()

    return asyncio.run(run())


def test_tasks_are_records_and_a_tenth_is_held_out() -> None:
    path = f"{GUESSING}?count=200"
    train, held_out = records(path, Split.TRAIN), records(path, Split.HELD_OUT)
    numbers = [record.fields["verifiers"]["data"]["number"] for record in (*train, *held_out)]
    assert sorted(numbers) == list(range(200)) and 10 <= len(held_out) <= 30
    first = train[0].fields
    assert first["prompt"] == [{"role": "system", "content": "Numbers only."}, {"role": "user", "content": "Guess."}]
    assert first["verifiers"]["taskset"] == {"id": "tests.unit.environments.guessing", "count": 200}
    json.dumps(first)


def test_tasks_of_one_prompt_are_told_apart_and_equal_ones_are_not() -> None:
    path = f"{HINTING}?numbers={json.dumps([*range(35)] * 2, separators=(',', ':'))}"
    found = load(DataConfig(path=path, evaluation_count=10**6), seed=0, understand=understand)
    (train,), (held_out,) = (
        [[one.record.fields["verifiers"]["data"]["number"] for one in part] for part in parts]
        for parts in (found.train, found.held_out)
    )
    assert sorted([*train, *held_out]) == sorted([*range(35)] * 2) and len(held_out) > 1
    assert not set(train) & set(held_out) and not found.dropped


def test_a_task_set_without_an_end_needs_a_size() -> None:
    path = f"{GUESSING}?endless=true"
    with pytest.raises(DataError, match=r"the task set has no end; say how many tasks to read, as in .*\?size=1000"):
        records(path, Split.TRAIN)
    assert len(records(f"{path}&size=50", Split.TRAIN)) + len(records(f"{path}&size=50", Split.HELD_OUT)) == 50


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("verifiers:no-such-thing", "taskset 'no-such-thing' not found"),
        ("verifiers:no/such/file.py", "No such file or directory"),
        ("verifiers:no_such.package", "No module named"),
        (f"{GUESSING}?counts=3", "counts"),
        ("verifiers:json", "verifiers cannot load the task set"),
    ],
)
def test_what_is_no_task_set_is_refused(path: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        records(path, Split.TRAIN)


def test_names_and_settings() -> None:
    assert parsed("verifiers:owner/gsm8k-v1@0.1.3?size=5") == ("owner/gsm8k-v1@0.1.3", {"size": 5})
    assert known_as("owner/gsm8k-v1@0.1.3") == "owner/gsm8k-v1@0.1.3"
    assert known_as("gsm8k-v1") == "gsm8k-v1" and known_as("") == ""


def test_a_single_agent_answers_once() -> None:
    path = f"{GUESSING}?count=1"
    _, opened, (step,) = played(path, said("0"))
    assert opened == [{"role": "system", "content": "Numbers only."}, {"role": "user", "content": "Guess."}]
    assert step.done and step.reward == 2.0
    assert step.metrics == {"looks": 0.0, "reward_right": 1.0, "stopped": 0.0, "timed_out": 0.0}
    _, _, (step,) = played(path, said("1"))
    assert step.done and step.reward == 0.0


def test_an_environment_answers_turn_by_turn() -> None:
    _, opened, steps = played(HINTING, said("3"), said("9"), said("7"))
    assert opened == [{"role": "user", "content": "Guess my number."}]
    assert [step.messages for step in steps] == [
        [{"role": "user", "content": "higher"}],
        [{"role": "user", "content": "lower"}],
        [],
    ]
    assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
    assert steps[-1].metrics["guesses"] == 3.0


def test_limits_of_a_seat_end_the_episode_and_are_scored() -> None:
    _, _, steps = played(HINTING, said("3"), said("4"), config={"player": {"max_turns": 2}})
    assert steps[-1].done and steps[-1].reward == 0.0
    assert steps[-1].metrics["stopped"] == 1.0 and steps[-1].metrics["guesses"] == 2.0


def test_reasoning_that_a_harness_leaves_out_is_the_same_conversation() -> None:
    turn = said("3")
    thought = Turn(message={**turn.message, "reasoning_content": "hm"}, text="3", finish_reason=FinishReason.STOP)
    _, _, steps = played(HINTING, thought, said("7"))
    assert steps[-1].reward == 1.0


@pytest.mark.thorough
def test_tools_of_a_task_are_offered_called_and_stop_the_task() -> None:
    path = f'{GUESSING}?count=1&task={{"tools":true}}'
    calls = [("oracle_look", {"what": "number"}), ("oracle_look", {"what": "weather"}), ("nothing", {})]
    session, _, steps = played(path, said("", *calls), said("0"))
    assert [tool["function"]["name"] for tool in session.tools] == ["oracle_look"]
    answers = [(message["tool_call_id"], message["name"], message["content"]) for message in steps[0].messages]
    assert answers == [
        ("call0", "oracle_look", "the number is 0"),
        ("call1", "oracle_look", "Error executing tool look: there is no weather"),
        ("call2", "nothing", "Error: there is no tool 'nothing'"),
    ]
    assert steps[1].done and steps[1].reward == 2.0 and steps[1].metrics["looks"] == 1.0
    _, _, steps = played(path, said("I give up", ("oracle_look", {"what": "number"})))
    assert steps[0].done and steps[0].reward == 0.0 and steps[0].metrics["stopped"] == 1.0


def test_a_reward_that_fails_fails_the_attempt() -> None:
    with pytest.raises(RuntimeError, match="the episode failed: TaskError: .*nobody knows"):
        played(HINTING, said("what?"))


def test_a_second_conversation_is_refused() -> None:
    with pytest.raises(Exception, match="does not continue the conversation.*environment=endpoint"):
        played(f"{GUESSING}?count=1", said("0"), id="best-of-n")


def test_a_response_that_a_task_rewrites_is_another_conversation() -> None:
    with pytest.raises(Exception, match="does not continue the conversation"):
        played(HINTING, said("1"))


def test_a_seat_of_another_model_needs_a_client() -> None:
    with pytest.raises(
        ConfigError, match=r"must give a model and a client to each seat but one, got none for assistant, user"
    ):
        played(f"{GUESSING}?count=1", id="user-sim")
    with pytest.raises(ConfigError, match=r"environment\.options\.agent must be one of assistant, user, got 'me'"):
        played(f"{GUESSING}?count=1", id="user-sim", agent="me")


def test_a_harness_and_a_runtime_that_are_named_are_kept() -> None:
    import verifiers.v1 as vf

    from rlframe.environments.verifiers.seat import HARNESS, unnamed

    taskset = {"id": known_as("tests.unit.environments.guessing")}
    ours = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    assert unnamed(vf.resolve_env_config({"taskset": taskset}), "agent") == ours
    named = {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}
    assert unnamed(vf.resolve_env_config({"taskset": taskset, "agent": named}), "agent") == {}
    users = vf.resolve_env_config({"id": "user-sim", "taskset": taskset})
    assert unnamed(users, "user") == {"runtime": {"type": "subprocess"}}, "the environment names its harness"


HARNESS = '''
import sys
import verifiers.v1 as vf

PROGRAM = """
import sys
from openai import OpenAI
url, key, model, prompt = sys.argv[1:]
client = OpenAI(base_url=url, api_key=key)
messages = [{"role": "user", "content": prompt}]
for _ in range(2):
    stream = client.chat.completions.create(model=model, messages=messages, stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
"""

class Program(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_text_prompt(data)
        return await runtime.run([sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, prompt], {})

__all__ = ["Program"]
'''


@pytest.mark.thorough
def test_a_harness_that_is_a_program_asks_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asking_harness.py").write_text(HARNESS)
    monkeypatch.syspath_prepend(tmp_path)
    config = {"agent": {"harness": {"id": "asking-harness"}}}
    _, opened, steps = played(f"{GUESSING}?count=1", said("5"), said("0"), config=config)
    assert opened == [{"role": "user", "content": "Numbers only.\n\nGuess."}], "it folds the system prompt"
    assert steps[0].messages == [{"role": "user", "content": "again"}]
    assert steps[1].done and steps[1].reward == 2.0


def test_a_prompt_of_other_data_is_refused() -> None:
    async def run() -> None:
        Verifiers.prepare(VerifiersConfig())
        await Verifiers(VerifiersConfig()).reset(Prompt(id="0", text="", input=ModelInput(np.zeros(0))), seed=0)

    with pytest.raises(ValueError, match="the prompt is no task of verifiers; use data.path=verifiers:ID"):
        asyncio.run(run())


def test_settings_that_the_data_decides_are_refused() -> None:
    config = VerifiersConfig(config={"taskset": {"id": "a"}, "id": "b"})
    keys = [str(fault) for fault in Verifiers.faults(config, EnvironmentConfig())]
    assert len(keys) == 2 and "data.path=verifiers:ID" in keys[1]


def test_a_session_that_is_closed_ends_its_episode(tmp_path: Path) -> None:
    async def run() -> None:
        Verifiers.prepare(VerifiersConfig())
        session = Verifiers(VerifiersConfig())
        await session.reset(prompt_of(HINTING), seed=0)
        assert list(tmp_path.glob("runtimes/subprocess/*"))
        await session.close()
        assert session._episode is not None and session._episode.cancelled()
        assert not list(tmp_path.glob("runtimes/subprocess/*"))
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    asyncio.run(run())


@pytest.mark.thorough
def test_many_sessions_share_a_process() -> None:
    config = EnvironmentConfig(name="verifiers", workers=1)

    async def one(pool: SessionPool, number: int) -> tuple[str, float]:
        session = await pool.open(prompt_of(HINTING), seed=0)
        step = await session.step(said(str(number)))
        last = step if step.done else await session.step(said("7"))
        await session.close()
        return (step.messages or [{"content": ""}])[0]["content"], last.reward

    async def run() -> list[tuple[str, float]]:
        pool = SessionPool(Setup(environment=config, folder=".", sources={}))
        try:
            return await asyncio.gather(*(one(pool, number) for number in (5, 7, 9)))
        finally:
            pool.close()

    assert asyncio.run(run()) == [("higher", 1.0), ("", 1.0), ("lower", 1.0)]


@pytest.mark.thorough
def test_an_episode_of_several_conversations_is_played_at_an_endpoint() -> None:
    from tests.unit.attempts.endpoint.test_agents import Bench, load_words

    options = {"function": "rlframe.environments.verifiers.seat:at_endpoint"}
    options["options"] = {"id": "best-of-n", "config": {"n": 3, "max_concurrent_agents": 3}}  # type: ignore[assignment]
    config = EnvironmentConfig(name="endpoint", options=options, workers=1)
    prompt = prompt_of(f"{GUESSING}?count=1")
    group = Group.begin("one", replace(prompt, messages=({"role": "user", "content": "Guess."},)), 1)

    async def run() -> Any:
        bench = Bench(load_words(), config)
        try:
            return await bench.run(Task(group=group, sampling=SamplingParams(max_tokens=20), step=1))
        finally:
            await bench.close()

    ended, events, texts = asyncio.run(run())
    rollouts = ended["one"].group.rollouts
    assert len(rollouts) == 3, texts
    assert [rollout.messages[-1]["content"] for rollout in rollouts] == ["yes"] * 3
    assert rollouts[-1].numbers["best"] == 1.0 and rollouts[-1].numbers["reward_right"] == 0.0
    assert not set(events) - {Event.FORKED}
