"""The number of steps that vLLM schedules before it knows the tokens of the first of them.

vLLM (0.26) has two steps under way: while the device computes one, its core decides on the next. Between the end of a
step and the launch of the next but one lie the copy of its tokens, two messages, the scheduler, and the preparation of
the step by the worker: with 256 sequences about as long as a short step computes, and longer at the ends of blocks, so
that the device waits. With three steps the core is a step further, and the device does not wait for it. A response that
ends with a stop token has one token more that is sampled and dropped. This file can go when vLLM can be told how many.
"""

from collections.abc import Callable
from typing import Any

STEPS = 3
"""Steps under way at the same time. vLLM's buffers of a step exist as often (`set_default_max_concurrency`)."""
KEY = "rlframe_steps_under_way"
"""Entry of vLLM's `additional_config`, which the core and its workers read alike. Without it vLLM decides."""
FEW_ROWS = "rlframe_few_rows"
"""Another: the version of the kernels of their own that steps of few rows have (`few_rows`, `joined`), 0 for none. vLLM
keeps compiled models by all entries, so that models that were compiled for another version lie apart. To be raised with
each change of what the kernels compute or when they are used."""
STEP_COST = "rlframe_step_cost"
"""Another: what a step with prompts costs beside their own computation, in steps that only decode (`admission`). A
1.7 B sampled 15,084, 14,854 and 14,607 tokens/s with 1, 2 and 4 (one H200, 2026-11-30)."""
SECOND = "rlframe_second_runner"
"""Another: 1 for model runner V2 where vLLM would take V1 (`runner`)."""
ENTRIES: dict[str, float] = {KEY: STEPS, FEW_ROWS: 2, STEP_COST: 1.0, SECOND: 1}
"""Entries that an engine on a GPU has."""


def look_ahead() -> None:
    """Makes vLLM have as many steps under way as its configuration says, where model runner V2 schedules ahead. Must be
    called in the core and its workers before they are made."""
    from vllm.config import VllmConfig

    own: Callable[[VllmConfig], int] | None = vars(VllmConfig)["max_concurrent_batches"].fget
    assert own is not None, "vLLM 0.26 to 0.32 have this property"
    if own.__module__ == __name__:
        return

    def max_concurrent_batches(self: VllmConfig) -> int:
        """See VllmConfig."""
        count = own(self)
        # Two are vLLM's number where it schedules ahead. With drafts the number of a step's tokens is not known.
        ahead = count == 2 and self.use_v2_model_runner and self.speculative_config is None
        return max(count, asked(self)) if ahead else count

    VllmConfig.max_concurrent_batches = property(max_concurrent_batches)  # pyright: ignore[reportAttributeAccessIssue]


def asked(config: Any) -> int:
    """Returns the number of steps that a VllmConfig asks for, 0 if it leaves them to vLLM."""
    return _entries(config).get(KEY, 0)


def step_cost(config: Any) -> float:
    """Returns STEP_COST of a VllmConfig, 0 if it has none."""
    return _entries(config).get(STEP_COST, 0.0)


def multiplies_few_rows(config: Any) -> bool:
    """Returns whether a VllmConfig asks for products of few rows by rlframe's kernels."""
    return bool(_entries(config).get(FEW_ROWS, 0))


def prefers_second(config: Any) -> bool:
    """Returns whether a VllmConfig asks for model runner V2."""
    return bool(_entries(config).get(SECOND, 0))


def _entries(config: Any) -> dict[str, Any]:
    """Returns the `additional_config` of a VllmConfig if it has entries."""
    entries = config.additional_config
    return entries if isinstance(entries, dict) else {}
