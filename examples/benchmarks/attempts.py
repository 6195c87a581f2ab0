"""How long an engine waits for the runner: 2,000 attempts with slow tools in flight in one process.

    python examples/benchmarks/attempts.py [CASE ...] [--seconds 40] [--profile]

The runner is the real one, in its own process as in a run (`RunnerWorker`): tokenizer, environment, calls of engines
through Ray. The environment is a coroutine function that takes `TOOL_S` for each answer. The engine is simulated, in an
actor of its own: a number of requests run at the same time, each token takes a fixed time, and further requests wait in
the engine. Response lengths are log-normal. The driver keeps the number of attempts constant.

The engine's idle share is the part of its slots that no request used in the window. There are more attempts than slots
and waiting tools together, by the lengths and times of the case, so that the best possible schedule has none idle
(`needed_attempts`), and every idle slot is the fault of the runner, of Ray or of the machine. Processor seconds are the
runner process's own, of all its threads; those of an attempt are those of a turn times its turns. `--profile` prints
where the event loop spends its time.
"""

import argparse
import asyncio
import cProfile
import json
import math
import os
import platform
import pstats
import random
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rlframe.attempts.rendering.config import RenderingConfig
from rlframe.attempts.runner import News
from rlframe.attempts.turns import Task
from rlframe.attempts.worker import NEWS, RunnerSetup, RunnerWorker
from rlframe.data.config import DataConfig
from rlframe.environments.base import Environment, Step, Turn
from rlframe.environments.config import EnvironmentConfig
from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.rollout.base.config import RolloutConfig
from rlframe.tools.doctor import versions
from rlframe.types.input import ModelInput
from rlframe.types.messages import Message
from rlframe.types.packed import Packed
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, SamplingParams

RESULT = Path(__file__).parent / "results/attempts.json"
GROUP_SIZE, ATTEMPTS, TOOL_S = 8, 2000, 1.0
PROMPT_TOKENS, TOOL_TOKENS, VOCABULARY, SPREAD = 64, 32, 250, 0.8
MAX_CALLS = 1024
"""As of vLLM and SGLang here."""
WARM_UP_S = 15.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A load."""

    turns: int
    mean_tokens: int
    """Of a response."""
    token_s: float = 0.015
    """Seconds of a token of one request."""
    slots: int = 256
    """Requests that the engine runs at the same time."""

    @property
    def response_s(self) -> float:
        """Seconds of a response in the mean."""
        return self.mean_tokens * self.token_s

    @property
    def turns_per_s(self) -> float:
        """Responses a second of an engine that is never idle."""
        return self.slots / self.response_s

    @property
    def needed_attempts(self) -> float:
        """Attempts in flight with which no slot need be idle: those in slots, and those whose tools run meanwhile."""
        return self.slots + self.turns_per_s * TOOL_S


CASES = {
    "short": Case(turns=4, mean_tokens=128),
    "long": Case(turns=8, mean_tokens=512),
    "fast": Case(turns=4, mean_tokens=64),
}


@dataclass(kw_only=True, slots=True)
class ToolConfig:
    """Settings of the environment."""

    turns: int


class Tool(Environment):
    """Answers after `TOOL_S`, until the last turn."""

    def __init__(self, config: ToolConfig):
        self.turns, self.done = config.turns, 0

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        """A question of about `PROMPT_TOKENS` tokens."""
        return [{"role": "user", "content": "?" * PROMPT_TOKENS}]

    async def step(self, turn: Turn) -> Step:
        """The tool's output."""
        self.done += 1
        if self.done >= self.turns:
            return Step(done=True)
        await asyncio.sleep(TOOL_S)
        return Step(messages=[{"role": "user", "content": "7" * TOOL_TOKENS}])


class Engine:
    """The simulated engine."""

    def __init__(self, case: Case):
        self.case, self.free = case, case.slots
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.spans: list[tuple[float, float]] = []

    async def generate(self, requests: Packed[GenerationRequest]) -> Packed[Completion]:
        """As of a served engine."""
        return Packed(await asyncio.gather(*map(self._answer, requests.objects())))

    @ray.method(num_returns="streaming")
    async def generate_each(self, requests: Packed[GenerationRequest]) -> AsyncIterator[list[tuple[int, Completion]]]:
        """As of a served engine: each answer when it is there."""

        async def answered(index: int, request: GenerationRequest) -> tuple[int, Completion]:
            return index, await self._answer(request)

        for answer in asyncio.as_completed([answered(*each) for each in enumerate(requests.objects())]):
            yield [await answer]

    async def _answer(self, request: GenerationRequest) -> Completion:
        if not self.free:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            await turn
        else:
            self.free -= 1
        case, begun, draw = self.case, time.time(), random.Random(request.seed)
        mean = math.log(case.mean_tokens) - SPREAD**2 / 2
        count = max(1, min(request.sampling.max_tokens, round(draw.lognormvariate(mean, SPREAD))))
        await asyncio.sleep(count * case.token_s)
        # What follows is the engine's own time, not its idle time: the slot is passed on first.
        if self.waiting:
            self.waiting.popleft().set_result(None)
        else:
            self.free += 1
        self.spans.append((begun, begun + count * case.token_s))
        return Completion(
            token_ids=np.random.default_rng(request.seed).integers(0, VOCABULARY, count, dtype=np.int32),
            logprobs=np.full(count, -1.0, dtype=np.float32),
            versions=np.zeros(count, dtype=np.int32),
            finish_reason=FinishReason.STOP,
        )

    def used(self, start: float, end: float) -> tuple[float, int]:
        """Slot seconds that requests used in a window, those under way left out; and the requests begun in it."""
        inside = [(max(start, begin), min(end, finish)) for begin, finish in self.spans]
        begun = sum(start <= begin < end for begin, _ in self.spans)
        return sum(max(0.0, finish - begin) for begin, finish in inside), begun


