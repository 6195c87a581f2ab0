"""The number of steps that vLLM has under way, by its own class of configurations."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from rlframe.rollout.vllm.decode.ahead import FEW_ROWS, KEY, STEPS, look_ahead, multiplies_few_rows

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def steps(*, asked: dict[str, int] | None, v2: bool = True, ahead: bool = True, pp: int = 1, drafts: Any = None) -> int:
    """What vLLM reads of such a configuration."""
    from vllm.config import VllmConfig

    read: Any = vars(VllmConfig)["max_concurrent_batches"].fget
    return read(
        SimpleNamespace(
            additional_config=asked,
            use_v2_model_runner=v2,
            speculative_config=drafts,
            scheduler_config=SimpleNamespace(async_scheduling=ahead),
            parallel_config=SimpleNamespace(pipeline_parallel_size=pp),
        )
    )


def test_three_steps_are_under_way_where_the_second_runner_schedules_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    asked, own = {KEY: STEPS}, vars(VllmConfig)["max_concurrent_batches"]
    # Importing rlframe's worker changes the class; the test is about one change from vLLM's own.
    if own.fget.__module__ == look_ahead.__module__:
        own = property(own.fget.__closure__[0].cell_contents)
    monkeypatch.setattr(VllmConfig, "max_concurrent_batches", own)
    assert steps(asked=asked) == 2
    look_ahead()
    look_ahead()
    assert steps(asked=asked) == STEPS == 3
    # Without the entry, and with what vLLM cannot run ahead of, as before.
    for other in ({"asked": {}}, {"asked": None}, {"v2": False}, {"drafts": object()}):
        assert steps(**({"asked": asked} | other)) == 2
    assert steps(asked=asked, ahead=False) == 1
    assert steps(asked=asked, pp=4) == 5


@pytest.mark.parametrize(
    ("entries", "expected"), [({KEY: STEPS, FEW_ROWS: True}, True), ({KEY: STEPS}, False), (None, False)]
)
def test_products_of_few_rows_are_asked_for_by_an_entry(entries: dict[str, int] | None, expected: bool) -> None:
    assert multiplies_few_rows(SimpleNamespace(additional_config=entries)) is expected
