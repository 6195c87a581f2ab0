"""Attempts of several turns: what a scripted policy and a real session make of the tokens."""

import asyncio
import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlframe.attempts.account.ledger import DropReason
from rlframe.attempts.rendering.config import History, RenderingConfig
from rlframe.attempts.rendering.renderer import Renderer
from rlframe.attempts.runner import Ended, News, Runner
from rlframe.attempts.sessions.calls import Setup
from rlframe.attempts.sessions.dialogue import Sessions
from rlframe.attempts.sessions.pool import SessionPool
from rlframe.attempts.turns import Event, Sides, Task
from rlframe.data.config import DataConfig
from rlframe.environments.config import EnvironmentConfig, Verdict
from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.ops.advantages import rewards_by_sequence
from rlframe.ops.packing import pack
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, SamplingParams
from tests.until import PATIENCE_S

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*13"}}</tool_call><|end|>'
OPENED = "<|system|>calculator(expression)<|end|><|user|>12*13=<|end|><|assistant|>"
ANSWERED = "<|tool|>156<|end|><|assistant|>"
CALCULATOR = EnvironmentConfig(name="tools", options={"tools": {"calculator": {"name": "calculator"}}}, workers=1)
SAMPLING = SamplingParams(max_tokens=100)
Policy = Callable[[str], str]
"""Returns the policy's response to a sequence, both as text."""


HERE = "tests.unit.attempts.sessions.games"


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerBase:
    return tokenizer.load(resolve(ModelConfig(path="qwen3_moe_tiny_tools")))


class Bench:
    """The real runner with real sessions, and a policy that is a function of text."""

    def __init__(self, words: PreTrainedTokenizerBase, policy: Policy, config: EnvironmentConfig, **named: Any):
        self.words, self.policy = words, policy
        self.asked: list[str] = []
        self.pool = SessionPool(Setup(environment=config, folder=os.getcwd(), sources={}))
        sessions = Sessions(
            pool=self.pool,
            language=Renderer(words, named.pop("rendering", RenderingConfig()), data=DataConfig()),
            decode=self.decode,
            deterministic=not config.name.endswith(":UnknownGame"),
        )
        sides = Sides(decode=self.decode, open=sessions.open, score=self.score, score_group=self.score_group)
        self.judged: list[Rollout] = []
        self.judged_together: list[list[Rollout]] = []
        self.judge: Callable[[Rollout], None] = named.pop("judge", lambda rollout: None)
        self.runner = Runner(
            [self.ask],
            sides,
            run_seed=0,
            max_calls=1,
            max_positions=named.pop("max_positions", 1024),
            attempt_timeout_s=600,
            environment=config,
        )

    def decode(self, token_ids: list[int]) -> str:
        return str(self.words.decode(token_ids, skip_special_tokens=True))

    def text(self, rollout: Rollout) -> str:
        return str(self.words.decode(rollout.token_ids))

    async def score(self, rollout: Rollout) -> None:
        self.judge(rollout)
        self.judged.append(rollout)

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        self.judged_together.append(list(rollouts))

    async def ask(self, requests: list[GenerationRequest]) -> list[Completion]:
        answers = []
        for request in requests:
            before = str(self.words.decode(request.input.token_ids))
            self.asked.append(before)
            said = self.policy(before)
            ids = self.words.encode(said, add_special_tokens=False)
            answers.append(
                Completion(
                    token_ids=ids,
                    logprobs=[-0.5] * len(ids),
                    versions=[0] * len(ids),
                    finish_reason=FinishReason.STOP if said.endswith("<|end|>") else FinishReason.LENGTH,
                )
            )
        return answers

    async def run(self, *tasks: Task) -> tuple[list[Ended], News]:
        self.runner.start(tasks, version=0)
        ended: list[Ended] = []
        events = News()
        while len(ended) < len(tasks):
            news = await self.runner.news(5.0)
            assert news.failure is None, news.failure
            ended += news.ended
            events.events += news.events
        return ended, events


