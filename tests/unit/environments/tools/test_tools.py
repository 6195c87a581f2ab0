"""Tools as the policy meets them: what is offered, what is answered, and what a bad call or a bad tool comes to."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlframe.data.builtin.multiplication import CALCULATOR
from rlframe.environments.base import Step, Turn, find_environment
from rlframe.environments.config import EnvironmentConfig
from rlframe.environments.tools.calculator import Calculator, CalculatorConfig, value_of
from rlframe.types.input import ModelInput
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason
from rlframe.utils.errors import ConfigError

PROMPT = Prompt(id="p", messages=({"role": "user", "content": "12*13="},), text="", input=ModelInput(()))
FILE = '''
import asyncio
import time


def lookup(word: str, times: int = 1, table: dict | None = None) -> str:
    """Looks a word up.

    Args:
        word: the word
        times: how often it is said
        table: what is known
    """
    return " ".join([(table or {})[word]] * times)


async def slow(seconds: float) -> dict:
    """Waits.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def blocks(seconds: float) -> str:
    """Blocks.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "x" * 1000


def leaves(how: str) -> str:
    """Ends as programs do.

    Args:
        how: the way
    """
    raise {
        "exit": SystemExit(2),
        "interrupt": KeyboardInterrupt(),
        "cancel": asyncio.CancelledError(),
        "stop": StopIteration(),
    }[how]


def named(name: str) -> str:
    """Says the name of a file as os.listdir does.

    Args:
        name: the name
    """
    return name + "\\udc80"


def untyped(word):
    """Says nothing of its argument."""
'''


def called(*calls: tuple[str, dict[str, Any]], malformed: Sequence[str] = ()) -> Turn:
    """A turn with these calls."""
    message: Message = {"role": "assistant", "content": ""}
    if calls:
        message["tool_calls"] = [
            {"id": str(index), "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return Turn(message=message, text="", finish_reason=FinishReason.STOP, malformed=tuple(malformed))


def session(turns: Sequence[Turn], *, prompt: Prompt = PROMPT, **options: Any) -> tuple[list[str], list[Step]]:
    """The names of the tools that a session offers, and its answers to turns."""

    async def run() -> tuple[list[str], list[Step]]:
        kind, settings = find_environment(EnvironmentConfig(name="tools", options=options))
        kind.prepare(settings)
        made = kind(settings)
        assert list(await made.reset(prompt, seed=0)) == list(prompt.messages)
        steps = [await made.step(turn) for turn in turns]
        await made.close()
        return [tool["function"]["name"] for tool in made.tools], steps

    return asyncio.run(run())


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE)
    return str(tmp_path / "mine.py")


def contents(step: Step) -> list[str]:
    return [message["content"] for message in step.messages]


def test_calls_are_answered_in_order_and_a_turn_without_any_ends_the_attempt() -> None:
    offered, (answered, over) = session(
        [called(("calculator", {"expression": "12*13"}), ("calculator", {"expression": "2**0.5"})), called()],
        tools={"calculator": {"name": "calculator"}},
    )
    assert offered == ["calculator"]
    assert answered.messages == [
        {"role": "tool", "name": "calculator", "content": "156", "tool_call_id": "0"},
        {"role": "tool", "name": "calculator", "content": "1.41421356237", "tool_call_id": "1"},
    ]
    assert over.done and not over.messages
    assert over.metrics == {"tool_calls": 2.0, "failed_tool_calls": 0.0, "malformed_tool_calls": 0.0}


def test_what_cannot_be_called_is_an_answer_that_the_policy_reads() -> None:
    _, (answered,) = session(
        [
            called(
                ("calculator", {"expression": "1/0"}),
                ("calculator", {"expression": ["1"]}),
                ("calculator", {}),
                # Python would compute 10 to that power, for minutes.
                ("calculator", {"expression": "round(7, -10**9)"}),
                ("nobody", {}),
                malformed=["the call is not JSON"],
            )
        ],
        tools={"calculator": {"name": "calculator"}},
    )
    assert contents(answered) == [
        "Error: '1/0' has no value: division by zero",
        "Error: expression must be text, got ['1']",
        "Error: expression must be text, got None",
        "Error: 'round(7, -10**9)' has no value: round takes at most 400 digits",
        "Error: there is no tool 'nobody'",
        "Error: the call is not JSON",
    ]
    assert [message["role"] for message in answered.messages] == ["tool"] * 5 + ["user"]
    assert answered.metrics == {"tool_calls": 5.0, "failed_tool_calls": 5.0, "malformed_tool_calls": 1.0}


@pytest.mark.parametrize(
    ("expression", "value"), [("1**5000", 1), ("(-1)**5001", -1), ("2**-5000", 0), ("2**1023", 2**1023)]
)
def test_a_power_with_a_large_exponent_need_not_be_large(expression: str, value: int) -> None:
    assert value_of(expression) == value


def test_functions_of_ones_own_are_described_by_their_hints_and_docstrings(file: str) -> None:
    offered, (answered,) = session(
        [called(("lookup", {"word": "a", "times": 2}), ("lookup", {"word": "b"}), ("slow", {"seconds": 0.01}))],
        tools={
            "lookup": {"name": f"{file}:lookup", "options": {"table": {"a": "alpha"}}},
            "slow": {"name": f"{file}:slow"},
        },
    )
    assert offered == ["lookup", "slow"]
    assert contents(answered) == ["alpha alpha", "Error: KeyError: 'b'", '{"waited": 0.01}']


def test_what_the_policy_must_not_see_is_not_in_the_schema(file: str) -> None:
    kind, settings = find_environment(
        EnvironmentConfig(name="tools", options={"tools": {"l": {"name": f"{file}:lookup", "options": {"table": {}}}}})
    )
    kind.prepare(settings)
    ((tool, config),) = kind.kinds  # type: ignore[attr-defined]
    (schema,) = tool(config).schemas
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "word": {"type": "string", "description": "the word"},
            "times": {"type": "integer", "description": "how often it is said"},
        },
        "required": ["word"],
    }


def test_what_is_no_unicode_in_an_answer_is_replaced(file: str) -> None:
    _, (answered,) = session([called(("named", {"name": "a"}))], tools={"named": {"name": f"{file}:named"}})
    assert contents(answered) == ["a?"] and answered.calls == ["done"]
    with pytest.raises(ValueError, match=r"the content of a message must be Unicode, got 'a\\udc80'"):
        Step(messages=[{"role": "user", "content": "a\udc80"}])


def test_a_tool_that_would_end_its_process_is_an_answer(file: str) -> None:
    calls = [("leaves", {"how": how}) for how in ("exit", "interrupt", "cancel")]
    _, (answered,) = session([called(*calls)], tools={"leaves": {"name": f"{file}:leaves"}})
    assert contents(answered) == ["Error: SystemExit: 2", "Error: KeyboardInterrupt: ", "Error: CancelledError: "]
    assert answered.calls == ["failed"] * 3


def test_a_tool_that_finds_nothing_with_next_is_an_answer_at_once(file: str) -> None:
    calls = [("leaves", {"how": "stop"})]
    _, (answered,) = session([called(*calls)], tools={"leaves": {"name": f"{file}:leaves"}}, call_timeout_s=5)
    assert contents(answered) == ["Error: RuntimeError: StopIteration()"]
    assert answered.calls == ["failed"]


def test_limits_of_calls_are_told(file: str) -> None:
    tools = {"slow": {"name": f"{file}:slow"}, "blocks": {"name": f"{file}:blocks"}}
    _, (answered,) = session(
        [called(("slow", {"seconds": 9}), ("blocks", {"seconds": 0.01}), ("slow", {"seconds": 0}))],
        tools=tools,
        call_timeout_s=0.3,
        max_calls_per_turn=2,
        max_answer_characters=100,
    )
    late, long, further = contents(answered)
    assert late == "Error: took longer than 0.3 s"
    assert len(long) <= 100 and "\n... 934 characters left out ...\n" in long
    assert further == "Error: a turn has at most 2 calls"


def test_tools_that_cannot_be_are_refused_by_their_key(file: str) -> None:
    for name, said in {
        "nobody": "environment.options.tools.mine.name must be one of calculator",
        f"{file}:untyped": "environment.options.tools.mine.name: 'untyped' cannot be a tool: Argument word is missing",
        f"{file}:nobody": f"environment.options.tools.mine.name: '{file}:nobody'",
    }.items():
        kind, settings = find_environment(EnvironmentConfig(name="tools", options={"tools": {"mine": {"name": name}}}))
        with pytest.raises(ConfigError) as caught:
            kind.prepare(settings)
        assert str(caught.value.faults[0]).startswith(said), str(caught.value)
    kind, settings = find_environment(EnvironmentConfig(name="tools"))
    with pytest.raises(ConfigError, match="environment.options.tools must name at least one tool"):
        kind.prepare(settings)


def test_an_option_that_a_function_does_not_take_is_refused(file: str) -> None:
    tools = {"mine": {"name": f"{file}:lookup", "options": {"tabel": {}}}}
    kind, settings = find_environment(EnvironmentConfig(name="tools", options={"tools": tools}))
    with pytest.raises(ConfigError) as caught:
        kind.prepare(settings)
    assert [str(fault) for fault in caught.value.faults] == [
        "environment.options.tools.mine.options.tabel must be one of word, times, table; did you mean table?"
    ]


@pytest.mark.parametrize(
    ("most", "told"),
    [
        (50, "0" * 8 + "\n... 84 characters left out ...\n" + "9" * 8),
        # There is no room for the words.
        (20, "0" * 20),
    ],
)
def test_an_answer_that_is_too_long_says_how_much_is_left_out(file: str, most: int, told: str) -> None:
    table = {"a": "0" * 50 + "9" * 50}
    tools = {"mine": {"name": f"{file}:lookup", "options": {"table": table}}}
    _, (answered,) = session([called(("lookup", {"word": "a"}))], tools=tools, max_answer_characters=most)
    assert contents(answered) == [told] and len(told) <= most


def test_functions_of_one_name_are_refused(file: str) -> None:
    twice = {"first": {"name": "calculator"}, "second": {"name": "calculator"}}
    kind, settings = find_environment(EnvironmentConfig(name="tools", options={"tools": twice}))
    with pytest.raises(
        ConfigError, match="tools.second: offers the function 'calculator', as first does; set options.function"
    ):
        kind.prepare(settings)
    # What the data describes as the tool does is offered once.
    own = Calculator(CalculatorConfig()).schemas[0]
    offered, _ = session([], tools={"mine": {"name": "calculator"}}, prompt=replace(PROMPT, tools=(own,)))
    assert offered == ["calculator"]
    other = {"type": "function", "function": {**own["function"], "description": "Guesses."}}
    with pytest.raises(ValueError, match="tools.mine: offers the function 'calculator', as the prompt does"):
        session([], tools={"mine": {"name": "calculator"}}, prompt=replace(PROMPT, tools=(other,)))


def test_a_call_must_end_before_its_attempt_does() -> None:
    config = EnvironmentConfig(name="tools", options={"call_timeout_s": 60.0}, step_timeout_s=60.0)
    kind, settings = find_environment(config)
    (fault,) = kind.faults(settings, config)
    assert str(fault).startswith("environment.options.call_timeout_s must be below environment.step_timeout_s=60, got")
    assert list(kind.faults(settings, EnvironmentConfig(name="tools", step_timeout_s=60.5))) == []


def test_a_tool_must_end_its_call_before_the_call_is_ended() -> None:
    tools = {"code": {"name": "python", "options": {"timeout_s": 30.0}}, "mine": {"name": "nowhere.py:f"}}
    config = EnvironmentConfig(name="tools", options={"tools": tools})
    kind, settings = find_environment(config)
    (fault,) = kind.faults(settings, config)
    assert str(fault) == (
        "environment.options.tools.code.options.timeout_s must be below environment.options.call_timeout_s=30, got "
        "30.0: which ends the call before the tool can say what it did; raise environment.options.call_timeout_s"
    )
    tools["code"]["options"]["timeout_s"] = 29.5
    kind, settings = find_environment(config)
    assert list(kind.faults(settings, config)) == []


def test_the_built_in_homework_has_the_calculators_own_schema() -> None:
    assert Calculator(CalculatorConfig()).schemas == [CALCULATOR]
