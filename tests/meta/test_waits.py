"""Every wait has a limit, or a reason here why it needs none."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.meta.checkout import ROOT

WITH_TIMEOUT = {
    "ray.get",
    "ray.wait",
    "subprocess.run",
    "subprocess.check_output",
    "subprocess.check_call",
    "futures.wait",
    "TCPStore",
    "init_process_group",
    "multiprocessing.connection.wait",
}
"""Functions that must be given a limit: by the name `timeout`, or among this many positional arguments."""
POSITIONAL = {"multiprocessing.connection.wait": 2}
METHODS = {"wait", "result", "join", "recv", "get", "acquire", "communicate", "exception"}
"""Methods that wait for ever when they are called without an argument."""

NO_WAIT = {"HydraConfig.get", "sys.exception"}
"""Named like a wait, and none."""

IN_A_CALL = "inside a call of a rank or an engine, whose limit the driver keeps"
ENDED = "of what has ended: killed, closed, or done by the line before"
WATCHED = "its own waits have limits, and the watchdog's are around it"
SAMPLES = "the thread writes one file to the run's folder, as the driver itself does elsewhere"
ALLOWED = {
    "rlframe/megatron/checkpoint/writer.py:write": "threads that only write; the driver's wait has a limit",
    "rlframe/megatron/memory/pinned.py:__getitem__": IN_A_CALL,
    "rlframe/megatron/memory/pinned.py:all": IN_A_CALL,
    "rlframe/attempts/calls.py:_ended": ENDED,
    "rlframe/attempts/endpoint/agents.py:_until_over": ENDED,
    "rlframe/attempts/endpoint/agents.py:attempt": "rollout.attempt_timeout_s is the limit of an attempt",
    "rlframe/attempts/endpoint/desk.py:close": ENDED,
    "rlframe/attempts/endpoint/server.py:open": ENDED,
    "rlframe/attempts/engines.py:_ended": ENDED,
    "rlframe/attempts/mending.py:end": WATCHED,
    "rlframe/attempts/runner.py:_ended": ENDED,
    "rlframe/attempts/runner.py:news": "asyncio.wait_for around it has a limit",
    "rlframe/attempts/sessions/marks.py:__await__": "of a session, whose limit `_answer` keeps",
    "rlframe/attempts/sessions/pool.py:_one_more": "of an attempt, whose limit is rollout.attempt_timeout_s",
    "rlframe/attempts/sessions/pool.py:forget": ENDED,
    "rlframe/attempts/sessions/pool.py:try_start": "a process that is not ready in its time has failed to start",
    "rlframe/attempts/sessions/process.py:kill": ENDED,
    "rlframe/attempts/sessions/worker.py:_answer": ENDED,
    "rlframe/attempts/worker.py:_in_loop": IN_A_CALL,
    "rlframe/attempts/worker.py:marked_result": ENDED,
    "rlframe/data/parallel.py:ask": "templates have a limit, and a process that dies closes the connection",
    "rlframe/data/parallel.py:close": ENDED,
    "rlframe/data/parallel.py:in_chunks": "threads wait in `ask` only",
    "rlframe/data/parallel.py:main": "a worker serves until its connection is closed",
    "rlframe/environments/endpoint.py:_command": "the runner ends an agent that is without a call for too long",
    "rlframe/environments/tools/mcp.py:_hold": "a task that nobody waits for holds a connection until `_leave`",
    "rlframe/environments/tools/mcp.py:_leave": ENDED,
    "rlframe/environments/tools/mcp.py:open": ENDED,
    "rlframe/environments/tools/sandbox/running.py:finish": "asyncio.timeout around it has a limit",
    "rlframe/environments/verifiers/__init__.py:_next": "environment.step_timeout_s is the limit of a session's step",
    "rlframe/environments/verifiers/__init__.py:step": ENDED,
    "rlframe/loops/saving/checkpoints.py:finish": WATCHED,
    "rlframe/loops/saving/checkpoints.py:abandon": WATCHED,
    "rlframe/loops/reporting/samples.py:close": SAMPLES,
    "rlframe/loops/reporting/samples.py:rewind": SAMPLES,
    "rlframe/loops/reporting/samples.py:wait": SAMPLES,
    "rlframe/loops/reporting/samples.py:write": SAMPLES,
    "rlframe/loops/reporting/uploads.py:run": "the thread that waits for metrics has nothing else to do",
    "rlframe/rollout/served/quantized.py:quantized_weights": IN_A_CALL,
    "rlframe/rollout/served/recording.py:random_weights": IN_A_CALL,
    "rlframe/rollout/served/engine.py:taken": IN_A_CALL,
    "rlframe/rollout/sglang/engine.py:generate_each": ENDED,
    "rlframe/rollout/sglang/engine.py:_ask": IN_A_CALL,
    "rlframe/rollout/sglang/engine.py:begin_profile": IN_A_CALL,
    "rlframe/rollout/sglang/engine.py:end_profile": IN_A_CALL,
    "rlframe/rollout/sglang/engine.py:score": IN_A_CALL,
    "rlframe/rollout/sglang/engine.py:top": IN_A_CALL,
    "rlframe/rollout/sglang/answers.py:answer": ENDED,
    "rlframe/rollout/sglang/answers.py:serve": "the host of an engine serves until its pipe closes",
    "rlframe/rollout/sglang/host.py:_blocking_call": "the socket has RCVTIMEO",
    "rlframe/rollout/sglang/launch.py:__init__": IN_A_CALL,
    "rlframe/rollout/sglang/launch.py:close": ENDED,
    "rlframe/rollout/vllm/engine.py:__init__": IN_A_CALL,
    "rlframe/rollout/vllm/engine.py:close": IN_A_CALL,
    "rlframe/rollout/vllm/engine.py:_result": ENDED,
    "rlframe/tools/convert.py:verify": "a tool: a person is there, and a process that dies breaks the pool",
    "rlframe/weight_sync/connection.py:both": WATCHED,
    "rlframe/weight_sync/transports/nccl.py:wait": "orders streams; `finish` waits, with a limit",
}
"""`file:function` and the reason."""


def name_of(call: ast.Call) -> str:
    """The dotted name of what is called, as far as it is one."""
    return ast.unparse(call.func)


def is_limited(call: ast.Call) -> bool:
    """Whether the call has a limit, or is none that waits."""
    name = name_of(call)
    if name in NO_WAIT:
        return True
    if any(keyword.arg in ("timeout", "timeout_s", None) for keyword in call.keywords):
        return True
    short = next((known for known in WITH_TIMEOUT if name == known or name.endswith(f".{known}")), None)
    if short:
        return len(call.args) >= POSITIONAL.get(short, 99)
    waits = isinstance(call.func, ast.Attribute) and call.func.attr in METHODS
    return not waits or bool(call.args or call.keywords)


def unlimited(path: Path) -> Iterator[str]:
    """`file:function` of each wait without a limit."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if not is_limited(call):
            around = [each for each in functions if each.lineno <= call.lineno <= (each.end_lineno or 0)]
            inner = max(around, key=lambda each: each.lineno).name if around else "module"
            yield f"{path.relative_to(ROOT).as_posix()}:{inner}"


def test_every_wait_has_a_limit_or_a_reason() -> None:
    found = {place for path in sorted((ROOT / "rlframe").rglob("*.py")) for place in unlimited(path)}
    assert sorted(found - ALLOWED.keys()) == []
    assert sorted(ALLOWED.keys() - found) == [], "reasons for waits that are not there any more"


def test_waits_without_a_limit_are_found(tmp_path: Path) -> None:
    calls = {
        "ray.get(x)": False,
        "ray.get(x, timeout=1)": True,
        "event.wait()": False,
        "event.wait(3)": True,
        "', '.join(names)": True,
        "thread.join()": False,
        "subprocess.run(['x'])": False,
        "table.get(key)": True,
        "future.result()": False,
        "TCPStore(host, 0, is_master=True)": False,
    }
    assert {text: is_limited(ast.parse(text, mode="eval").body) for text in calls} == calls
