"""Bounds stated beside the type of a field hold whenever the dataclass is made."""

import math
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated

import pytest

from rlframe.utils.bounds import PathText, Range, bounds, check_bounds, shortened


@dataclass(kw_only=True, slots=True)
class Settings:
    lr: Annotated[float, Range(above=0, maximum=10)] = 1.0
    dropout: Annotated[float, Range(0, below=1, note="0 drops nothing")] = 0.0
    steps: Annotated[int, Range(1, 5)] | None = None
    widths: Annotated[list[int], Range(1, 64)] = field(default_factory=list)
    data: Annotated[str | dict[str, float], PathText(), Range(above=0, maximum=9)] = "x"
    free: str = ""

    def __post_init__(self) -> None:
        check_bounds(self)


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"lr": 0}, "lr must be above 0, got 0"),
        ({"lr": math.nan}, "lr must be above 0, got nan"),
        ({"lr": math.inf}, "lr must be at most 10, got inf"),
        ({"dropout": 1.0}, "dropout must be below 1 (0 drops nothing), got 1.0"),
        ({"dropout": -1}, "dropout must be at least 0 (0 drops nothing), got -1"),
        ({"steps": 6}, "steps must be at most 5, got 6"),
        ({"widths": [3, 0]}, "widths must be at least 1, got 0"),
        ({"data": {"a": 1.0, "b": 0.0}}, "data must be above 0, got 0.0 for 'b'"),
    ],
)
def test_a_value_outside_is_refused_by_the_end_it_passes(values: dict, refusal: str) -> None:
    with pytest.raises(ValueError) as caught:
        Settings(**values)
    assert str(caught.value) == refusal


def test_ends_belong_to_the_range_unless_said_otherwise() -> None:
    # Must not raise.
    Settings(lr=10, dropout=0, steps=5, widths=[1, 64], data={"a": 9})


# 256 letters are one more than a name can have; 16 names of 255 and their slashes are 16 * 256 - 1 = 4095 bytes, which
# is the longest path, and one letter more is too long. An e with an accent is 2 bytes.
@pytest.mark.parametrize("data", ["x" * 256, {"x" * 256: 1.0}, "\u00e9" * 128, "/".join(["x" * 255] * 16) + "/"])
def test_a_name_that_no_file_can_have_is_refused(data: str) -> None:
    with pytest.raises(ValueError, match="data must be a path of at most 4095 bytes with names of at most 255, got"):
        Settings(data=data)


def test_the_longest_path_is_taken() -> None:
    assert len(Settings(data="/".join(["x" * 255] * 16)).data) == 4095


def test_a_range_has_two_ends() -> None:
    for ends in ({}, {"minimum": 0}, {"minimum": 0, "above": 0, "maximum": 1}):
        with pytest.raises(AssertionError):
            Range(**ends)


def test_bounds_are_found_in_a_type_and_in_its_alternative() -> None:
    assert bounds(Settings).keys() == {"lr", "dropout", "steps", "widths", "data"}


def test_a_long_value_is_shown_by_its_beginning() -> None:
    # 60 characters of which one is the quotation mark.
    assert shortened("x" * 100) == "'" + "x" * 59 + "... (102 characters)"
    assert shortened(10**5000) == "a whole number of 16610 bits"


def test_a_bound_is_told_as_its_own_setting_states_it() -> None:
    # typing keeps one Annotated for arguments that are equal, whoever was imported first.
    whole, fraction = (Annotated[float, Range(0, end)] | None for end in (10**9, 1e9))
    told = [bounds(make_dataclass("Stated", [("end", each)]))["end"][0].refusal(math.inf) for each in (whole, fraction)]
    assert told == [("must be at most 1000000000", "inf"), ("must be at most 1000000000.0", "inf")]
