"""The policy's seat in an environment of the package `verifiers`. Imported where the package is installed.

The package runs as it is: its harness asks the package's own local server for completions, with its limits and
`@stop`s, and the server's client asks the policy. A seat without a harness of its own has `PolicyHarness`,
which runs in this process and calls the tools of the task.
"""

import json
import os
import sys
import uuid
from collections.abc import Mapping
from contextlib import AsyncExitStack
from statistics import fmean
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.clients.client import Client
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import BaseClientConfig
from verifiers.v1.dialects.base import Dialect
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import InterceptionServer

from rlframe.data.builtin.verifiers import known_as
from rlframe.environments.base import Endpoint
from rlframe.environments.verifiers import VerifiersConfig, task_of
from rlframe.environments.verifiers.conversation import ENDPOINT, Conversation, NotOneConversation
from rlframe.types.prompt import Prompt
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean

KEY = "environment.options"
HARNESS = "rlframe_policy"
"""Id of PolicyHarness, under which this module is entered among the package's harnesses."""
POLICY = vf.TrainClientConfig(base_url="http://policy.invalid", api_key_var="RLFRAME_HAS_NO_KEY")
"""Client of a seat that the policy takes. Nothing is sent there. Of type `train`, because the package then asks for
whole completions even where a harness reads them as a stream."""
LONGEST_REASON = 2000

__all__ = ["PolicyHarness"]


async def play(options: Any, task: Mapping[str, Any], talk: Conversation) -> tuple[float, dict[str, float]]:
    """Runs one episode. Returns the reward of the policy's trace, and its numbers.

    Args:
        options: the environment's settings.
        task: the field of the record.

    Raises:
        ConfigError: it is not clear which seat is the policy's.
        NotOneConversation: the policy could not be asked.
        RuntimeError: the episode failed.
    """
    server = PolicyServer(talk)
    try:
        found = await _episode(options, task, server, vf.ModelContext(model="policy", client=POLICY))
    except RuntimeError:
        if server.refused is None:
            raise
    if server.refused is not None:
        raise server.refused
    return found


async def at_endpoint(prompt: Prompt, endpoint: Endpoint, **options: Any) -> dict[str, Any]:
    """Runs one episode whose requests go to the endpoint of an attempt, so that they need not be one conversation. If
    the policy's seat runs several times, the reward and the numbers are means.

    Args:
        options: fields of VerifiersConfig.

    Raises:
        ValueError: the prompt is of other data.
        ConfigError, RuntimeError: see `play`.
    """
    # The package takes a key from a variable, whose name keeps it from processes that the package starts.
    variable = f"RLFRAME_API_KEY_{uuid.uuid4().hex}"
    os.environ[variable] = endpoint.key
    client = vf.EvalClientConfig(base_url=endpoint.url, api_key_var=variable)
    try:
        reward, numbers = await _episode(
            VerifiersConfig(**options),
            task_of(prompt),
            InterceptionServer(),
            vf.ModelContext(model=endpoint.model, client=client),
        )
    finally:
        del os.environ[variable]
    return {"reward": reward, "metrics": numbers}


async def _episode(
    options: Any, task: Mapping[str, Any], server: InterceptionServer, context: vf.ModelContext
) -> tuple[float, dict[str, float]]:
    settings = dict(task["taskset"])
    settings["id"] = known_as(settings["id"])
    raw = {**options.config, "id": known_as(options.id), "taskset": settings}
    config = vf.resolve_env_config(raw)
    seat = seat_of(config, options.agent)
    raw[seat] = {**unnamed(config, seat), **raw.get(seat, {})}
    environment = vf.load_environment(vf.resolve_env_config(raw))
    kind = type(environment.taskset).task_type()
    one = kind(kind.data_type().model_validate(task["data"]), environment.taskset.config.task)
    async with environment.shared_tools() as shared:
        server.state_service_secrets = frozenset(each.state_secret for each in shared.values() if each.state_secret)
        async with server:
            environment._shared_tools, environment._interception = shared, server
            try:
                await environment.start()
                episode = await environment.run_episode(one, context)
            finally:
                await environment.stop()
    traces = [trace for trace in episode.traces if trace.agent.name == seat]
    if not episode.ok or not traces:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        why = "; ".join(f"{error.type}: {error.message}" for error in errors) or f"{seat} did not run"
        raise RuntimeError(f"the episode failed: {why:.{LONGEST_REASON}}")
    rewards, numbers = zip(*map(told, traces), strict=True)
    names = dict.fromkeys(name for each in numbers for name in each)
    means = {name: fmean(each[name] for each in numbers if name in each) for name in names}
    return fmean(rewards), means


def told(trace: vf.Trace) -> tuple[float, dict[str, float]]:
    """Returns the reward of a trace, and its numbers: metrics, the score of each reward, whether it was stopped."""
    numbers = {name: value for name, value in trace.metrics.items() if value is not None}
    numbers |= {f"reward_{name}": one.score for name, one in trace.rewards.items() if one is not None}
    finished = trace.stop_condition in (None, "agent_completed", "user_closed")
    return trace.reward, {**numbers, "stopped": float(not finished), "timed_out": float(trace.is_timeout)}


