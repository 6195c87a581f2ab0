"""What a session of an environment costs on a CPU, from hundreds to thousands at the same time.

    python examples/benchmarks/sessions.py [NUMBER ...]

All sessions of a number begin together and take `TURNS` turns each, with a tool that takes `TOOL_S` between them. The
runner, the processes of sessions and the renderer are those of a run. The engine is scripted: it answers every request
after `RESPONSE_S` with `RESPONSE_TOKENS` tokens, however many there are, so that nothing but the runner and the
sessions takes processor time. Each number has a process of its own.

Memory is the proportional set size of the runner's process and of those of the sessions, at its greatest while the
sessions are under way, without what they had before the first one began. `growth` has, from each number to the next,
the processor time and the memory of one further session: they stay as they are if both grow in proportion.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.attempts.rendering.config import RenderingConfig
from rlframe.attempts.rendering.renderer import Renderer
from rlframe.attempts.runner import Runner
from rlframe.attempts.sessions.calls import Setup
from rlframe.attempts.sessions.dialogue import Sessions
from rlframe.attempts.sessions.pool import SessionPool
from rlframe.attempts.turns import Sides, Task
from rlframe.data.config import DataConfig
from rlframe.environments.config import EnvironmentConfig
from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.tools.doctor import versions
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Group, Rollout, SamplingParams

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results/sessions.json"
NUMBERS = [256, 1024, 4096]
TURNS, TOOL_S, RESPONSE_S, RESPONSE_TOKENS = 8, 0.2, 1.0, 32
WORKERS, EVERY_S = 2, 1.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Processor seconds of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def memory_bytes(pid: int) -> int:
    """The proportional set size of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


async def scripted(requests: list[GenerationRequest]) -> list[Completion]:
    """Answers every request with digits and the end of a turn."""
    await asyncio.sleep(RESPONSE_S)
    return [
        Completion(
            token_ids=np.append(np.full(RESPONSE_TOKENS - 1, SAID), END),
            logprobs=np.full(RESPONSE_TOKENS, -1.0),
            versions=np.zeros(RESPONSE_TOKENS),
            finish_reason=FinishReason.STOP,
        )
        for _ in requests
    ]


async def unjudged(rollout: Rollout) -> None:
    """Gives no reward."""


def task(index: int, prefix: str) -> Task:
    """One attempt at a prompt of its own."""
    prompt = Prompt(
        id=f"{prefix}{index}",
        messages=({"role": "user", "content": f"{index}*12="},),
        text="",
        input=ModelInput([SAID]),
    )
    return Task(group=Group.begin(prompt.id, prompt, 1), sampling=SamplingParams(max_tokens=64), step=1)


async def finished(runner: Runner, number: int, processes: list[int]) -> int:
    """Waits for all groups. Returns the greatest memory of the processes meanwhile, in bytes."""
    peak = ended = 0
    while ended < number:
        news = await runner.news(EVERY_S)
        assert news.failure is None and not news.events, (news.failure, news.events)
        assert all(len(each.group.rollouts[0].turns) == TURNS for each in news.ended)
        ended += len(news.ended)
        peak = max(peak, sum(map(memory_bytes, processes)))
    return peak


async def measure(number: int) -> dict[str, Any]:
    """One number of sessions."""
    environment = EnvironmentConfig(
        name=f"{HERE / 'turns_tool.py'}:Waiting",
        options={"turns": TURNS, "tool_s": TOOL_S},
        max_turns=TURNS,
        workers=WORKERS,
    )
    pool = SessionPool(Setup(environment=environment, folder=os.getcwd(), sources={}))
    dialogues = Sessions(
        pool=pool,
        language=Renderer(WORDS, RenderingConfig(), data=DataConfig()),
        decode=WORDS.decode,
        deterministic=True,
    )
    runner = Runner(
        [scripted],
        Sides(decode=WORDS.decode, open=dialogues.open, score=unjudged),
        run_seed=0,
        max_calls=1 << 20,
        max_positions=1 << 20,
        attempt_timeout_s=1e6,
        environment=environment,
    )
    runner.start([task(index, "warm") for index in range(2 * WORKERS)], version=0)
    await finished(runner, 2 * WORKERS, [os.getpid()])
    children = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    sessions = [pid for pid in children if "python" in Path(f"/proc/{pid}/comm").read_text()]
    processes = [os.getpid(), *sessions]
    before, own_s, their_s = sum(map(memory_bytes, processes)), time.process_time(), sum(map(processor_s, sessions))
    begun = time.monotonic()
    runner.start([task(index, "") for index in range(number)], version=0)
    peak = await finished(runner, number, processes)
    wall_s, own_s = time.monotonic() - begun, time.process_time() - own_s
    their_s = sum(map(processor_s, sessions)) - their_s
    pool.close()
    return {
        "sessions": number,
        "wall_s": round(wall_s, 2),
        "wall_at_best_s": TURNS * RESPONSE_S + (TURNS - 1) * TOOL_S,
        "runner_processor_ms_per_turn": round(1e3 * own_s / number / TURNS, 3),
        "sessions_processor_ms_per_turn": round(1e3 * their_s / number / TURNS, 3),
        "memory_kb_per_session": round((peak - before) / number / 1024, 1),
    }


def further(few: dict[str, Any], many: dict[str, Any]) -> dict[str, float]:
    """The processor time and the memory of one further session between two numbers."""
    count = many["sessions"] - few["sessions"]

    def growth(key: str) -> float:
        """Of what is given for one session."""
        return (many[key] * many["sessions"] - few[key] * few["sessions"]) / count

    times = ("runner_processor_ms_per_turn", "sessions_processor_ms_per_turn")
    return {
        "from": few["sessions"],
        "to": many["sessions"],
        "processor_ms_per_turn": round(sum(map(growth, times)), 3),
        "memory_kb_per_session": round(growth("memory_kb_per_session"), 1),
    }


def main() -> None:
    """Measure each number in a process of its own, and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, default=NUMBERS, metavar="NUMBER")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(asyncio.run(measure(*arguments.numbers))))
        return
    found = []
    for number in arguments.numbers:
        done = subprocess.run(
            [sys.executable, __file__, "--here", str(number)], stdout=subprocess.PIPE, text=True, check=True
        )
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], flush=True)
    record = {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "turns": TURNS,
        "tool_s": TOOL_S,
        "response_s": RESPONSE_S,
        "numbers": found,
        "growth": [further(few, many) for few, many in itertools.pairwise(found)],
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record["growth"]))


WORDS: Any = tokenizer.load(resolve(ModelConfig(path="qwen3_moe_tiny_tools")))
(SAID,), END = WORDS.encode("7", add_special_tokens=False), WORDS.eos_token_id

if __name__ == "__main__":
    main()
