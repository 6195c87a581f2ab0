"""Sessions of several turns with tools against the same engine without tools, on one GPU.

    python examples/benchmarks/turns.py --output result.json

`tools`: 512 sessions under way all the time, each of 8 turns with a tool that takes 200 ms between them; as one ends
the next begins. `none`: tools that take no time, and as many sessions as `tools` had running requests in the mean, so
that the engine is as full. Model: Qwen3-4B's dimensions with random weights, bfloat16. The engine is vLLM; the runner,
its sessions and the renderer are those of a run; responses have drawn lengths.

Printed: tokens a second of both and their quotient, processor seconds of the driver's thread and of the runner's
process as shares of the time, and how many tokens were prefilled for each that was new to the engine: 1 means that no
turn computes an earlier one again. vLLM caches whole blocks of 16 tokens, so up to 15 of each turn are computed twice.
All prompts are alike here, so that the first turns, an eighth of the requests, are prefilled once.

Measured (2026-11-23, one H200, vLLM 0.26.0): tools 6,621 tokens/s with 435 running requests in the mean; without tools
6,369 with 401, so 96 % of the tokens a second and request. Driver's thread 2.4 % of a core, the runner's process 45 %.
Prefilled 0.975 tokens for each that was new, at most 1.03 counting the later turns only.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from models_by_size import MODELS, make_model
from transformers import PreTrainedTokenizerFast
from weight_sync import machine

from rlframe.attempts.fleet import Attempts
from rlframe.attempts.rendering.config import RenderingConfig
from rlframe.attempts.turns import Task
from rlframe.attempts.worker import RunnerSetup
from rlframe.cluster.config import ClusterConfig, Device
from rlframe.cluster.placement import reserve
from rlframe.cluster.roles import Topology, engines, policy
from rlframe.cluster.runtime import running
from rlframe.data.config import DataConfig
from rlframe.environments.config import EnvironmentConfig
from rlframe.models.config import ModelConfig
from rlframe.rollout.base.config import EngineDtype
from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.rollout.fleet.worker import RolloutSetup
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, SamplingParams
from rlframe.utils.outside import load

HERE = Path(__file__).resolve().parent
PROMPT_WORDS, TOOL_WORDS, LONGEST = 64, 96, 512
GRAPHS = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, *range(32, 513, 32)],
    }
}
"""As in async_rl.py: no compilation, graphs for decoding."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3_4b")
    parser.add_argument("--sessions", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tool-s", type=float, default=0.2)
    parser.add_argument("--warm-up-s", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", choices=Device, type=Device, default=Device.CUDA)
    parser.add_argument("--output", type=Path, default=HERE / "results/turns.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running(ClusterConfig(device=arguments.device), num_devices=1):
        folder = Path(name)
        group = started(folder, arguments.model, arguments.device)
        tools = measure(group, folder, arguments, sessions=arguments.sessions, tool_s=arguments.tool_s)
        print(json.dumps({"tools": tools}), flush=True)
        sessions = max(1, round(tools["running_requests_mean"]))
        none = measure(group, folder, arguments, sessions=sessions, tool_s=0.0)
        group.workers.stop()
    result = {
        "machine": machine(),
        "model": arguments.model,
        "turns": arguments.turns,
        "tool_s": arguments.tool_s,
        "tools": tools,
        "none": none,
        "busy_share": tools["tokens_per_s"] / none["tokens_per_s"],
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def started(folder: Path, model: str, device: Device) -> RolloutGroup:
    """One engine, verified at version 0."""
    config = MODELS[model]
    make_model(config, folder / "model", words=config["vocab_size"] - len(SPECIAL) - 1)
    words = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    words.add_special_tokens({"additional_special_tokens": SPECIAL})
    words.chat_template = TEMPLATE
    words.save_pretrained(folder / "model")
    sys.path.insert(0, str(HERE))
    engine = f"{HERE / 'turns_engine.py'}:TurnsVllm"
    (folder / "account").mkdir()
    settings = load(f"{HERE / 'turns_engine.py'}:TurnsConfig", key="rollout.name")
    setup = RolloutSetup(
        rollout=settings(
            name=engine,
            account=str(folder / "account"),
            max_tokens=LONGEST,
            max_model_len=8192,
            max_num_seqs=512,
            **({"gpu_memory_utilization": 0.85, "engine_options": GRAPHS} if device is Device.CUDA else {}),
        ),
        model=ModelConfig(path=str(folder / "model"), random_init=True),
        dtype=EngineDtype.BFLOAT16 if device is Device.CUDA else EngineDtype.FLOAT32,
        device=device,
        seed=0,
    )
    placement = reserve(Topology((policy(1), engines(1, colocate=True))), gpu=device is Device.CUDA, timeout_s=120)
    group = RolloutGroup(
        setup,
        slots=placement.engines,
        log_folder=str(folder / "logs"),
        num_threads=4,
        start_timeout_s=400,
        call_timeout_s=400,
    )
    group.start()
    group.commit(0)
    return group


def measure(
    group: RolloutGroup, folder: Path, arguments: argparse.Namespace, *, sessions: int, tool_s: float
) -> dict[str, Any]:
    """What the engine did in the window with so many sessions under way."""
    for file in (folder / "account").glob("*.jsonl"):
        os.truncate(file, 0)
    environment = EnvironmentConfig(
        name=f"{HERE / 'turns_tool.py'}:Waiting",
        options={"turns": arguments.turns, "tool_s": tool_s},
        max_turns=arguments.turns,
        workers=4,
    )
    words = PreTrainedTokenizerFast.from_pretrained(folder / "model")
    new = new_tokens(words)
    runner = Attempts(
        group,
        RunnerSetup(
            rollout=group.setup.rollout.without_engine(),
            environment=environment,
            rendering=RenderingConfig(),
            # Words are the tokens, special ones too.
            data=DataConfig(special_tokens_in_text=True),
            tokenizer=words,
            reward=None,
            seed=0,
            max_calls=group.max_calls,
            max_positions=8192,
            folder=os.getcwd(),
        ),
        log_folder=str(folder / "logs"),
        start_timeout_s=120,
        call_timeout_s=300,
    )
    runner.start([task(index) for index in range(sessions)])
    begun, index, turns = time.time(), sessions, 0
    start, end = begun + arguments.warm_up_s, begun + arguments.warm_up_s + arguments.seconds
    driver_s = runner_s = 0.0
    pid = runner.workers.infos[0].pid
    first: tuple[float, float] | None = None
    with runner.waiting():
        while (now := time.time()) < end:
            if first is None and now >= start:
                first = time.thread_time(), processor_s(pid)
            ended = runner.look(wait_s=0.5)
            turns += sum(len(each.group.rollouts[0].turns) for each in ended if each.group.rollouts)
            if ended:
                runner.start([task(index + place) for place in range(len(ended))])
                index += len(ended)
    assert first is not None
    driver_s, runner_s = time.thread_time() - first[0], processor_s(pid) - first[1]
    events = runner.metrics()
    runner.cancel()
    runner.close()
    seconds = time.time() - start
    return {"sessions": sessions, "tool_s": tool_s} | account(folder, new, start, end) | {
        "driver_thread_share": round(driver_s / seconds, 4),
        "runner_process_share": round(runner_s / seconds, 4),
        "sessions_ended": index - sessions,
        "events": events,
    }  # fmt: skip


def new_tokens(words: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Tokens of a first prompt, and of what follows a response: its end, the answer and the next opening."""
    first = len(words.encode(words.apply_chat_template(task(0).group.prompt.messages, tokenize=False))) + 1
    later = len(words.encode(f"<|end|> <|user|> {' '.join(['w11'] * TOOL_WORDS)} <|end|> <|assistant|>"))
    print(f"a prompt has {first} tokens, an answer {later}", flush=True)
    return first, later


def account(folder: Path, lengths: tuple[int, int], start: float, end: float) -> dict[str, float]:
    """Figures of the requests in a window: those that ended in it, and the share of the others that lies in it.

    Args:
        lengths: tokens of a first prompt, and of what follows a response.
    """
    requests = [
        json.loads(line) for file in (folder / "account").glob("*.jsonl") for line in file.read_text().splitlines()
    ]
    tokens = running_s = prefilled = needed = 0.0
    for request in requests:
        length = max(1e-6, request["ended"] - request["begun"])
        inside = max(0.0, min(end, request["ended"]) - max(start, request["begun"]))
        tokens += request["tokens"] * inside / length
        running_s += inside
        if start <= request["ended"] < end:
            # New to the engine: the first prompt, or the end of a turn, the tool's words and the next opening.
            new = request["prompt"] if request["prompt"] <= lengths[0] else lengths[1]
            prefilled += request["prompt"] - request["cached"]
            needed += new
    return {
        "tokens_per_s": tokens / (end - start),
        "running_requests_mean": running_s / (end - start),
        "requests": sum(start <= request["ended"] < end for request in requests),
        "prefilled_over_needed": prefilled / max(1.0, needed),
    }


def task(index: int) -> Task:
    """One attempt at a prompt of its own."""
    text = " ".join(f"w{3 + (index * 7919 + place * 104729) % 100_000}" for place in range(PROMPT_WORDS))
    prompt = Prompt(id=f"{index}", messages=({"role": "user", "content": text},), text=text, input=ModelInput((3,)))
    return Task(group=Group.begin(f"{index}", prompt, 1), sampling=SamplingParams(max_tokens=LONGEST), step=1)


def processor_s(pid: int) -> float:
    """Processor seconds of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
