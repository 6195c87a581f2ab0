"""The strict builder, on small dataclasses of its own."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import pytest

from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.build import as_dict, build
from rlframe.utils.errors import ConfigError, SettingError
from rlframe.utils.faults import Fault, Key


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(kw_only=True, slots=True)
class Optimizer:
    lr: Annotated[float, Range(above=0, maximum=1)] = 1e-6
    min_lr: float = 0.0
    warmup: int | None = None
    steps: Annotated[int, Range(1, 100)] = 1

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.min_lr > self.lr:
            raise SettingError("min_lr", f"must be at most lr={self.lr}", got=self.min_lr)
        if self.warmup == 13:
            raise ValueError("thirteen is unlucky")


@dataclass(kw_only=True, slots=True)
class Train:
    parallel: str = "d1"
    fast: bool = False
    colour: Colour = Colour.RED
    remark: str = ""
    optimizer: Optimizer = field(default_factory=Optimizer)


@dataclass(kw_only=True, slots=True)
class Source:
    path: str
    weight: float = 1.0


@dataclass(kw_only=True, slots=True)
class Run:
    name: str
    files: list[str] = field(default_factory=list)
    sources: dict[str, Source] = field(default_factory=dict)
    train: Train = field(default_factory=Train)


def faults(values: dict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(Run, values)
    return list(map(str, caught.value.faults))


def test_defaults_fill_what_is_not_given() -> None:
    assert build(Run, {"name": "a"}) == Run(name="a")


def test_an_empty_section_is_its_defaults() -> None:
    assert build(Run, {"name": "a", "train": {}}) == Run(name="a")


def test_no_text_is_given_where_it_is_the_default() -> None:
    assert build(Run, as_dict(Run(name="a"))) == build(Run, {"name": "a", "train": {"remark": ""}}) == Run(name="a")


def test_nested_values_reach_their_fields() -> None:
    values = {
        "name": "a",
        "files": ["x", "y"],
        "sources": {"s": {"path": "p", "weight": 2}},
        "train": {"colour": "blue", "fast": True, "optimizer": {"lr": "1e-3", "warmup": 5}},
    }
    run = build(Run, values)
    assert run.files == ["x", "y"]
    assert run.sources == {"s": Source(path="p", weight=2.0)}
    assert run.train.colour is Colour.BLUE and run.train.fast
    assert run.train.optimizer == Optimizer(lr=1e-3, warmup=5)
    assert type(run.sources["s"].weight) is float


def test_as_dict_is_what_build_reads() -> None:
    run = build(Run, {"name": "a", "sources": {"s": {"path": "p"}}, "train": {"colour": "blue"}})
    assert as_dict(run)["train"]["colour"] == "blue" and type(as_dict(run)["train"]["colour"]) is str
    assert build(Run, as_dict(run)) == run


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"train": {"optimzer": {"lr": 1}}}, "train.optimzer.lr is not a key; did you mean train.optimizer.lr?"),
        ({"train": {"lr": 1}}, "train.lr is not a key; did you mean train.optimizer.lr?"),
        ({"trian": {"parallel": "d2"}}, "trian.parallel is not a key; did you mean train.parallel?"),
        ({"train": {"optimizer": {"lrr": 1}}}, "train.optimizer.lrr is not a key; did you mean train.optimizer.lr?"),
        (
            {"sources": {"s": {"path": "p", "wieght": 1}}},
            "sources.s.wieght is not a key; did you mean sources.s.weight?",
        ),
        ({"xyzzy": 1}, "xyzzy is not a key"),
        ({"train": {"parallel": 5}}, "train.parallel must be a string, got 5"),
        ({"train": {"fast": 1}}, "train.fast must be true or false, got 1"),
        ({"train": {"optimizer": {"steps": 1.0}}}, "train.optimizer.steps must be a whole number, got 1.0"),
        ({"train": {"optimizer": {"steps": True}}}, "train.optimizer.steps must be a whole number, got True"),
        (
            {"train": {"optimizer": {"steps": "8"}}},
            "train.optimizer.steps must be a whole number, got '8'; write it without quotes, a variable of the "
            "environment as ${oc.decode:${oc.env:NAME}}",
        ),
        ({"train": {"optimizer": {"steps": "8x"}}}, "train.optimizer.steps must be a whole number, got '8x'"),
        (
            {"train": {"fast": "False"}},
            "train.fast must be true or false, got 'False'; write it without quotes, a variable of the environment as "
            "${oc.decode:${oc.env:NAME}}",
        ),
        ({"train": {"optimizer": {"lr": "fast"}}}, "train.optimizer.lr must be a number, got 'fast'"),
        ({"train": {"optimizer": {"lr": None}}}, "train.optimizer.lr must be a number, got nothing"),
        ({"train": {"optimizer": {"lr": float("nan")}}}, "train.optimizer.lr must be a number, got nan"),
        ({"train": {"colour": "green"}}, "train.colour must be one of red, blue, got 'green'"),
        ({"train": {"parallel": "???"}}, "train.parallel must be given, got nothing"),
        ({"train": 5}, "train must be a section with keys of its own, got 5"),
        ({"train": None}, "train must be a section with keys of its own, got nothing"),
        ({"train": {"parallel": None}}, "train.parallel must be a string, got nothing"),
        ({"train": {"parallel": ""}}, "train.parallel must be text of at least one character, got ''"),
        (
            {"train": {"parallel": "\udcff"}},
            "train.parallel must be text without zero bytes and without halves of UTF-16 pairs, got '\\udcff'",
        ),
        (
            {"train": {"optimizer": {"lr": 10**400}}},
            f"train.optimizer.lr must be a number, got 1{59 * '0'}... (401 characters)",
        ),
        ({"train": {"optimizer": {"steps": [10**5000]}}}, "train.optimizer.steps must be a whole number, got a list"),
        ({"files": "x"}, "files must be a list such as [a,b], got 'x'"),
        ({"files": ["x", 3]}, "files[1] must be a string, got 3"),
        ({"sources": {"s": {}}}, "sources.s.path must be a string, got nothing"),
        ({"train": {"optimizer": {"lr": -1}}}, "train.optimizer.lr must be above 0, got -1.0"),
    ],
)
def test_a_fault_names_the_dotted_key_and_the_value(values: dict, fault: str) -> None:
    assert faults({"name": "a", **values}) == [fault]


def test_all_faults_are_reported_at_once() -> None:
    values = {
        "files": 3,
        "train": {"colour": "green", "nope": 1, "optimizer": {"lr": -1, "steps": 0}},
    }
    assert sorted(faults(values)) == [
        "files must be a list such as [a,b], got 3",
        "name must be a string, got nothing",
        "train.colour must be one of red, blue, got 'green'",
        "train.nope is not a key",
        "train.optimizer.lr must be above 0, got -1.0",
        "train.optimizer.steps must be at least 1, got 0",
    ]


def test_rules_between_fields_are_looked_at_when_each_is_within_its_bounds() -> None:
    # min_lr=1e-3 is above lr=-1, which is no mistake of its own.
    assert faults({"name": "a", "train": {"optimizer": {"lr": -1, "min_lr": 1e-3}}}) == [
        "train.optimizer.lr must be above 0, got -1.0"
    ]
    assert faults({"name": "a", "train": {"optimizer": {"lr": 0.5, "min_lr": 0.75}}}) == [
        "train.optimizer.min_lr must be at most lr=0.5, got 0.75"
    ]


def test_the_text_of_a_plain_valueerror_stands_behind_the_section() -> None:
    assert faults({"name": "a", "train": {"optimizer": {"warmup": 13}}}) == ["train.optimizer: thirteen is unlucky"]


def test_a_fault_is_data() -> None:
    with pytest.raises(ConfigError) as caught:
        build(Run, {"name": "a", "files": ["x", 3], "train": {"optimizer": {"lr": 0.5, "min_lr": 0.75}}})
    assert caught.value.faults == [
        Fault(Key(("files", 1)), "must be a string", got="3"),
        Fault("train.optimizer.min_lr", "must be at most lr=0.5", got="0.75"),
    ]


def test_a_section_of_something_else_is_named_by_its_whole_key() -> None:
    with pytest.raises(ConfigError) as caught:
        build(Source, {"path": "p", "wieght": 1, "weight": "x"}, key="reward.parts.a")
    assert list(map(str, caught.value.faults)) == [
        "reward.parts.a.weight must be a number, got 'x'",
        "reward.parts.a.wieght is not a key; did you mean reward.parts.a.weight?",
    ]


def test_a_choice_takes_the_dataclass_from_the_file_of_that_name(tmp_path, monkeypatch) -> None:
    package = tmp_path / "choices_for_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "left.py").write_text(
        "from dataclasses import dataclass\n\n"
        "@dataclass(kw_only=True, slots=True)\nclass Left:\n    name: str = 'left'\n    depth: int = 1\n\n"
        "COMPONENT, CONFIG = object, Left\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    choices = {"train": "choices_for_test"}
    assert build(Run, {"name": "a", "train": {"name": "left", "depth": 3}}, choices=choices).train.depth == 3
    with pytest.raises(ConfigError) as caught:
        build(Run, {"name": "a", "train": {"name": "lefft", "depth": 3}}, choices=choices)
    assert list(map(str, caught.value.faults)) == ["train.name must be one of left, got 'lefft'; did you mean left?"]
    with pytest.raises(ConfigError) as caught:
        build(Run, {"name": "a", "train": {"name": "left", "dpeth": 3}}, choices=choices)
    assert list(map(str, caught.value.faults)) == ["train.dpeth is not a key; did you mean train.depth?"]
