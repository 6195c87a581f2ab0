"""The choice between vLLM's two model runners.

vLLM (0.26) takes V1 for all but a few mixtures of experts, and so without what rlframe has for V2: three steps under
way, steps that are prepared from those before, one pass over the logits. Later releases take V2 for them too, and this
file can go with 0.26.
"""

import os
from collections.abc import Callable, Collection
from typing import Any

from rlframe.rollout.vllm.decode.ahead import prefers_second

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable of vLLM that says which model runner it takes."""
CHOSEN_RUNNER = os.environ.get(RUNNER)
"""Value that the user gave it, or None."""
RELEASE = "0.26."
MIXTURES = frozenset({"Qwen3MoeForCausalLM"})
"""Models that were measured with V2 of that release, and have it on one GPU. On two it was no faster
(docs/engines.md)."""


def choose_runner(*, first: bool) -> None:
    """Sets vLLM's model runner for the processes that this one starts.

    Args:
        first: take model runner V1, unless the user has chosen: its check of drafts is rlframe's own, and the record of
            experts has run with V2 on one GPU only. Otherwise vLLM decides; see `prefer_second`.
    """
    if CHOSEN_RUNNER is not None:
        return
    if first:
        os.environ[RUNNER] = "0"
    else:
        os.environ.pop(RUNNER, None)


def runs_first() -> bool:
    """Returns whether engines that this process starts have model runner V1 for certain."""
    return os.environ.get(RUNNER) == "0"


def prefer_second() -> None:
    """Makes vLLM take model runner V2 for the mixtures that were measured. Must be called in every process of vLLM
    before it asks which one it has."""
    from vllm.config import VllmConfig

    own: Callable[[VllmConfig], bool] | None = vars(VllmConfig).get("_is_default_v2_model_runner_model")
    if own is None or own.__module__ == __name__:
        return

    def is_default(self: VllmConfig) -> bool:
        """See VllmConfig."""
        return own(self) or (prefers_second(self) and _is_measured(self))

    VllmConfig._is_default_v2_model_runner_model = is_default  # pyright: ignore[reportAttributeAccessIssue]


def _is_measured(config: Any) -> bool:
    """Returns whether V2 was measured with the model and the devices of a VllmConfig."""
    model = config.model_config
    if model is None or model.runner_type != "generate" or config.lora_config is not None:
        return False
    return is_measured(model.architectures, world_size=config.parallel_config.world_size)


def is_measured(architectures: Collection[str], *, world_size: int) -> bool:
    """Returns whether an engine of so many devices with a model of these classes may have V2 of this release."""
    import vllm

    return vllm.__version__.startswith(RELEASE) and world_size == 1 and bool(MIXTURES.intersection(architectures))
