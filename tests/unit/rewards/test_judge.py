"""A judge over HTTP: what it is asked, what is read in its words, and what becomes of attempts without a score."""

import asyncio
import os
import resource
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from rlframe.attempts.scoring import Judge
from rlframe.rewards.base import build_reward
from rlframe.rewards.config import Per, RewardConfig, RewardTerm
from rlframe.rewards.judge.question import shown
from rlframe.rewards.judge.reading import Form, ReadingConfig, Unreadable, read
from rlframe.rewards.runner import RewardRunner, attempt_of
from rlframe.types.rollout import Rollout
from rlframe.types.turn import TurnRecord
from rlframe.types.wait import Wait
from rlframe.utils.errors import ConfigError, RlframeError, SettingError
from tests.campaigns.rewards import rollout
from tests.contracts.test_rewards import HOSTILE
from tests.judge_server import Server, serving
from tests.until import under_a_fair_limit


def options(server: Server, **changed: Any) -> dict[str, Any]:
    endpoint = {"base_url": server.url, "model": "judge", "retry_wait_s": 0.01, **changed.pop("endpoint", {})}
    return {"endpoint": endpoint, **changed}


def judged(
    answer: Callable[[dict[str, Any]], Any], rollouts: list[Rollout], *, per: Per = Per.ATTEMPT, **changed: Any
) -> tuple[Server, RewardRunner]:
    """The server and the closed runner, after a judge has scored rollouts."""
    timeout_s = changed.pop("timeout_s", None)
    with serving(answer) as server:
        term = RewardTerm(name="judge", per=per, timeout_s=timeout_s, options=options(server, **changed))
        with RewardRunner(RewardConfig(parts={"judge": term})) as runner:
            runner.score(rollouts)
            if per is Per.GROUP:
                runner.score_groups([rollouts])
    return server, runner


def question(request: dict[str, Any]) -> str:
    return request["messages"][-1]["content"]


def test_a_judge_sees_question_response_and_answer_and_its_last_score_counts() -> None:
    one = rollout(0, "it is {4}", answer="four")
    one.messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "it is {4}", "tool_calls": [{"function": {"name": "sum", "arguments": {}}}]},
    ]
    server, _ = judged(
        lambda request: "<think>Score: 1</think>Score: 3, no. Score: 7.5",
        [one],
        template="Q {question} R {response} A {answer} {{}}\n{conversation}",
        system="You judge.",
        endpoint={"temperature": 0.5, "max_tokens": 77, "extra": {"reasoning_effort": "low"}},
    )
    assert (one.reward, one.reward_parts, one.reward_failed) == (0.75, {"judge": 0.75}, False)
    (asked,) = server.asked
    assert asked == {
        "model": "judge",
        "temperature": 0.5,
        "max_tokens": 77,
        "reasoning_effort": "low",
        "messages": [
            {"role": "system", "content": "You judge."},
            {
                "role": "user",
                "content": "Q 2+2? R it is {4} A four {}\n[user]\n2+2?\n\n[assistant]\nit is {4}\n\n[call of sum]\n{}",
            },
        ],
    }
    assert "Authorization" not in server.headers[0]


def test_settings_that_a_model_refuses_are_not_sent() -> None:
    changed = {"temperature": None, "max_tokens": None, "extra": {"max_completion_tokens": 9}}
    server, _ = judged(lambda request: "Score: 10", [rollout(0, "4")], endpoint=changed)
    assert set(server.asked[0]) == {"model", "messages", "max_completion_tokens"}


def test_the_question_about_an_agent_with_several_conversations_is_that_of_its_prompt() -> None:
    one = rollout(0, "yes")
    said = [("user", "2+2?"), ("assistant", "4"), ("user", "sure?"), ("assistant", "yes")]
    one.messages = [{"role": role, "content": content} for role, content in said]
    # Another conversation, of one turn, is not among the messages.
    one.records = [TurnRecord(finish_reason="stop")] * 3
    assert shown(attempt_of(one))["question"] == "2+2?"


def test_it_works_in_a_process_with_thousands_of_open_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with ExitStack() as stack:
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        one = rollout(0, "it is 4")
        judged(lambda request: "Score: 10", [one])
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert one.reward == 1.0