def task(*, size: int = 1) -> Task:
    prompt = Prompt(
        id="p", messages=({"role": "user", "content": "12*13="},), text="", input=ModelInput((1, 2)), answer="156"
    )
    return Task(group=Group.begin("0", prompt, size), sampling=SAMPLING, step=1)


def attempted(
    words: PreTrainedTokenizerBase, policy: Policy, config: EnvironmentConfig, *, size: int = 1, **named: Any
) -> tuple[Bench, Ended, dict[str, int]]:
    """The end of one group of attempts."""

    async def run() -> tuple[Bench, Ended, dict[str, int]]:
        bench = Bench(words, policy, config, **named)
        try:
            (ended,), news = await bench.run(task(size=size))
        finally:
            bench.pool.close()
        return bench, ended, dict(news.events)

    return asyncio.run(run())


def asks_once(before: str) -> str:
    return "156<|end|>" if "<|tool|>" in before else CALL


def test_what_was_sampled_stays_and_what_is_answered_is_not_trained_on(words: PreTrainedTokenizerBase) -> None:
    bench, ended, events = attempted(words, asks_once, CALCULATOR)
    (rollout,) = ended.group.rollouts
    assert bench.text(rollout) == OPENED + CALL + ANSWERED + "156<|end|>"
    assert bench.asked == [OPENED, OPENED + CALL + ANSWERED]
    masked = "".join(
        "^" if learned else "." for learned in rollout.loss_mask
    )  # one character a token, special tokens too
    lengths = [len(words.encode(part, add_special_tokens=False)) for part in (OPENED, CALL, ANSWERED, "156<|end|>")]
    assert masked == "".join(mark * length for mark, length in zip(".^.^", lengths, strict=True))
    assert rollout.rollout_logprobs[rollout.loss_mask].tolist() == [-0.5] * (lengths[1] + lengths[3])
    assert rollout.text == "156" and bench.judged == [rollout]
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.messages[1]["tool_calls"][0]["function"] == {
        "name": "calculator",
        "arguments": {"expression": "12*13"},
    }
    assert rollout.numbers["tool_calls"] == 1.0 and events == {}


def test_rewards_of_turns_lie_at_the_end_of_their_turns(words: PreTrainedTokenizerBase) -> None:
    config = EnvironmentConfig(name=f"{HERE}:Game", workers=1)
    bench, ended, _ = attempted(words, lambda before: "stop<|end|>" if before.count("go") == 2 else "go<|end|>", config)
    (rollout,) = ended.group.rollouts
    assert rollout.token_rewards is not None
    assert [rollout.token_rewards[end - 1] for _, end in rollout.turns] == [1.0, 1.0, 1.0]
    assert rollout.total_reward == 3.0 and rollout.numbers == {"said": 3.0}
    start = int(bench.text(rollout).partition("from ")[2][0])
    assert f"<|user|>{start + 1}<|end|><|assistant|>go<|end|><|user|>{start + 2}" in bench.text(rollout)


def test_attempts_of_one_prompt_begin_alike(words: PreTrainedTokenizerBase) -> None:
    config = EnvironmentConfig(name=f"{HERE}:Game", workers=2)
    bench, ended, _ = attempted(words, lambda before: "stop<|end|>", config, size=6)
    assert len({bench.text(rollout) for rollout in ended.group.rollouts}) == 1


@pytest.mark.parametrize(
    ("options", "kept", "reason"),
    [
        ({"verdict": "mask"}, 0, DropReason.MASKED),
        ({"verdict": "retry"}, 0, DropReason.MASKED),
        ({"fails": True}, 0, DropReason.FAILED),
    ],
)
def test_the_verdict_decides_what_becomes_of_an_attempt(
    words: PreTrainedTokenizerBase, options: dict[str, Any], kept: int, reason: DropReason
) -> None:
    config = EnvironmentConfig(name=f"{HERE}:Game", options=options, workers=1, max_retries=1)
    bench, ended, events = attempted(words, lambda before: "stop<|end|>", config)
    assert len(ended.group.rollouts) == kept and list(ended.lost) == [reason]
    assert len(bench.asked) == (2 if options.get("verdict") == "retry" else 1)
    expected = {"retried": 1} if options.get("verdict") == "retry" else {"raised": 1} if "fails" in options else {}
    assert events == expected