class Profiled(RunnerWorker):
    """The runner with a profile of its event loop."""

    def begin_profile(self) -> None:
        """Begins it, in the loop's thread."""
        self.profile = cProfile.Profile()
        self._in_loop(self._switch(on=True))

    def end_profile(self, lines: int) -> str:
        """The functions that took longest themselves."""
        self._in_loop(self._switch(on=False))
        with tempfile.TemporaryFile("w+") as file:
            stats = pstats.Stats(self.profile, stream=file)
            stats.sort_stats("tottime").print_stats(lines)
            file.seek(0)
            return file.read()

    async def _switch(self, *, on: bool) -> None:
        self.profile.enable() if on else self.profile.disable()


def processor_s(pid: int) -> float:
    """Processor seconds of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def tasks(first: int, count: int, case: Case) -> Packed[Task]:
    """Groups of new prompts, as they go to the runner."""
    sampling = SamplingParams(max_tokens=case.mean_tokens * 8)
    made = []
    for index in range(first, first + count):
        tokens = np.random.default_rng(index).integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
        prompt = Prompt(id=str(index), text="", input=ModelInput(tokens))
        made.append(Task(group=Group.begin(str(index), prompt, GROUP_SIZE), sampling=sampling, step=1))
    return Packed(made)


def measure(case: Case, *, seconds: float, profile: bool) -> dict[str, Any]:
    """One case: what the engine and the runner did in the window."""
    engine: Any = ray.remote(Engine).options(max_concurrency=4 * ATTEMPTS).remote(case)
    remote: Any = ray.remote
    actor = remote(concurrency_groups={NEWS: 1})(Profiled)
    runner = actor.remote(role="runner", rank=0, log_folder=tempfile.mkdtemp(), num_threads=1)
    setup = RunnerSetup(
        rollout=RolloutConfig(),
        environment=EnvironmentConfig(name=f"{__file__}:Tool", options={"turns": case.turns}, max_turns=case.turns),
        rendering=RenderingConfig(),
        data=DataConfig(),
        tokenizer=tokenizer.load(resolve(ModelConfig(path="qwen3_moe_tiny"))),
        reward=None,
        seed=0,
        max_calls=MAX_CALLS,
        max_positions=1 << 20,
        folder=os.getcwd(),
    )
    ray.get(runner.begin.remote(setup, [engine]))
    info: Any = ray.get(runner.info.remote())
    groups, ended = ATTEMPTS // GROUP_SIZE, 0
    ray.get(runner.start.remote(tasks(0, groups, case), 0))
    # A request's slot is counted when it ends, so the window closes well before the measurement does.
    tail_s = 10 * case.response_s
    start = time.time() + WARM_UP_S + 2 * case.response_s
    end, begun_s, used_s, first, ended_inside = start + seconds, None, 0.0, 0, 0
    while (now := time.time()) < end + tail_s:
        if begun_s is None and now >= start:
            begun_s, first = processor_s(info.pid), ended
            ray.get(runner.begin_profile.remote()) if profile else None
        if not used_s and now >= end:
            used_s, ended_inside = processor_s(info.pid) - (begun_s or 0.0), (ended - first) * GROUP_SIZE
            print(ray.get(runner.end_profile.remote(30))) if profile else None
        news: News = ray.get(runner.news.remote(0.2))
        assert news.failure is None, news.failure
        assert not any(each.lost for each in news.ended)
        if news.ended:
            runner.start.remote(tasks(groups, len(news.ended), case), 0)
            groups, ended = groups + len(news.ended), ended + len(news.ended)
    slot_s, turns = ray.get(engine.used.remote(start, end))
    ray.kill(runner)
    ray.kill(engine)
    return {
        "case": asdict(case),
        "attempts_in_flight": ATTEMPTS,
        "needed_attempts": round(case.needed_attempts),
        "window_s": seconds,
        "engine_idle_share": round(1 - slot_s / (case.slots * seconds), 4),
        "turns_per_s": round(turns / seconds, 1),
        "turns_per_s_at_best": round(case.turns_per_s, 1),
        "runner_processor_share": round(used_s / seconds, 3),
        "runner_processor_ms_per_turn": round(1e3 * used_s / max(1, turns), 2),
        "runner_processor_ms_per_attempt": round(1e3 * used_s / max(1, turns) * case.turns, 2),
        "attempts_ended": ended_inside,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    """Measure the cases, and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["short", "long"], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--profile", action="store_true", help="writes no results")
    arguments = parser.parse_args()
    with ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False):
        made = {name: measure(CASES[name], seconds=arguments.seconds, profile=arguments.profile)
                for name in arguments.cases}  # fmt: skip
    print(json.dumps(made, indent=1))
    if not arguments.profile:
        known = json.loads(RESULT.read_text(encoding="utf-8"))["cases"] if RESULT.exists() else {}
        record = {
            "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "versions": versions(),
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "cases": known | made,
        }
        RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


# Not at the end of a component, because the file is a program too.
COMPONENT, CONFIG = Tool, ToolConfig

if __name__ == "__main__":
    main()