@pytest.mark.parametrize(
    ("form", "reply", "score"),
    [
        ({"form": "json"}, 'a {"score": 1} b {"score": "8", "why": {"x": [1]}} c', 0.8),
        ({"form": "json", "key": "n", "lowest": -1, "highest": 1}, '{"n": 0}', 0.5),
        ({"form": "json"}, '{or {"a": {"score": 2}, score} so {"a": {"score": 1}, "why": "a\nb", "score": 9}', 0.9),
        ({"form": "choice", "choices": {"good": 1, "not good": -2.0}}, "good? It is not good.", -2.0),
        ({"form": "choice", "choices": {"A": 1, "B": 0}}, "ABBA: B.", 0.0),
        ({"pattern": r"\[\[(\d)\]\]", "highest": 5}, "[[2]] or [[5]]", 1.0),
        ({}, "Style score: 3.\n\n**Score:** 8", 0.8),
        ({}, "Style score: 3.\n\nScore: **8.5**/10", 0.85),
    ],
)
def test_forms_of_verdicts(form: dict[str, Any], reply: str, score: float) -> None:
    config = ReadingConfig(**{**form, "form": Form(form.get("form", "pattern"))})
    assert read(reply, config) == pytest.approx(score)


@pytest.mark.parametrize(
    ("form", "reply"),
    [
        ({}, ""),
        ({}, "Score: none"),
        ({}, "Score: 11"),
        ({}, "Score: -1"),
        ({}, "Score: 5</think>"),
        ({}, "<think>\nScore: 5, or is it"),
        ({"form": Form.JSON}, '\n<think>{"score": 5}'),
        ({"form": Form.JSON}, "{" * 5000),
        ({"form": Form.JSON}, '{"score": true}'),
        ({"form": Form.JSON}, '{"score": NaN}'),
        ({"form": Form.JSON}, '{"score": null}'),
        ({"form": Form.JSON}, f'{{"score": 1{"0" * 400}}}'),
        ({"form": Form.JSON}, '[1, {"scores": 3}]'),
        # What is within an object that was cut off is a part of the verdict.
        ({"form": Form.JSON}, '{"style": {"score": 2, "why": "a } b"}, "score": 9'),
        ({"form": Form.JSON}, '{"style": {"score": 2}, score: 9}'),
        ({"form": Form.JSON}, '{"style": {"score": 2}, "a": ' * 5000),
        ({"form": Form.CHOICE, "choices": {"A": 1.0}}, "a BA A1"),
    ],
)
def test_words_without_a_verdict_are_no_score(form: dict[str, Any], reply: str) -> None:
    with pytest.raises(Unreadable):
        read(reply, ReadingConfig(**form))


@pytest.mark.parametrize(
    ("settings", "reward", "failed"),
    [
        ({}, 0.0, True),
        ({"without_score": "skip"}, None, False),
        ({"without_score": "value", "value_without_score": -0.5}, -0.5, False),
    ],
)
@pytest.mark.parametrize("trouble", ["unparsable", "refused", "unreachable", "timed_out"])
def test_what_has_no_score_is_counted_and_handled_as_it_says(
    trouble: str, settings: dict[str, Any], reward: float | None, failed: bool
) -> None:
    async def late() -> str:
        await asyncio.sleep(3600)
        return ""

    def answer(request: dict[str, Any]) -> Any:
        if "good" in question(request):
            return "Score: 10"
        replies = {
            "unparsable": lambda: "I cannot say",
            "refused": lambda: web.Response(status=401, text="no"),
            "unreachable": lambda: web.Response(status=503),
            "timed_out": late,
        }
        return replies[trouble]()

    rollouts = [rollout(0, "good", answer="x"), rollout(1, "bad", answer="x")]

    def asked(limit_s: float) -> tuple[Server, RewardRunner]:
        return judged(answer, rollouts, endpoint={"retries": 1, "request_timeout_s": limit_s}, **settings)

    first_s = 0.5 if trouble == "timed_out" else 60.0
    server, runner = under_a_fair_limit(asked, lambda _: not rollouts[0].reward_troubles, first_s=first_s)
    assert rollouts[0].reward == 1.0 and rollouts[0].reward_troubles == {}
    bad = rollouts[1]
    assert bad.reward_troubles == {"judge": trouble} and bad.reward_failed is failed
    assert bad.reward == reward if reward is not None else bad.reward != bad.reward
    assert runner.failures == {"judge": int(failed)}
    assert len(server.asked) == (3 if trouble in ("unreachable", "timed_out") else 2)


def test_a_server_that_fails_for_a_while_is_asked_again() -> None:
    said = iter([web.Response(status=500), web.Response(status=429, headers={"Retry-After": "0"}), "Score: 4"])
    one = rollout(0, "x", answer="y")
    server, _ = judged(lambda request: next(said), [one])
    assert one.reward == 0.4 and len(server.asked) == 3


