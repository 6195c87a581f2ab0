"""An environment that answers calls of tools, until the policy answers without one."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from rlframe.environments.base import Environment, Step, Turn
from rlframe.environments.config import EnvironmentConfig
from rlframe.environments.tools.base import Tool, ToolError, answer_to
from rlframe.environments.tools.choice import KEY, ToolTerm, build_tools, built
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.types.turn import CallEnd
from rlframe.utils.bounds import Range, Seconds, check_bounds
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.outside import is_outside

LONGEST_ANSWER = 1 << 18
"""Greatest number of characters of a result, whatever `max_answer_characters` is."""
LEFT_OUT = "\n... {} characters left out ...\n"
"""Stands in the middle of a result that is too long."""


@dataclass(kw_only=True, slots=True)
class ToolsConfig:
    """Settings of tools and of their calls."""

    tools: dict[str, ToolTerm] = field(default_factory=dict)
    """The tools, by a name of one's choice."""
    call_timeout_s: Seconds = 30.0
    """Seconds that one call may take once it has a place. The policy is told of one that takes longer. It must be less
    than environment.step_timeout_s, which ends the attempt."""
    max_calls_per_turn: Annotated[int, Range(1, 10_000)] = 16
    """Greatest number of calls of one turn. The policy is told that further ones were not done."""
    max_answer_characters: Annotated[int, Range(1, LONGEST_ANSWER)] = 8192
    """Greatest number of characters of a result. A longer one is cut in the middle, which the policy sees."""

    def __post_init__(self) -> None:
        check_bounds(self)


