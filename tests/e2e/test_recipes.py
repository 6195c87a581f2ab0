"""The recipes of configs/ for real models: their settings fit the published dimensions, and each runs two steps with
shrunk ones, through the same keys."""

import re
import shutil
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from rlframe.config.load import composed
from rlframe.rollout.base.config import RolloutConfig
from rlframe.run.check import check
from rlframe.run.check.context import algorithm_of, critic_of, online
from rlframe.run.compose.run import run
from rlframe.run.config import RunConfig
from rlframe.run.folder import claim
from rlframe.run.load import load
from rlframe.run.preflight.devices import KINDS
from rlframe.run.preflight.plan import plan
from rlframe.run.roles import topology
from rlframe.tools.plan import on
from rlframe.utils.errors import ConfigError
from tests.e2e.recipes import draw_weights, make_corpus, make_data, make_model
from tests.meta.checkout import ROOT
from tests.multiprocess.forks import forked_workers
from tests.multiprocess.program import REWARD, lines

RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if re.search(r"_\d+[bm](_|$)", path.stem))
"""Those whose name says the size of a model."""
HARDWARE = re.compile(r"^# Hardware: (\d+) GPUs? of (\d+) GB", re.MULTILINE)
"""What a recipe says of its hardware."""
DEVICES = {"80": "h100", "141": "h200"}
"""Devices of so many GB, as preflight calls them."""
UNKNOWN_HERE = {
    "cluster.device",
    "rollout.name",
    "rollout.gpu_memory_utilization",
    "train.moe.router_replay",
    "teacher.path",
    *([] if which("bwrap") else ["environment.name"]),
}
"""Settings that ask for devices, programs, packages and weights which are not here."""
SHORT = {
    "steps": 2,
    "prompts_per_step": 4,
    "train.parallel": "d1",
    "train.dtype": "float32",
    "train.optimizer.warmup_steps": 1,
    "data.evaluation_count": 2,
    "evaluation.every_steps": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.export": "false",
    "logging.progress": "false",
    "logging.tensorboard": "false",
    "cluster": "cpu",
}
SHORT_ONLINE = {"rollout.name": "transformers", "rollout.num_engines": 1, "rollout.max_tokens": 8, "reward.workers": 1}
OWN = {"dapo_qwen3_8b": {"reward.parts.math.name": f"{REWARD}:score"}}
"""Settings of single recipes: dynamic sampling needs a reward that random answers earn."""
CORPUS = "environment.options.tools.search.options.corpus"
USUAL = {"grpo_qwen3_4b_search"}
"""The recipes that `make test` runs. Preference training has the runs of test_preference.py."""


def stand_ins(values: dict[str, Any], folder: Path, *, shrunk: bool) -> dict[str, Any]:
    """Settings that replace a recipe's models and data by local ones."""
    models = {
        role: make_model(values[role]["path"], folder / role, shrunk=shrunk)
        for role in ("model", "teacher")
        if role in values
    }
    if shrunk and "teacher" in models:
        draw_weights(models["teacher"])
    data = make_data(values["data"]["path"], folder / "data.jsonl")
    tools = values.get("environment", {}).get("options", {}).get("tools", {})
    corpus = {CORPUS: make_corpus(folder)} if "search" in tools else {}
    return (
        corpus
        | {f"{role}.path": path for role, path in models.items()}
        | {"data.path": data, "model.random_init": "true"}
    )


def hardware(name: str) -> tuple[int, str]:
    """The number of devices that the head of a recipe says, and their size in GB."""
    said = HARDWARE.search((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert said, "the head says `# Hardware: N GPUs of M GB`"
    return int(said[1]), said[2]


def published(name: str, folder: Path) -> RunConfig:
    """The recipe with models of the published dimensions."""
    settings = stand_ins(composed(name), folder, shrunk=False)
    return load(name, [f"{key}={value}" for key, value in settings.items()])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_published_dimensions_and_its_devices(name: str, tmp_path: Path) -> None:
    config = published(name, tmp_path)
    try:
        check(config)
    except ConfigError as error:
        assert [str(fault) for fault in error.faults if str(fault.key) not in UNKNOWN_HERE] == []
    roles = topology(config, online=online(config), has_critic=critic_of(config) is not None)
    assert roles.num_devices == hardware(name)[0]


@pytest.mark.parametrize("name", RECIPES)
def test_preflight_says_that_a_recipe_fits(name: str, tmp_path: Path) -> None:
    device = KINDS[DEVICES[hardware(name)[1]]]
    config = on(device, published(name, tmp_path))
    assert plan(config, algorithm_of(config), device).fits


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.thorough) for name in RECIPES]
)
def test_a_recipe_runs_two_steps_with_shrunk_dimensions(name: str, tmp_path: Path) -> None:
    if name == "grpo_qwen3_4b_python" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    values, folder = composed(name), tmp_path / "run"
    settings = SHORT | stand_ins(values, tmp_path, shrunk=True) | {"output": folder}
    own = {field.name for field in fields(RolloutConfig)}
    of_vllm = [key for key in values.get("rollout") or {} if key not in own]
    settings |= SHORT_ONLINE if "rollout" in values else {}
    settings |= {"algorithm.group_size": 2} if values["algorithm"].get("group_size", 1) > 2 else {}
    settings |= OWN.get(name, {})
    config = load(name, [f"~rollout.{key}" for key in of_vllm] + [f"{key}={value}" for key, value in settings.items()])
    check(config)
    with closing(claim(config)), forked_workers():
        run(config)
    steps = [line for line in lines(folder / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