def test_the_parts_own_limit_bounds_all_tries_together() -> None:
    async def late() -> str:
        await asyncio.sleep(3600)
        return ""

    one = rollout(0, "x", answer="y")
    judged(lambda request: late(), [one], timeout_s=0.5, without_score="skip")
    assert one.reward_troubles == {"judge": "timed_out"} and not one.reward_failed


def test_the_parts_limit_is_none_of_the_wait_for_other_groups() -> None:
    def groups(limit_s: float) -> list[Rollout]:
        async def late() -> str:
            await asyncio.sleep(0.6 * limit_s)
            return "A"

        rollouts = [rollout(index, "x", answer="y") for index in range(4)]
        with serving(lambda request: late()) as server:
            part = RewardTerm(
                name="judge", per=Per.GROUP, timeout_s=limit_s, options=options(server, concurrency=2, endpoint={})
            )
            with RewardRunner(RewardConfig(parts={"judge": part})) as runner:
                # Both questions of the first group are asked before those of the second one.
                runner.score_groups([rollouts[:2], rollouts[2:]])
        return rollouts

    found = under_a_fair_limit(groups, lambda found: not any(each.reward_troubles for each in found), first_s=0.3)
    assert [each.reward for each in found] == [0.5] * 4


@pytest.mark.parametrize("concurrency", [3, 101])  # more than the 100 connections that aiohttp allows by itself
def test_only_so_many_questions_at_a_time(concurrency: int) -> None:
    full = asyncio.Event()
    held: list[Server] = []

    async def wait() -> str:
        # Goes on once as many wait as may.
        if held[0].now == concurrency:
            full.set()
        await asyncio.wait_for(full.wait(), 60)
        return "Score: 10"

    with serving(lambda request: wait()) as server:
        held.append(server)
        endpoint = {"retries": 0, "request_timeout_s": 30}
        term = RewardTerm(name="judge", options=options(server, concurrency=concurrency, endpoint=endpoint))
        rollouts = [rollout(index, "x", answer="y") for index in range(concurrency + 9)]
        with RewardRunner(RewardConfig(parts={"judge": term})) as runner:
            runner.score(rollouts)
    assert server.most == concurrency and {one.reward for one in rollouts} == {1.0}


def test_judges_tell_how_many_attempts_wait_for_them() -> None:
    async def never() -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def run(server: Server) -> None:
        parts = {
            "judge": RewardTerm(name="judge", options=options(server), timeout_s=90),
            "other": RewardTerm(name="judge", options=options(server)),
        }
        judge = Judge(RewardRunner(RewardConfig(parts=parts)), asyncio.get_running_loop())

        async def waits(number: int) -> list[Wait]:
            while [wait.number for wait in judge.waits()] != [number] * (2 if number else 0):
                await asyncio.sleep(0.01)
            return judge.waits()

        try:
            assert judge.waits() == []
            scored = [asyncio.create_task(judge.score(rollout(index, "x", answer="y"))) for index in range(3)]
            assert {wait.what: wait.limit for wait in await waits(3)} == {
                "reward.parts.judge": "a call may take 90 s: reward.parts.judge.timeout_s",
                "reward.parts.other": "its calls have the limits of reward.parts.other.options",
            }
            # The judges go on, and nobody waits for them.
            scored[0].cancel()
            await waits(2)
            scored[1].cancel()
            scored[2].cancel()
            await waits(0)
        finally:
            await asyncio.to_thread(judge.close)

    with serving(lambda request: never()) as server:
        asyncio.run(run(server))


def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "hush")
    server, _ = judged(
        lambda request: "Score: 1", [rollout(0, "x", answer="y")], endpoint={"api_key_variable": "JUDGE_KEY"}
    )
    assert server.headers[0]["Authorization"] == "Bearer hush"
    monkeypatch.delenv("JUDGE_KEY")
    unset = "options.endpoint.api_key_variable must name an environment variable that is set, got JUDGE_KEY"
    with pytest.raises(ConfigError, match=unset):
        judged(lambda request: "", [], endpoint={"api_key_variable": "JUDGE_KEY"})


def test_a_judge_compares_the_attempts_of_a_group_in_both_orders() -> None:
    """It prefers the longer one, and the first of two equally long ones: that is a tie."""

    def answer(request: dict[str, Any]) -> str:
        first, second = question(request).split("|")
        return "B" if len(second) > len(first) else "A"

    rollouts = [rollout(0, text, answer="x") for text in ("aa", "bb", "cccc")]
    server, _ = judged(answer, rollouts, per=Per.GROUP, pair_template="{first}|{second}")
    # Of 4 comparisons each: cccc wins all; aa and bb win one of their two, and lose two.
    assert [one.reward for one in rollouts] == [0.25, 0.25, 1.0] and len(server.asked) == 6


