"""Shows that a rebuilding of the code changed no number: `python -m tests.campaigns.unchanged record|compare`.

`record` runs every case and writes the digests of its metrics, line by line, and of its exported weights to
`examples/benchmarks/results/unchanged.json`; `compare` runs the cases again and names the first line that differs. Only
the metrics that were recorded are compared, times aside, so that a new one is no difference. The numbers are those of
one machine and one torch: record and compare on the same.
"""

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.campaigns.trials import RESULTS
from tests.multiprocess.program import Program, metrics

RESULT = RESULTS / "unchanged.json"
LAYOUTS = ("d2e2", "d1t2")
COMMON = {"logging.tensorboard": "false", "logging.progress": "false", "evaluation.every_steps": 10}
OFFLINE = COMMON | {"steps": 20, "prompts_per_step": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"grpo_seed_{seed}": ("grpo_qwen3_moe", COMMON | {"steps": 60, "seed": seed}) for seed in (1, 2, 3)},
    "ppo": ("grpo_qwen3_moe", COMMON | {"algorithm": "ppo", "steps": 20}),
    "gkd": ("gkd_qwen3_moe_tiny", COMMON | {"steps": 20, "teacher.path": "qwen3_moe_tiny"}),
    "sft": ("sft_qwen3_moe_tiny", OFFLINE),
    "dpo": ("dpo_qwen3_moe_tiny", OFFLINE),
    "kto": ("kto_qwen3_moe_tiny", OFFLINE),
}
"""(configuration, overrides) by name; each is run in every layout of LAYOUTS."""
DEADLINE_S = 1200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Holds what one run came to."""

    keys: list[str]
    """The metrics that are compared."""
    lines: list[str]
    """A digest of each line of `metrics.jsonl`."""
    weights: str
    """SHA-256 of the exported tensors."""


def of_run(folder: Path, keys: Sequence[str] | None = None) -> Numbers:
    """Returns the numbers of the finished run in `folder`, of the metrics `keys`; of all when None."""
    records = metrics(folder)
    compared = sorted({key for record in records for key in record}) if keys is None else list(keys)
    weights = hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()
    return Numbers(keys=compared, lines=[digest(record, compared) for record in records], weights=weights)


def digest(record: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Returns 16 hexadecimal digits of those `keys` that a record has, and their values to the last bit."""
    chosen = {key: record[key] for key in keys if key in record}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]


def first_difference(before: Numbers, now: Numbers) -> str:
    """Returns where two runs differ; nothing when they do not."""
    if len(before.lines) != len(now.lines):
        return f"{len(now.lines)} lines of metrics, recorded were {len(before.lines)}"
    for number, (left, right) in enumerate(zip(before.lines, now.lines, strict=True), 1):
        if left != right:
            return f"line {number} of metrics.jsonl"
    return "" if before.weights == now.weights else "the exported weights"


def run_case(folder: Path, config: str, overrides: Mapping[str, Any], layout: str) -> Path:
    """Runs one case to its end, and returns its folder."""
    with Program(folder, {**overrides, "train.parallel": layout}, config=config, fresh=True) as program:
        assert program.finish(DEADLINE_S) == 0, program.errors()[-2000:]
    return folder


def main() -> int:
    """Records or compares; returns 1 when something differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.unchanged")
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("names", nargs="*", help="cases by the beginning of their names, such as dpo-d1t2; all if none")
    parser.add_argument("--keep", type=Path, help="keeps the runs' folders here, to look at a difference")
    options = parser.parse_args()
    content: dict[str, Any] = {"cases": {}}
    if RESULT.exists():
        content = json.loads(RESULT.read_text(encoding="utf-8"))
    different = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name, (config, overrides) in CASES.items():
            for case in (f"{name}-{layout}" for layout in LAYOUTS):
                if options.names and not case.startswith(tuple(options.names)):
                    continue
                began = time.monotonic()
                folder = run_case((options.keep or Path(temporary)) / case, config, overrides, case.rsplit("-", 1)[1])
                if options.what == "record":
                    said = "recorded"
                    content["cases"][case] = asdict(of_run(folder))
                    content["command"] = "python -m tests.campaigns.unchanged record"
                    content["machine"] = f"{platform.machine()}, two cores, Python {platform.python_version()}"
                    content["torch"] = str(torch.__version__)
                    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
                else:
                    before = Numbers(**content["cases"][case])
                    wrong = first_difference(before, of_run(folder, before.keys))
                    different += bool(wrong)
                    said = f"DIFFERENT: {wrong}" if wrong else "equal"
                sys.stdout.write(f"{case}: {said} ({time.monotonic() - began:.0f} s)\n")
                sys.stdout.flush()
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
