"""The modules that forked workers need, and when workers are forked. It imports nothing heavy, so that the process that
imports them may begin before the program does."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframe.cluster import template
from rlframe.cluster.config import ClusterConfig, Device

if TYPE_CHECKING:
    from rlframe.run.config import RunConfig

IMPORTED = (
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "rlframe.rollout.transformers.engine",
    "rlframe.weight_sync.endpoints",
)
"""Modules that engines import and ranks bear. Not Megatron, before which a rank prepares torch, nor Ray, which reads
the environment when it is imported, nor Arrow, which starts a thread."""
ENGINE = "transformers"
"""The engine that lives in its worker's process."""
GPUS = "nvidia[0-9]*"
"""Files in /dev of a machine with GPUs."""


def begun(value: Callable[[str], Any]) -> AbstractContextManager[None]:
    """Returns a block in which the template imports already, if `forks` will most likely ask for it. On two cores it
    then imports beside the program, which has checks to do first.

    Args:
        value: gives the value of a setting, which is not checked yet, by its dotted key; None where there is none.
    """
    alone = ClusterConfig(address=value("cluster.address")).joins is None and not value("cluster.runtime_env")
    device = value("cluster.device") or Device.AUTO
    on_cpu = device == Device.CPU or (device == Device.AUTO and not any(Path("/dev").glob(GPUS)))
    return template.ahead(IMPORTED) if alone and on_cpu and value("rollout.name") == ENGINE else nullcontext()


def forks(config: "RunConfig", stack: ExitStack) -> None:
    """Has workers forked, until `stack` is closed, where they all need what an engine of transformers imports: a Ray of
    our own on a machine without GPUs."""
    from rlframe.megatron.cpu import platform  # noqa: PLC0415 - imports torch

    alone = not config.cluster.joins and not config.cluster.runtime_env.for_ray()
    if alone and config.rollout.name == ENGINE and platform.resolve(config.cluster.device).type == "cpu":
        stack.enter_context(template.imported(IMPORTED))