def test_a_failed_environment_may_train_or_begin_again(words: PreTrainedTokenizerBase) -> None:
    config = EnvironmentConfig(name=f"{HERE}:Game", options={"fails": True}, workers=1, on_failure=Verdict.TRAIN)
    bench, ended, events = attempted(words, lambda before: "stop<|end|>", config)
    assert len(ended.group.rollouts) == 1 == len(bench.judged) and events == {"raised": 1}
    bench, ended, events = attempted(
        words, lambda before: "stop<|end|>", replace(config, on_failure=Verdict.RETRY, max_retries=2)
    )
    assert list(ended.lost) == [DropReason.FAILED] and len(bench.asked) == 3 and events == {"raised": 3, "retried": 2}


@pytest.mark.parametrize(
    ("settings", "event", "turns"),
    [
        ({"max_turns": 2}, Event.TOO_MANY_TURNS, 2),
        # The prompt has 72 bytes, special tokens being one each, and a response may have 100.
        ({"max_tokens": 160}, Event.NO_ROOM, 1),
        ({"max_tokens": 90}, Event.NO_ROOM, 0),
    ],
)
def test_limits_end_an_attempt_without_another_question(
    words: PreTrainedTokenizerBase, settings: dict[str, int], event: Event, turns: int
) -> None:
    for verdict in (Verdict.TRAIN, Verdict.MASK):
        config = replace(CALCULATOR, **settings, on_limit=verdict)
        bench, ended, events = attempted(words, lambda before: CALL, config)
        assert len(bench.asked) == turns and events == {event: 1}
        if verdict is Verdict.MASK or not turns:
            assert list(ended.lost) == [DropReason.MASKED]
        else:
            (rollout,) = ended.group.rollouts
            assert rollout.finish_reason is FinishReason.LENGTH and len(rollout.turns) == turns
            # What the environment answered has no room either.
            assert rollout.num_tokens == rollout.turns[-1][1]


def test_a_response_that_was_cut_off_is_not_put_to_the_environment(words: PreTrainedTokenizerBase) -> None:
    config = EnvironmentConfig(name=f"{HERE}:Game", options={"fails": True}, workers=1)
    bench, ended, events = attempted(words, lambda before: "stop", config)
    (rollout,) = ended.group.rollouts
    assert rollout.finish_reason is FinishReason.LENGTH and events == {Event.CUT_OFF: 1}


@pytest.mark.parametrize(
    ("name", "goes_on", "counted"),
    [("Game", True, {}), ("OtherGame", False, {Event.BEGUN_ANEW: 1}), ("UnknownGame", False, {Event.BEGUN_ANEW: 1})],
)
def test_an_interrupted_attempt_goes_on_if_its_environment_says_the_same(
    words: PreTrainedTokenizerBase, name: str, goes_on: bool, counted: dict[str, int]
) -> None:
    config = EnvironmentConfig(name=f"{HERE}:{name}", workers=1)
    reached = asyncio.Event()

    def talks(before: str) -> str:
        if before.count("go") == 2:
            reached.set()
        return "stop<|end|>" if before.count("go") == 3 else "go<|end|>"

    async def run() -> tuple[Bench, Bench, Ended, dict[str, int]]:
        first = Bench(words, talks, config)
        first.runner.start([task()], version=0)
        await asyncio.wait_for(reached.wait(), PATIENCE_S)
        first.runner.interrupt()
        (begun,) = await first.runner.snapshot()
        first.runner.cancel()
        first.pool.close()
        second = Bench(words, talks, config)
        try:
            (ended,), news = await second.run(begun)
        finally:
            second.pool.close()
        return first, second, ended, dict(news.events)

    first, second, ended, events = asyncio.run(run())
    (rollout,) = ended.group.rollouts
    assert events == counted and rollout.total_reward == 4.0 and len(rollout.turns) == 4
    assert rollout.messages[-1]["content"] == "stop" and len(rollout.messages) == 9
    assert second.asked[0].startswith(first.asked[-1]) if goes_on else "go" not in second.asked[0]