class Tools(Environment):
    """Offers tools. Calls of one turn run at the same time. A call that fails is an answer like any other: the policy
    reads why. A turn without calls is the policy's last word."""

    deterministic: ClassVar[bool] = True

    @classmethod
    def faults(cls, config: ToolsConfig, sessions: EnvironmentConfig) -> Iterator[Fault]:
        """Yields a fault if an attempt would end before its policy is told that a call took too long."""
        if config.call_timeout_s >= sessions.step_timeout_s:
            yield Fault(
                "environment.options.call_timeout_s",
                f"must be below environment.step_timeout_s={sessions.step_timeout_s:g}",
                got=config.call_timeout_s,
                why="which ends the attempt before the policy is told of the call",
            )
        for name, term in config.tools.items():
            # A user's code is not imported here. What cannot be built is refused where sessions start.
            try:
                tool, settings = (Tool, None) if is_outside(term.name) else built(term, f"{KEY}.{name}")
            except ConfigError:
                continue
            limit_s = tool.limit_s(settings)
            if limit_s is not None and limit_s >= config.call_timeout_s:
                yield Fault(
                    f"{KEY}.{name}.options.timeout_s",
                    f"must be below environment.options.call_timeout_s={config.call_timeout_s:g}",
                    got=limit_s,
                    why="which ends the call before the tool can say what it did",
                    hint="raise environment.options.call_timeout_s",
                )

    @classmethod
    def prepare(cls, config: ToolsConfig) -> None:
        """Prepares the tools."""
        cls.kinds = build_tools(config.tools)
        for tool, settings in cls.kinds:
            tool.prepare(settings)
        named = {key: kind.names(settings) for key, (kind, settings) in zip(config.tools, cls.kinds, strict=True)}
        hint = (
            "set options.function of one of them to another name, if it has that option, or options.functions of the "
            "tool mcp to others of its server"
        )
        faults = [Fault(f"{KEY}.{key}", said=f"{said}; {hint}") for key, said in doubled(named)]
        if faults:
            raise ConfigError(faults)

    kinds: ClassVar[Sequence[tuple[type[Tool], Any]]] = ()
    """Class and settings of each tool."""

    def __init__(self, config: ToolsConfig):
        self._config = config
        self._all = [tool(settings) for tool, settings in self.kinds]
        self._by_name: dict[str, Tool] = {}
        self._counts = {"tool_calls": 0, "failed_tool_calls": 0, "malformed_tool_calls": 0}

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        """Returns the prompt's messages, and offers the tools."""
        await asyncio.gather(*(tool.open(prompt, seed=seed) for tool in self._all))
        # The data may have described a tool that the environment answers.
        known = [schema for tool in self._all for schema in tool.schemas]
        offered = {"the prompt": [schema for schema in prompt.tools if schema not in known]}
        offered |= {f"{KEY}.{key}": tool.schemas for key, tool in zip(self._config.tools, self._all, strict=True)}
        names = {place: [schema["function"]["name"] for schema in schemas] for place, schemas in offered.items()}
        for key, said in doubled(names):
            raise ValueError(f"{key}: {said}")
        self._by_name = {schema["function"]["name"]: tool for tool in self._all for schema in tool.schemas}
        self.tools = [schema for schemas in offered.values() for schema in schemas]
        return prompt.messages

    async def step(self, turn: Turn) -> Step:
        """Answers the calls of a turn. One without calls ends the attempt."""
        calls = turn.message.get("tool_calls", [])
        self._counts["malformed_tool_calls"] += len(turn.malformed)
        if not calls and not turn.malformed:
            return Step(done=True, metrics=self._counts)
        most = self._config.max_calls_per_turn
        answers = await asyncio.gather(*(self._answer(call) for call in calls[:most]))
        ends = [*(end for _, end in answers), *(CallEnd.NOT_DONE for _ in calls[most:])]
        messages = [message for message, _ in answers]
        messages += [answer_to(call, f"Error: a turn has at most {most} calls") for call in calls[most:]]
        if turn.malformed:
            told = "\n".join(f"Error: {why}" for why in turn.malformed)
            messages.append({"role": "user", "content": self._cut(told)})
        return Step(messages=messages, metrics=self._counts, calls=ends)

    async def close(self) -> None:
        """Releases what the tools hold."""
        await asyncio.gather(*(tool.close() for tool in self._all))

    async def _answer(self, call: Mapping[str, Any]) -> tuple[Message, CallEnd]:
        """Returns the result of a call, or why there is none, and how it ended."""
        self._counts["tool_calls"] += 1
        function, end = call["function"], CallEnd.FAILED
        limit, tool = asyncio.timeout(None), self._by_name.get(function["name"])
        try:
            if tool is None:
                raise ToolError(f"there is no tool {function['name']!r:.80}")
            async with tool.place():
                limit = asyncio.timeout(self._config.call_timeout_s)
                async with limit:
                    result = await tool.call(function["name"], function["arguments"])
            return answer_to(call, self._cut(result)), CallEnd.DONE
        except TimeoutError as error:
            end = CallEnd.TIMED_OUT if limit.expired() else end
            why = f"took longer than {self._config.call_timeout_s:g} s" if limit.expired() else f"TimeoutError: {error}"
        except ToolError as error:
            why = str(error)
        except BaseException as error:  # A tool that fails, by sys.exit too, is an answer that the policy reads.
            if isinstance(error, GeneratorExit) or _is_cancelled():
                raise
            why = f"{type(error).__name__}: {error}"
        self._counts["failed_tool_calls"] += 1
        return answer_to(call, self._cut(f"Error: {why}")), end

    def _cut(self, text: str) -> str:
        """Returns a text that is not too long. Halves of surrogate pairs, as names of files have, become `?`."""
        most = self._config.max_answer_characters
        text = text.encode(errors="replace").decode()
        if len(text) <= most:
            return text
        half = (most - len(LEFT_OUT.format(len(text)))) // 2
        if half < 1:
            return text[:most]
        return text[:half] + LEFT_OUT.format(len(text) - 2 * half) + text[len(text) - half :]


def _is_cancelled() -> bool:
    """Returns whether somebody has cancelled the present task, rather than that code in it was cancelled by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def doubled(offered: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yields each place whose functions include one that an earlier place has, and a sentence that says so."""
    seen: dict[str, str] = {}
    for place, names in offered.items():
        for name in names:
            if seen.setdefault(name, place) != place:
                yield place, f"offers the function {name!r:.80}, as {seen[name]} does"


COMPONENT, CONFIG = Tools, ToolsConfig
