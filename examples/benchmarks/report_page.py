"""Size of report.html, and what building it takes, of runs of two sizes.

    python examples/benchmarks/report_page.py [main_job] [long_answers]

Writes the folder of a run as its own writers do, with random attempts and as many metrics as the largest runs have, and
builds the page three times in a process of its own. `main_job` has 500 steps of 64 x 8 attempts of 13 tokens,
`long_answers` 50 steps of 512 attempts of 8,192 tokens. Prints JSON and writes `results/report_page.json`: bytes, CPU
seconds (the median) and the memory that building adds to the process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import yaml

from rlframe.loops.config import LoggingConfig
from rlframe.loops.reporting.metrics import MetricsLog, rollout_metrics
from rlframe.ops.packing import pack
from rlframe.run.load import load
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, Group, Rollout, members
from rlframe.utils.build import as_dict

RESULT = Path(__file__).parent / "results/report_page.json"
CASES = {
    "main_job": {"steps": 500, "prompts": 64, "group": 8, "prompt_tokens": 6, "tokens": 13},
    "long_answers": {"steps": 50, "prompts": 64, "group": 8, "prompt_tokens": 512, "tokens": 8192},
}
METRICS = 147
"""Number of metrics of a step, which an asynchronous run with a critic has."""
PHASES = ("rollout", "train", "weight_sync", "account")
BUILD = """
import json, sys, time
from pathlib import Path
from rlframe.loops.report.page import write_page
from rlframe.utils.process.memory import used
folder, seconds = Path(sys.argv[1]), []
before = used().resident_peak_bytes
for _ in range(3):
    began = time.process_time()
    size = write_page([folder], folder / "report.html")
    seconds.append(time.process_time() - began)
added = used().resident_peak_bytes - before
print(json.dumps({"bytes": size, "cpu_s": sorted(seconds)[1], "memory_bytes": added}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)} (default: all)")
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in parser.parse_args().cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            write_run(Path(folder), **CASES[name])
            done = subprocess.run([sys.executable, "-c", BUILD, folder], capture_output=True, text=True, check=True)
        found[name] = CASES[name] | {"metrics": METRICS} | json.loads(done.stdout.splitlines()[-1])
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def write_run(folder: Path, *, steps: int, prompts: int, group: int, prompt_tokens: int, tokens: int) -> None:
    """Writes the files of a run that the page reads."""
    settings = as_dict(load("grpo_qwen3_moe", [f"steps={steps}"]))
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "overrides.yaml").write_text(yaml.safe_dump([f"steps={steps}"]))
    log = MetricsLog(LoggingConfig(progress=False), folder, name="run", steps=steps, done_steps=None, decode=pieces)
    pool = Pool(np.random.default_rng(0))
    metrics: dict[str, float] = {}
    for step in range(1, steps + 1):
        groups = [made(pool, each, group, prompt_tokens, tokens) for each in range(prompts)]
        batch = pack(groups)
        batch = batch.with_advantages(torch.randn(batch.num_tokens) * batch.loss_mask)
        chosen = log.choose_samples(step, members(groups), batch)
        chosen.take_trainer_logprobs(torch.randn(sum(chosen.rollouts[place].num_tokens for place in chosen.places)))
        log.log_samples(chosen)
        for phase in PHASES:
            log.timeline.ended(phase, None, 0.1)
        metrics = metrics or rollout_metrics(groups)
        values = pool.generator.random(METRICS).tolist()
        others = {f"area_{each % 9}/other_{each}_nats": value for each, value in enumerate(values)}
        log.log(step, dict(list((metrics | others).items())[:METRICS]))
    log.close()


def pieces(tokens: Sequence[int]) -> list[str]:
    """Returns a word for each token."""
    return [f" word{token}" for token in tokens]


class Pool:
    """Random tokens and logprobs, of which attempts get stretches: drawing all of them anew would take minutes."""

    def __init__(self, generator: np.random.Generator):
        self.generator = generator
        self._tokens = generator.integers(0, 30_000, 1 << 20).astype(np.int32)
        self._nats = -generator.exponential(1.0, 1 << 20).astype(np.float32)

    def stretch(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `count` tokens and their logprobs."""
        start = int(self.generator.integers(0, len(self._tokens) - count))
        return self._tokens[start : start + count], self._nats[start : start + count]


def made(pool: Pool, place: int, group: int, prompt_tokens: int, tokens: int) -> Group:
    """Returns attempts of random tokens at a prompt."""
    words, _ = pool.stretch(prompt_tokens)
    prompt = Prompt(id=str(place), input=ModelInput(words), text="".join(pieces(words.tolist())), answer="42")
    sampled = np.arange(tokens) >= prompt_tokens
    found = []
    for index in range(group):
        reward = float(pool.generator.integers(0, 2))
        answer, nats = pool.stretch(tokens - prompt_tokens)
        rollout = Rollout(
            prompt=prompt,
            sample_index=index,
            input=prompt.input.then(answer),
            loss_mask=sampled,
            rollout_logprobs=np.concatenate([np.zeros(prompt_tokens, np.float32), nats]),
            versions=np.where(sampled, 1, -1),
            finish_reason=FinishReason.STOP,
            reward=reward,
            reward_parts={"exact_match": reward},
            reward_weights={"exact_match": 1.0},
        )
        # As long as a real one: words of one's own for each of 4 million tokens would take longer than all else.
        rollout.text = f"word{answer[0]} " * (tokens - prompt_tokens)
        found.append(rollout)
    return Group(id=str(place), prompt=prompt, rollouts=found)


if __name__ == "__main__":
    main()
