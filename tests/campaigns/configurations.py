"""Counts what becomes of hostile values in every leaf of a configuration: refused by its key, or used.

`python -m tests.campaigns.configurations [configurations] [command_line]` tries some thousands in this process, where
data that does not change is read once, and some on the real command line, timed.
"""

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import rlframe.run.check as check_package
import rlframe.run.check.data as data_check
from rlframe.run.check import checked
from rlframe.run.load import load
from rlframe.utils.bounds import shortened
from rlframe.utils.build import as_dict
from rlframe.utils.errors import ConfigError
from tests.campaigns.leaves import HOSTILE, UNKNOWN, Leaf, get, leaves, other_values, put, same
from tests.campaigns.trials import Outcome, Trial, write

EXPERIMENTS: dict[str, tuple[str, list[str]]] = {
    "grpo": ("grpo_qwen3_moe", []),
    "dapo": ("grpo_qwen3_moe", ["algorithm=dapo", "train.lora.rank=4"]),
    "grpo with kl": (
        "grpo_qwen3_moe",
        ["algorithm.kl_coefficient=0.1", "algorithm.adaptive_kl.target_nats=0.1", "train.num_minibatches=2"],
    ),
    "dr_grpo": ("grpo_qwen3_moe", ["algorithm=dr_grpo", "reward=math_length"]),
    "ppo": ("grpo_qwen3_moe", ["algorithm=ppo", "critic.train.optimizer.lr=1e-3", "critic.model.path=qwen3_moe_tiny"]),
    "gkd": ("gkd_qwen3_moe_tiny", ["teacher.path=qwen3_moe_tiny"]),
    "vllm": ("grpo_qwen3_moe", ["rollout=vllm"]),
    "sft": ("sft_qwen3_moe_tiny", []),
    "pretrain": ("pretrain_qwen3_moe_tiny", []),
    "dpo": ("dpo_qwen3_moe_tiny", []),
    "orpo": ("dpo_qwen3_moe_tiny", ["algorithm=orpo"]),
    "simpo": ("dpo_qwen3_moe_tiny", ["algorithm=simpo"]),
    "kto": ("kto_qwen3_moe_tiny", []),
    "reward_model": ("reward_model_qwen3_moe_tiny", []),
    "classification": ("classification_qwen3_moe_tiny", []),
    "embedding": ("embedding_qwen3_moe_tiny", []),
    "reranker": ("reranker_qwen3_moe_tiny", []),
    **{
        name: ("grpo_qwen3_moe", [f"algorithm={name}"])
        for name in ("cispo", "gspo", "sapo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    },
    "on_policy_distillation": (
        "grpo_qwen3_moe",
        ["algorithm=on_policy_distillation", "teacher.path=qwen3_moe_tiny", "~reward"],
    ),
}
"""By name, a file of configs/ and what is changed in it, so that together they have every leaf."""
COUNT = 3200
LARGEST = 10**13
"""No setting of a run that can be is greater."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Holds a configuration with one value that may not belong."""

    experiment: str
    leaf: Leaf
    what: str
    """Name of the value."""
    value: Any

    @property
    def name(self) -> str:
        return f"{self.experiment}: {self.key}, {self.what}"

    @property
    def key(self) -> str:
        """The dotted key that is set."""
        return f"{self.leaf.key}_nonesuch" if self.what == UNKNOWN else self.leaf.key


@cache
def base(experiment: str) -> tuple[dict[str, Any], list[Leaf]]:
    """Returns the values of an experiment, which are free of faults, and its leaves."""
    config, overrides = EXPERIMENTS[experiment]
    run = load(config, overrides)
    return as_dict(run), list(leaves(run))


def attempts(experiment: str) -> Iterator[Attempt]:
    """Yields every hostile and every other valid value in every leaf of an experiment."""
    values, found = base(experiment)
    for leaf in found:
        now = get(values, leaf.key)
        for what, value in [*HOSTILE.items(), (UNKNOWN, 1)]:
            # An empty section is its defaults, which the leaves within it are tried from.
            if not same(value, now) and not (leaf.section and value == {}):
                yield Attempt(experiment=experiment, leaf=leaf, what=what, value=value)
        for value in other_values(leaf, now):
            yield Attempt(experiment=experiment, leaf=leaf, what=f"set to {value}", value=value)


def sample(count: int, *, seed: int, experiments: Collection[str] = EXPERIMENTS) -> list[Attempt]:
    """Returns so many attempts of the experiments, no two alike in leaf and value as far as there are others."""
    every: dict[tuple[str, str], list[Attempt]] = {}
    for experiment in experiments:
        for attempt in attempts(experiment):
            every.setdefault((attempt.key, attempt.what), []).append(attempt)
    chooser = random.Random(seed)
    groups = [chooser.sample(group, len(group)) for group in every.values()]
    chooser.shuffle(groups)
    return [group[turn] for turn in range(len(experiments)) for group in groups if turn < len(group)][:count]


def tried(attempt: Attempt) -> Trial:
    """Returns what became of an attempt in this process."""
    values, _ = base(attempt.experiment)
    began = time.monotonic()
    try:
        run = checked(put(values, attempt.key, attempt.value))
    except ConfigError as error:
        seconds = time.monotonic() - began
        naming = [str(fault) for fault in error.faults if names(str(fault), attempt.key)]
        outcome, said = (Outcome.REFUSED, naming[0]) if naming else (Outcome.WRONG, f"no key in: {error.faults[0]}")
        return Trial(name=attempt.name, outcome=outcome, said=printable(said), seconds=seconds)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        said = f"{type(error).__name__}: {printable(shortened(str(error)))}"
        return Trial(name=attempt.name, outcome=Outcome.WRONG, said=said)
    if attempt.what == UNKNOWN:
        return Trial(name=attempt.name, outcome=Outcome.WRONG, said="an unknown key was taken")
    return used(attempt, get(values, attempt.key), get(as_dict(run), attempt.key))


def used(attempt: Attempt, before: Any, after: Any) -> Trial:
    """Returns whether an accepted value is one that a run can have, and stands where it was put."""
    if same(before, after) and not equal(before, attempt.value):
        return Trial(name=attempt.name, outcome=Outcome.WRONG, said=f"taken, and still {shortened(after)}")
    if hostile := [value for value in plain(after) if not possible(value)]:
        return Trial(name=attempt.name, outcome=Outcome.WRONG, said=printable(f"took {shortened(hostile[0])}"))
    return Trial(name=attempt.name, outcome=Outcome.USED)


def names(fault: str, key: str) -> bool:
    """Whether a sentence has the dotted key; or begins with its section and has the field's name."""
    section, _, field = key.rpartition(".")
    words = re.findall(r"[\w.]+", fault)
    whole = any(word.rstrip(".") == key or word.startswith(f"{key}.") for word in words)
    return whole or (bool(section) and fault.startswith(section) and field in re.findall(r"\w+", fault))


def equal(one: Any, other: Any) -> bool:
    """Whether two values mean the same: 1 is 1.0, and a text a number that reads like it."""
    try:
        return one == other or float(one) == float(other)
    except (TypeError, ValueError, OverflowError):
        return False


def plain(value: Any) -> Iterator[Any]:
    """Yields the scalars of nested lists and mappings."""
    if isinstance(value, Mapping):
        for name, member in value.items():
            yield name
            yield from plain(member)
    elif isinstance(value, list):
        for member in value:
            yield from plain(member)
    else:
        yield value


def possible(value: Any) -> bool:
    """Whether a run can have the scalar at all."""
    if isinstance(value, str):
        return value.isprintable() or value.isspace()
    return not isinstance(value, int | float) or abs(value) <= LARGEST


def printable(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def remembering() -> Callable[[], None]:
    """Reads a dataset once for each setting of it, and looks once at what is beside a faulty section: the real code,
    whose answer most attempts share. Returns what ends it."""
    load, elsewhere = data_check.load, check_package._faults_without
    known: dict[str, Any] = {}

    def once(call: Callable[[], Any], key: str) -> Any:
        if key not in known:
            known[key] = call()
        return known[key]

    def load_once(data: Any, *, seed: int, understand: Any) -> Any:
        return once(lambda: load(data, seed=seed, understand=understand), f"{data} {seed} {understand}")

    def elsewhere_once(rest: Any, faulty: Any) -> Any:
        return once(lambda: elsewhere(rest, faulty), shown(rest) + shown(sorted(faulty)))

    def end() -> None:
        data_check.load, check_package._faults_without = load, elsewhere

    data_check.load, check_package._faults_without = load_once, elsewhere_once
    return end


def shown(value: Any) -> str:
    """Returns a value as text; `repr` refuses whole numbers of 5000 digits."""
    try:
        return repr(value)
    except ValueError:
        return f"{id(value)}"


GROUPS = ("train", "rollout", "model", "data", "algorithm", "cluster")
SETTINGS = (
    "train.parallel",
    "train.optimizer.lr",
    "rollout.temperature",
    "reward.workers",
    "cluster.start_timeout_s",
)
COMMAND_LINE: Sequence[str] = [
    *(f"{group}={value}" for group in GROUPS for value in ("null", "5")),
    *(f"{key}={value}" for key in SETTINGS for value in ("null", "-1", "inf", "1e300", "nan", "", "x")),
    "=5",
    "",
    "a..b=1",
    "train.optimizer=null",
    "data.path=" + "[" * 50_000 + "]" * 50_000,
    "data.path=" + "{a:" * 40 + "1" + "}" * 40,
    "seed=" + "9" * 5000,
    "output=" + "x" * 5000,
    "model.path=" + "x" * 5000,
    "data.path=" + "x" * 5000,
    "name=\udcff",
    "data.path=\udcff",
    "train.lr=${nonesuch}",
    "train.lr=${",
]
"""Arguments of the real command line, all to be refused."""


def on_the_command_line(argument: str) -> Trial:
    """Returns what the program itself says to an argument, and after how many seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "rlframe.main", "--config-name", "grpo_qwen3_moe", argument]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300, check=False)
    seconds, key = time.monotonic() - began, argument.partition("=")[0]
    key = {"train.lr": "train.optimizer.lr"}.get(key, key)
    refused = done.returncode == 2 and "Traceback" not in done.stderr and key in done.stderr
    lines = done.stderr.strip().splitlines() or ["nothing"]
    return Trial(
        name=f"command line: {printable(shortened(argument))}",
        outcome=Outcome.REFUSED if refused else Outcome.WRONG,
        said=printable(lines[min(1, len(lines) - 1)] if refused else lines[-1]),
        seconds=seconds,
    )


def report(campaign: str, trials: list[Trial]) -> None:
    """Writes what went wrong, and the table."""
    for trial in trials:
        if trial.outcome is Outcome.WRONG:
            sys.stdout.write(f"{trial.name}: {trial.said}\n")
    command = f"python -m tests.campaigns.configurations {campaign}"
    sys.stdout.write(write(campaign, trials, command=command).row() + "\n")


def main(campaigns: list[str]) -> None:
    """Tries them all and writes the tables."""
    if "configurations" in campaigns:
        remembering()
        report("configurations", [tried(attempt) for attempt in sample(COUNT, seed=20261122)])
    if "command_line" in campaigns:
        with ThreadPoolExecutor(3) as several:
            report("command_line", list(several.map(on_the_command_line, COMMAND_LINE)))


if __name__ == "__main__":
    main(sys.argv[1:] or ["configurations", "command_line"])