FORGETFUL = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if loop.last or message.role != 'assistant' %}{{ message.content }}"
    "{% else %}{{ message.content.split(')')[-1] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Writes of earlier turns only what follows their last bracket, as thinking templates do."""


def thinks(before: str) -> str:
    said = before.count("<|assistant|>")
    return "(hm)stop<|end|>" if said == 3 else f"(hm)go{said}<|end|>"


def test_a_history_that_is_written_anew_makes_sequences_of_one_attempt(words: PreTrainedTokenizerBase) -> None:
    forgetful = copy.deepcopy(words)
    forgetful.chat_template = FORGETFUL
    config = EnvironmentConfig(name=f"{HERE}:Game", workers=1)
    rendering = RenderingConfig(history=History.FORK, reasoning="none")
    bench, ended, events = attempted(
        forgetful, thinks, config, size=2, rendering=rendering, judge=lambda rollout: setattr(rollout, "reward", 2.0)
    )
    assert {each.reward for each in ended.group.rollouts} == {2.0}, "sequences have the reward of their attempt"
    assert events == {Event.FORKED: 4} and len(ended.group.rollouts) == 6
    first = ended.group.rollouts[:3]
    assert [(each.sample_index, each.sequence) for each in ended.group.rollouts] == [
        (index, sequence) for index in range(2) for sequence in range(3)
    ]
    one, two, three = (bench.text(each) for each in first)
    assert one.endswith("<|assistant|>(hm)go1<|end|>") and two.count("(hm)") == 1 == three.count("(hm)")
    assert "<|assistant|>go1<|end|>" in two and two.endswith("<|assistant|>(hm)go2<|end|>")
    assert "<|assistant|>go1<|end|>" in three and three.endswith("<|assistant|>(hm)stop<|end|>")
    # What is trained on is what an engine saw, turn by turn.
    assert sorted(bench.asked[:2]) == [bench.asked[0]] * 2 and [len(each.turns) for each in first] == [1, 1, 1]
    assert all(each.token_rewards is not None and each.token_rewards.sum() == 1.0 for each in first)
    assert len(bench.judged) == 2, "the last sequence of each attempt is judged"
    batch = pack([ended.group])
    assert batch.attempt is not None and batch.attempt.tolist() == [0, 0, 0, 1, 1, 1]
    assert rewards_by_sequence(batch).tolist() == [5.0] * 6


def test_an_attempt_that_has_forked_goes_on_in_its_last_sequence(words: PreTrainedTokenizerBase) -> None:
    forgetful = copy.deepcopy(words)
    forgetful.chat_template = FORGETFUL
    config = EnvironmentConfig(name=f"{HERE}:Game", workers=1)
    rendering = RenderingConfig(history=History.FORK, reasoning="none")
    reached = asyncio.Event()

    def talks(before: str) -> str:
        if before.count("<|assistant|>") == 3:
            reached.set()
        return thinks(before)

    async def run() -> tuple[Bench, Ended, dict[str, int]]:
        first = Bench(forgetful, talks, config, rendering=rendering)
        first.runner.start([task()], version=0)
        await asyncio.wait_for(reached.wait(), PATIENCE_S)
        first.runner.interrupt()
        (begun,) = await first.runner.snapshot()
        first.runner.cancel()
        first.pool.close()
        second = Bench(forgetful, talks, config, rendering=rendering)
        try:
            (ended,), news = await second.run(begun)
        finally:
            second.pool.close()
        return second, ended, dict(news.events)

    second, ended, events = asyncio.run(run())
    assert events == {} and [each.sequence for each in ended.group.rollouts] == [0, 1, 2]
    assert second.asked == [] or second.asked[0].count("<|assistant|>") == 3
    assert ended.group.rollouts[-1].total_reward == 1.0 and len(ended.group.rollouts[-1].messages) == 7
