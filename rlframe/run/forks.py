"""The modules that forked workers need, and when workers are forked. It imports nothing heavy, so that the process that
imports them may begin before the program does."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rlframe.cluster import template
from rlframe.cluster.config import ADDRESS, LOCAL, Device

IMPORTED = (
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "rlframe.rollout.transformers.engine",
    "rlframe.weight_sync.endpoints",
)
"""Modules that engines import and ranks bear. Not Megatron, before which a rank prepares torch, nor Ray, which reads
the environment when it is imported, nor Arrow, which starts a thread."""
GPUS = "nvidia[0-9]*"
"""Files in /dev of a machine with GPUs."""


def begun(value: Callable[[str], Any]) -> AbstractContextManager[None]:
    """Returns a block in which the template imports already, if a run will most likely have one. On two cores it then
    imports beside the program, which has checks to do first.

    Args:
        value: gives the value of a setting, which is not checked yet, by its dotted key; None where there is none.
    """
    alone = (value("cluster.address") or os.environ.get(ADDRESS) or LOCAL) == LOCAL and not value("cluster.runtime_env")
    device = value("cluster.device") or Device.AUTO
    on_cpu = device == Device.CPU or (device == Device.AUTO and not any(Path("/dev").glob(GPUS)))
    return template.ahead(IMPORTED) if alone and on_cpu and value("rollout.name") == "transformers" else nullcontext()
