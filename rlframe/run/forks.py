"""The modules that forked workers need, and when workers are forked. It imports nothing heavy, so that the process that
imports them may begin before the program does."""

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

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


def begun(composed: DictConfig) -> AbstractContextManager[None]:
    """Returns a block in which the template imports already, if a run of these values will most likely have one: they
    are not checked yet. On two cores it then imports beside the program, which has checks to do first."""
    address, device, engine, variables = (
        OmegaConf.select(composed, key, throw_on_resolution_failure=False)
        for key in ("cluster.address", "cluster.device", "rollout.name", "cluster.runtime_env")
    )
    alone = (address or os.environ.get(ADDRESS) or LOCAL) == LOCAL and not variables
    on_cpu = device == Device.CPU or (device in (None, Device.AUTO) and not any(Path("/dev").glob(GPUS)))
    return template.ahead(IMPORTED) if alone and on_cpu and engine == "transformers" else nullcontext()