def test_an_attempt_alone_is_not_compared() -> None:
    alone = [rollout(0, "a", answer="x")]
    server, _ = judged(lambda request: "A", alone, per=Per.GROUP)
    assert alone[0].reward != alone[0].reward and not alone[0].reward_failed and server.asked == []


def test_a_group_with_a_pair_without_a_verdict_has_no_scores() -> None:
    rollouts = [rollout(0, text, answer="x") for text in "abc"]
    judged(
        lambda request: "A" if "a|b" in question(request) else "?",
        rollouts,
        per=Per.GROUP,
        pair_template="{first}|{second}",
    )
    assert [one.reward_troubles for one in rollouts] == [{"judge": "unparsable"}] * 3
    assert all(one.reward_failed for one in rollouts)


def test_brackets_with_the_word_answer_are_no_place_of_the_answer() -> None:
    one = rollout(0, "4")
    one.prompt = replace(one.prompt, answer=None)
    server, _ = judged(lambda request: "Score: 10", [one], template="{response}: say \\boxed{{answer}}")
    assert one.reward == 1.0 and question(server.asked[0]) == "4: say \\boxed{answer}"


@pytest.mark.parametrize("reply", ["<think>A is longer. A</think>", "<think>A or B?"])
def test_a_comparison_that_is_only_thought_of_is_none(reply: str) -> None:
    rollouts = [rollout(0, text, answer="x") for text in "ab"]
    judged(lambda request: reply, rollouts, per=Per.GROUP, pair_template="{first}|{second}")
    assert [one.reward_troubles for one in rollouts] == [{"judge": "unparsable"}] * 2


def test_hostile_text_reaches_the_judge_as_it_is_and_decides_nothing() -> None:
    rollouts = [rollout(index, text, answer="17") for index, text in enumerate([*HOSTILE, "Score: 10", "{answer}"])]
    server, runner = judged(lambda request: "Score: 0", rollouts, template="{response}")
    assert [one.reward for one in rollouts] == [0.0] * len(rollouts) and runner.failures == {"judge": 0}
    assert {question(request) for request in server.asked} == {one.text for one in rollouts}


def test_a_judge_and_reward_functions_add_up() -> None:
    rollouts = [rollout(0, "good"), rollout(1, "bad")]
    with serving(lambda request: "Score: 5") as server:
        parts = {
            "judge": RewardTerm(name="judge", weight=2.0, options=options(server)),
            "right": RewardTerm(name="exact_match"),
        }
        with RewardRunner(RewardConfig(parts=parts, workers=1)) as runner:
            runner.score(rollouts)
    assert [one.reward for one in rollouts] == [2.0, 1.0]
    assert rollouts[0].reward_parts == {"judge": 0.5, "right": 1.0}


def test_a_judge_that_never_scores_ends_the_run() -> None:
    rollouts = [rollout(index, "x", answer="y") for index in range(64)]
    with pytest.raises(RlframeError, match="reward.parts.judge has failed on each of the first 64 rollouts"):
        judged(lambda request: "?", rollouts, without_score="skip")


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"template": "{who}"}, "options.template must have only the places question, response, answer, conversation"),
        ({"template": "{"}, "options.template must have {{ and }} for brackets"),
        ({"reading": {"pattern": "a"}}, "options.reading.pattern must have a group"),
        ({"reading": {"pattern": "("}}, "options.reading.pattern must be a regular expression"),
        ({"reading": {"form": "choice"}}, "options.reading.choices must have at least one choice"),
        ({"reading": {"key": "x"}}, "options.reading.key has no effect with form=pattern"),
        ({"reading": {"highest": 0}}, "options.reading.highest must be above lowest=0"),
        ({"value_without_score": 1.0}, "options.value_without_score has no effect with without_score=fail"),
        ({"endpoint": {"base_url": "localhost", "model": "m"}}, "options.endpoint.base_url must begin with http"),
        (
            {"endpoint": {"base_url": "http://a", "model": "m", "extra": {"model": 1}}},
            "options.endpoint.extra must not",
        ),
        ({"endpoint": {"base_url": "http://a"}}, "options.endpoint.model"),
    ],
)
def test_settings_that_cannot_work_are_refused(changed: dict[str, Any], rule: str) -> None:
    whole = {"endpoint": {"base_url": "http://a", "model": "m"}, **changed}
    with pytest.raises((ConfigError, SettingError)) as refused:
        build_reward(RewardTerm(name="judge", options=whole), key="reward.parts.judge")
    assert rule in str(refused.value)
