"""transformers' own configuration of a model folder."""

from pathlib import Path
from typing import Any

from rlframe.models.hub import read_config

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not have, whose code on the hub computes what another type of transformers
computes."""


def read(folder: Path) -> Any:
    """Returns the PreTrainedConfig of the model in `folder`, without running code of the folder."""
    from transformers import CONFIG_MAPPING, AutoConfig  # noqa: PLC0415 - takes seconds

    model_type = read_config(folder)["model_type"]
    if model_type in SAME_AS:
        config: Any = CONFIG_MAPPING[SAME_AS[model_type]].from_pretrained(folder)
        # By the type transformers knows how the tensors in files make up its model's.
        config.model_type = SAME_AS[model_type]
        return config
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)
