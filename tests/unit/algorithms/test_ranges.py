"""Every number among the settings of an online algorithm states its range, and what no run could use is refused."""

import math
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

from rlframe.algorithms.correction import CorrectionConfig, MaskConfig
from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig
from rlframe.algorithms.policy_gradient import AdaptiveKlConfig, PolicyGradientConfig
from rlframe.ops.correction import MaskOf
from rlframe.utils import registry
from rlframe.utils.bounds import bounds

NAMES = registry.names("rlframe.algorithms")
FOUND = [registry.find("rlframe.algorithms", name, key="algorithm.name")[1] for name in NAMES]
NEEDED: dict[type, dict[str, Any]] = {
    **{kind: {} for kind in FOUND if issubclass(kind, PolicyGradientConfig)},
    CorrectionConfig: {},
    MaskConfig: {"of": MaskOf.TOKEN},
    AdaptiveKlConfig: {"target_nats": 1.0},
    DynamicSamplingConfig: {},
}


WRONG = {float: (math.nan, math.inf, -math.inf, 1e300, -1e300), int: (-(10**30), 10**30)}


def number(hint: Any) -> type | None:
    """float or int, for either of them or None beside."""
    return next((kind for kind in WRONG if kind in (hint, *get_args(hint))), None)


NUMBERS = [
    (kind, field.name, found)
    for kind in NEEDED
    for field in fields(kind)
    if (found := number(get_type_hints(kind)[field.name]))
]


@pytest.mark.parametrize(("kind", "name", "found"), NUMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_numbers_that_no_run_could_use_are_refused(kind: type, name: str, found: type) -> None:
    assert name in bounds(kind)
    for value in WRONG[found]:
        with pytest.raises(ValueError, match=f"^{name} must be .*, got"):
            kind(**NEEDED[kind] | {name: value})


def test_the_settings_of_twelve_algorithms_are_looked_at() -> None:
    assert len(NEEDED) == 12 + 4 and len(NUMBERS) > 100
