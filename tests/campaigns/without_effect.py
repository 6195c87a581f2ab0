"""Finds settings that are taken and never read: runs each experiment for two steps, notes in the driver and in every
worker which settings rlframe reads, and asks of each that nobody read whether another value of it is refused.

`python -m tests.campaigns.without_effect [EXPERIMENT...]` starts Ray for each experiment.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rlframe.run.check import checked
from rlframe.run.load import load
from rlframe.utils.build import as_dict
from rlframe.utils.errors import ConfigError
from tests.campaigns.configurations import EXPERIMENTS, names, remembering
from tests.campaigns.leaves import get, leaves, other_values, put
from tests.campaigns.trials import Outcome, Trial, write

RECORDER = Path(__file__).parent / "recorder"
SMALL = ["steps=2", "prompts_per_step=8", "train.optimizer.warmup_steps=0"]
"""What makes a run of any experiment short, and passes its warm-up."""
FOR_FAULTS = {
    "max_restarts": "read when an engine or a rank dies",
    "phase_timeout_factor": "read when a phase has been seen before",
    "bucket_bytes": "read where transport=auto finds that it has to stream",
    "decay_steps": "read after the warm-up",
    "chat_template_kwargs": "read where records have messages, which those of labelled texts need not have",
    "chat_template_date": "read where records have messages, which those of labelled texts need not have",
    "template_limit_s": "read where records have messages, which those of labelled texts need not have",
}
"""Settings that two steps without a fault cannot show."""
RUN = ("grpo", "ppo", "gkd", "sft", "pretrain", "dpo", "kto", "reward_model", "classification", "embedding", "reranker")


def reads(experiment: str) -> set[str]:
    """Returns `Class.field` of every setting that a short run of the experiment reads."""
    config, overrides = EXPERIMENTS[experiment]
    # In a fraction of its steps GKD samples nothing.
    overrides = [*overrides, "algorithm.on_policy_fraction=0.99"] if experiment == "gkd" else overrides
    with tempfile.TemporaryDirectory() as folder:
        read = Path(folder) / "read"
        read.mkdir()
        paths = os.pathsep.join([str(RECORDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        environment = os.environ | {"RLFRAME_READ_SETTINGS": str(read), "PYTHONPATH": paths}
        # What an earlier run has tokenised need not be read again.
        fresh = [] if "grpo" in config or "gkd" in config else [f"data.cache_folder={folder}/cache"]
        arguments = ["--config-name", config, *overrides, *SMALL, *fresh, f"output={folder}/out"]
        command = [sys.executable, "-m", "rlframe.main", *arguments]
        subprocess.run(command, env=environment, check=True, timeout=600, capture_output=True)
        return {line for file in read.iterdir() for line in file.read_text().splitlines()}


def owners(config: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields dotted key and `Class.field` of everything in a configuration."""
    for field in fields(config):
        value, dotted = getattr(config, field.name), f"{key}.{field.name}" if key else field.name
        yield dotted, f"{type(config).__name__}.{field.name}"
        for name, member in value.items() if isinstance(value, dict) else [("", value)]:
            if is_dataclass(member):
                yield from owners(member, f"{dotted}.{name}" if name else dotted)


def unread_and_taken(experiment: str, read: Set[str]) -> Iterator[Trial]:
    """Yields a trial for each other value of each setting that the run did not read."""
    config, overrides = EXPERIMENTS[experiment]
    run = load(config, [*overrides, *SMALL])
    values, owner = as_dict(run), dict(owners(run))
    for leaf in leaves(run):
        field = leaf.key.rpartition(".")[2]
        if leaf.section or owner[leaf.key] in read or field in FOR_FAULTS:
            continue
        for value in other_values(leaf, get(values, leaf.key)):
            name = f"{experiment}: {leaf.key}={value}"
            try:
                checked(put(values, leaf.key, value))
            except ConfigError as error:
                naming = [str(fault) for fault in error.faults if names(str(fault), leaf.key)]
                outcome = Outcome.REFUSED if naming else Outcome.WRONG
                yield Trial(name=name, outcome=outcome, said=str((naming or error.faults)[0]))
            else:
                yield Trial(name=name, outcome=Outcome.WRONG, said="taken, and nothing reads it")


def main(experiments: list[str]) -> None:
    """Runs the experiments and writes the table."""
    remembering()
    trials = []
    for experiment in experiments:
        trials += unread_and_taken(experiment, reads(experiment))
    for trial in trials:
        if trial.outcome is Outcome.WRONG:
            sys.stdout.write(f"{trial.name}: {trial.said}\n")
    summary = write("without_effect", trials, command="python -m tests.campaigns.without_effect")
    sys.stdout.write(summary.row() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(RUN))
