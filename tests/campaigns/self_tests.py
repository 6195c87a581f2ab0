"""Whether mode=self_test finds each of a list of faults: `python -m tests.campaigns.self_tests [FAULT ...]`.

Each run plants one fault of `tests.campaigns.planted`; a last one has none, and must pass. The table that it prints is
that of docs/self_test.md. The result is in `examples/benchmarks/results/faults_self_tests.json`.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.planted import FAULTS, VARIABLE
from tests.campaigns.trials import Outcome, Trial, write
from tests.multiprocess.program import ROOT, Program

SETTINGS = {
    "mode": "self_test",
    "prompts_per_step": 32,
    "algorithm.group_size": 4,
    "algorithm.kl_coefficient": 0.01,
    "train.num_minibatches": 2,
    "rollout.max_tokens": 16,
    "rollout.num_engines": 1,
    "data.max_prompt_tokens": 64,
    "data.evaluation_count": 8,
    "self_test.further_checks": f"[{ROOT / 'tests/campaigns/planted.py'}:Planted]",
    "logging.progress": "false",
    "logging.tensorboard": "false",
    "logging.report": "false",
}
CLEAN = "none"
"""Stands for a run without a fault."""
DEADLINE_S = 1800.0
CHECKS = {
    "engine_temperature": "temperature",
    "trainer_temperature": "temperature",
    "sharpened_samples": "sampling",
    "stale_layer": "sync",
    "second_copy": "sync",
    "blind_proof": "sync",
    "prompt_in_mask": "mask",
    "last_token_lost": "mask",
    "dropped_end": "mask",
    "doubled_token": "batch",
    "rewards_of_others": "batch",
    "advantages_negated": "advantages",
    "no_seeds": "seeds",
    "one_seed": "seeds",
    "other_reference": "reference",
    "learning": "weights",
    "noise": "determinism",
    "leak": "memory",
}
"""The check that must find each fault. `gap` finds the others."""


def found_by(fault: str) -> str:
    """Returns the name of the check that must find a fault."""
    return CHECKS.get(fault, "gap")


def self_test(folder: Path, fault: str, settings: Mapping[str, Any] = SETTINGS) -> dict[str, list[str]]:
    """Runs a self test with a fault. Returns what failed and warned, as `check, what` by verdict."""
    environment = {} if fault == CLEAN else {VARIABLE: fault}
    with Program(folder, dict(settings), environment=environment) as program:
        code = program.finish(DEADLINE_S)
        file = folder / "self_test" / "self_test.json"
        assert file.exists(), f"{fault} ended with {code}:\n{program.errors()}"
    findings = json.loads(file.read_text())["findings"]
    found = {verdict: [f"{each['check']}, {each['what']}" for each in findings if each["verdict"] == verdict]
             for verdict in ("FAIL", "WARN")}  # fmt: skip
    for each in findings:
        if each["verdict"] in found:
            sys.stderr.write(f"{fault}: {each['verdict']} {each['check']}, {each['what']}: {each['value']}\n")
    assert code == (1 if found["FAIL"] else 0), f"{fault} ended with {code}, having found {found}"
    return found


def trials(faults: Sequence[str]) -> list[Trial]:
    """Tries each fault, and prints a row of the table for it."""
    done = []
    for fault in faults:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = self_test(Path(folder) / "run", fault)
        checks = {each.partition(",")[0] for each in found["FAIL"]}
        right = not found["FAIL"] and not found["WARN"] if fault == CLEAN else found_by(fault) in checks
        outcome = Outcome.WRONG if not right else Outcome.USED if fault == CLEAN else Outcome.REPORTED
        said = "; ".join(found["FAIL"]) or "nothing"
        meaning = (FAULTS[fault].__doc__ or "").strip() if fault in FAULTS else "No fault."
        sys.stdout.write(f"| `{fault}` | {meaning} | {said} |\n")
        sys.stdout.flush()
        done.append(Trial(name=fault, outcome=outcome, said=said, seconds=time.monotonic() - began))
    return done


if __name__ == "__main__":
    found = trials(sys.argv[1:] or [*FAULTS, CLEAN])
    if not sys.argv[1:]:
        write("self_tests", found, command="python -m tests.campaigns.self_tests")
    sys.exit(any(trial.outcome is Outcome.WRONG for trial in found))
