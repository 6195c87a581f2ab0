"""Kimi K2: the decoder of DeepSeek-V3, without groups of experts."""

from rlframe.models.families.deepseek_v3 import DeepseekV3


class KimiK2(DeepseekV3):
    """DeepSeek-V3 under a model_type of its own. transformers has no such type; see `models.transformers_config`."""


FAMILY = KimiK2()
