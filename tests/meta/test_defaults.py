"""docs/defaults.md names settings that exist, with their real defaults, and what its last column says can be built."""

import re
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import yaml

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.loops.config import LoopConfig
from rlframe.megatron.config.train import TrainConfig
from rlframe.utils import registry
from rlframe.utils.build import as_dict, build
from tests.meta.checkout import ROOT

COLUMNS = ("algorithm", "setting", "rlframe", "trl", "verl", "ms_swift", "theirs")
LINES = (ROOT / "docs" / "defaults.md").read_text(encoding="utf-8").splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if line.startswith("|")]
ROWS = [dict(zip(COLUMNS, cells, strict=True)) for cells in CELLS[2:]]
NAMES = registry.names("rlframe.algorithms")
SETTINGS = [row for row in ROWS if row["setting"].startswith("`")]


def configs(row: dict[str, str]) -> list[tuple[type, str]]:
    """Returns the dataclasses that the row's setting is of, and what stands before its key there."""
    if row["algorithm"] == "all":
        section = row["setting"].strip("`").partition(".")[0]
        return [({"train": TrainConfig, "loop": LoopConfig}[section], f"{section}.")]
    names = row["algorithm"].split(", ")
    return [(registry.find("rlframe.algorithms", name, key="docs")[1], "") for name in names]


def value_at(config: Any, key: str) -> Any:
    """Returns the value at a dotted key."""
    for part in key.split("."):
        assert is_dataclass(config) and part in {field.name for field in fields(config)}, key
        config = getattr(config, part)
    return as_dict(config)


def number(text: str) -> Any:
    """Returns a YAML value; 1e-6, which YAML 1.1 takes for text, as a number."""
    value = yaml.safe_load(text)
    return float(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+e-?\d+", value) else value


def test_every_algorithm_that_the_table_names_exists() -> None:
    assert {name for row in ROWS for name in row["algorithm"].split(", ")} - {"all"} <= set(NAMES)
    assert len(SETTINGS) > 25


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: f"{row['algorithm']} {row['setting']}")
def test_a_setting_of_the_table_has_the_default_that_it_states(row: dict[str, str]) -> None:
    key, stated = (re.match(r"`([^`]*)`", row[column]) for column in ("setting", "rlframe"))
    assert key and stated
    for config, prefix in configs(row):
        assert key[1].startswith(prefix)
        assert value_at(config(), key[1].removeprefix(prefix)) == number(stated[1])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['algorithm']} {row['setting']}")
def test_what_gives_theirs_can_be_built(row: dict[str, str]) -> None:
    # Of several frameworks each has its own part.
    for part in row["theirs"].split(";"):
        overrides = re.findall(r"`([a-z_.]+)=([^`]*)`", part)
        for config, prefix in configs(row) if overrides else ():
            values: dict[str, Any] = {}
            for key, text in overrides:
                *sections, name = key.removeprefix(prefix).split(".")
                place = values
                for section in sections:
                    place = place.setdefault(section, {})
                place[name] = number(text)
            built = build(config, values)
            for key, text in overrides:
                if "[" not in text:
                    assert value_at(built, key.removeprefix(prefix)) == number(text)


def test_every_offline_algorithm_is_looked_at() -> None:
    # Classification is cross-entropy everywhere.
    offline = {
        name
        for name in NAMES
        if not issubclass(registry.find("rlframe.algorithms", name, key="docs")[0], OnlineAlgorithm)
    }
    assert offline - {name for row in ROWS for name in row["algorithm"].split(", ")} <= {"classification"}
