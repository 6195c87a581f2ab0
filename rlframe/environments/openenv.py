"""Environments behind a server of the package `openenv-core`, one websocket a session."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any

from rlframe.environments.base import Step, Turn
from rlframe.environments.stepping import InvalidAction, Outcome, Stepping, SteppingConfig
from rlframe.environments.tools.base import answer_to
from rlframe.types.prompt import Prompt
from rlframe.utils.bounds import PathText, Seconds, check_bounds
from rlframe.utils.errors import ConfigError, SettingError
from rlframe.utils.faults import Fault

REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of a server's error about an action that it cannot read."""


@dataclass(kw_only=True, slots=True)
class OpenEnvConfig(SteppingConfig):
    """Settings of the server, of its observations and of its actions."""

    url: Annotated[str, PathText()]
    """URL of the server, such as http://127.0.0.1:8000."""
    action_field: str = ""
    """Field of the action that the policy's text becomes. Empty means that the text is the action, as JSON."""
    tools: bool = False
    """Whether the environment is one of tools (MCP): the policy is offered them, and its calls are the actions. A turn
    without calls ends the attempt."""
    reset: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's reset, in addition to `seed`."""
    options_field: str = ""
    """Field of the record with further arguments of the reset, by their names. Empty gives none."""
    connect_timeout_s: Seconds = 10.0
    """Seconds in which the server must accept a connection."""
    message_timeout_s: Seconds = 60.0
    """Seconds in which it must answer."""

    def __post_init__(self) -> None:
        SteppingConfig.__post_init__(self)
        check_bounds(self)
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise SettingError("url", "must begin with http://, https://, ws:// or wss://", got=repr(self.url))
        if self.tools and self.action_field:
            got = repr(self.action_field)
            raise SettingError("action_field", "has no effect with tools=true", got=got, hint="remove it")


class OpenEnv(Stepping):
    """Plays one episode of an environment on a server, which may serve many at a time (`max_concurrent_envs` there)."""

    @classmethod
    def prepare(cls, config: OpenEnvConfig) -> None:
        """Imports the package.

        Raises:
            ConfigError: it is not there.
        """
        if find_spec("openenv") is None:
            hint = "pip install 'rlframe[agents]'"
            raise ConfigError([Fault("environment.name", "needs the package openenv-core", got="openenv", hint=hint)])
        import openenv.core.generic_client  # noqa: F401 - takes seconds, which the first session would wait for

    def __init__(self, config: OpenEnvConfig):
        Stepping.__init__(self, config)
        self._config = config
        self._client: Any = None

    async def begin(self, prompt: Prompt, *, seed: int) -> Outcome:
        """Connects, and resets the environment. Offers its tools, if the settings say so."""
        from openenv.core.generic_client import GenericEnvClient

        config = self._config
        self._client = GenericEnvClient(
            base_url=config.url,
            connect_timeout_s=config.connect_timeout_s,
            message_timeout_s=config.message_timeout_s,
            mode="simulation",
        )
        await self._client.connect()
        own = prompt.fields.get(config.options_field) if config.options_field else None
        result = await self._client.reset(**{"seed": seed % 2**31, **config.reset, **(own or {})})
        if config.tools:
            listed = (await self._client.step({"type": "list_tools"})).observation
            self.tools = [schema_of(tool) for tool in listed["tools"]]
        return outcome_of(result)

    async def act(self, text: str) -> Outcome:
        """Takes an action."""
        return outcome_of(await self._step(self.action_of(text)))

    async def step(self, turn: Turn) -> Step:
        """Takes the action of a turn. With tools, makes its calls, one after the other."""
        if not self._config.tools:
            return await Stepping.step(self, turn)
        calls = turn.message.get("tool_calls", [])
        if not calls and not turn.malformed:
            return self.stepped(Outcome(values={}, done=True), [])
        messages, reward, done = [], 0.0, False
        for call in calls:
            function = call["function"]
            action = {"type": "call_tool", "tool_name": function["name"], "arguments": function["arguments"]}
            try:
                outcome = outcome_of(await self._step(action))
            except InvalidAction as why:
                messages.append(answer_to(call, f"Error: {why}"))
                continue
            messages.append(answer_to(call, told(outcome.values)))
            reward += outcome.reward
            if done := outcome.done:
                break
        if turn.malformed:
            return self.invalid("\n".join(turn.malformed), reward=reward, done=done, messages=messages)
        return self.stepped(Outcome(values={}, reward=reward, done=done), messages)

    def action_of(self, text: str) -> dict[str, Any]:
        """Returns the action that a text is. Raises InvalidAction if it is none."""
        if self._config.action_field:
            return {self._config.action_field: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise InvalidAction(f"{text!r:.80} is no JSON object")
        return action

    async def close(self) -> None:
        """Closes the connection, which ends the episode on the server."""
        if self._client is not None:
            await self._client.disconnect()

    async def _step(self, action: dict[str, Any]) -> Any:
        try:
            return await self._client.step(action)
        except RuntimeError as error:
            # The package's one error for whatever a server refuses.
            if any(code in str(error) for code in REFUSED):
                raise InvalidAction(str(error)) from None
            raise


def outcome_of(result: Any) -> Outcome:
    """Returns a result of the package's client."""
    observation = result.observation
    own = observation if isinstance(observation, Mapping) else {}
    shown = json.dumps(observation) if isinstance(observation, Mapping | list) else str(observation)
    return Outcome(values={**own, "observation": shown}, reward=float(result.reward or 0.0), done=bool(result.done))


def schema_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a tool as chat templates take it."""
    parameters = tool.get("input_schema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": parameters}
    return {"type": "function", "function": function}


def told(values: Mapping[str, Any]) -> str:
    """Returns the text of a tool's answer."""
    if values.get("error"):
        error = values["error"]
        return f"Error: {error.get('message', error) if isinstance(error, Mapping) else error}"
    result = values.get("result")
    if isinstance(result, Mapping) and isinstance(parts := result.get("content"), list):
        texts = [part.get("text") for part in parts]
        if texts and None not in texts:
            return "\n".join(texts)
    return result if isinstance(result, str) else json.dumps(result)


COMPONENT, CONFIG = OpenEnv, OpenEnvConfig