def unnamed(config: vf.EnvConfig, seat: str) -> dict[str, Any]:
    """Returns the harness and the runtime of the policy's seat, as far as neither the settings nor the environment or
    the task set name one. The package would take `bash` and a hosted sandbox."""
    spec = agent_config_fields(config)[seat]
    found: dict[str, Any] = {}
    if spec.harness is None and vf.default_harness_id(config.taskset.id) == "bash":
        found["harness"] = {"id": HARNESS}
    if "runtime" not in spec.model_fields_set:
        found["runtime"] = {"type": "subprocess"}
    return found


def seat_of(config: vf.EnvConfig, name: str) -> str:
    """Returns the name of the policy's seat.

    Raises:
        ConfigError: it is not clear which one it is, or another one has no model.
    """
    seats = agent_config_fields(config)
    if name and name not in seats:
        rule, near = f"must be one of {', '.join(seats)}", did_you_mean(name, seats)
        raise ConfigError([Fault(f"{KEY}.agent", rule, got=repr(name), hint=near)])
    free = [seat for seat, spec in seats.items() if spec.client is None and seat != name]
    if name:
        free = [name, *free]
    if len(free) == 1:
        return free[0]
    if not free:
        raise ConfigError([Fault(f"{KEY}.agent", "must name the policy's seat", hint=f"one of {', '.join(seats)}")])
    others = " and ".join(f"{KEY}.config.{seat}.client" for seat in free[1:])
    raise ConfigError(
        [
            Fault(
                f"{KEY}.config",
                "must give a model and a client to each seat but one",
                got=f"none for {', '.join(free)}",
                why="the policy takes one seat",
                hint=f"set {others} and model beside it",
            )
        ]
    )


class PolicyClient(Client):
    """A client whose completions are the policy's responses."""

    def __init__(self, talk: Conversation, refuse: Any):
        self._talk, self._refuse = talk, refuse

    async def get_response(
        self,
        dialect: Dialect,
        body: dict,
        sampling: vf.SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        """Returns the policy's response to a request. Raises ProviderError if the policy cannot be asked."""
        try:
            if not isinstance(dialect, ChatDialect):
                spoken = type(dialect).__name__
                raise NotOneConversation(f"the harness speaks {spoken}, not chat completions; {ENDPOINT}")
            response = await self._talk.ask(dialect.parse_request(body))
        except NotOneConversation as error:
            self._refuse(error)
            raise ProviderError(str(error), status_code=400) from error
        response.raw = {
            "id": response.id,
            "object": "chat.completion",
            "created": response.created,
            "model": response.model,
            "choices": [
                {
                    "index": 0,
                    "message": message_to_wire(response.message),
                    "finish_reason": response.finish_reason,
                }
            ],
        }
        return response


class PolicyServer(InterceptionServer):
    """The package's server of completions, which asks the policy for those of its seat."""

    def __init__(self, talk: Conversation):
        super().__init__()
        self._policy = PolicyClient(talk, self._refuse)
        self.refused: NotOneConversation | None = None
        """The first error about a request that the policy could not be asked."""

    def _client(self, config: BaseClientConfig) -> Client:
        return self._policy if config == POLICY else super()._client(config)

    def _refuse(self, error: NotOneConversation) -> None:
        self.refused = self.refused or error


class PolicyHarness(vf.Harness[vf.HarnessConfig]):
    """Asks for completions until one calls no tool. It runs in this process, and starts no program."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """See vf.Harness."""
        system, prompt = self.resolve_prompt(data)
        begun = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages = [message_to_wire(message) for message in begun]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        offered = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, dispatch, servers = await connect_mcp({"mcpServers": offered}, stack)
            # The policy's turn takes as long as it takes, and nothing leaves this machine.
            client = await stack.enter_async_context(
                httpx.AsyncClient(timeout=None, trust_env=False, headers={"Authorization": f"Bearer {secret}"})
            )
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code != httpx.codes.OK:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                messages.append(message := answer.json()["choices"][0]["message"])
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    denied = await _denied(client, tool_interception_url, call)
                    messages.append(denied or await _called(call, dispatch, servers))


async def _denied(client: httpx.AsyncClient, url: str | None, call: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the message that the task's hooks put in the place of a tool's answer, if they do."""
    if url is None:
        return None
    function = call["function"]
    asked = {"tool_call_id": call["id"], "name": function["name"], "arguments": json.loads(function["arguments"])}
    answer = await client.post(url, json=asked)
    answer.raise_for_status()
    decision = answer.json()
    if decision["action"] == "stop":
        raise RuntimeError(decision["reason"])
    return decision["message"] if decision["action"] == "deny" else None


async def _called(call: Mapping[str, Any], dispatch: dict[str, Any], servers: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with a tool's answer. One that fails is an answer that the policy reads."""
    name = call["function"]["name"]
    answer = {"role": "tool", "tool_call_id": call["id"], "name": name}
    if name not in dispatch:
        return answer | {"content": f"Error: there is no tool {name!r:.80}"}
    try:
        content = await call_mcp(servers, dispatch, name, json.loads(call["function"]["arguments"]))
    except Exception as error:  # A tool that fails is an answer that the policy reads.
        content = f"Error: {type(error).__name__}: {error}"
    return answer | {"content": content}


sys.modules.setdefault(f"verifiers.v1.harnesses.{HARNESS}", sys.modules[__name__])
