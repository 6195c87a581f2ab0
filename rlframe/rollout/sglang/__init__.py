"""SGLang as a rollout engine."""

from rlframe.rollout.sglang.config import SglangConfig
from rlframe.rollout.sglang.engine import SglangEngine

COMPONENT, CONFIG = SglangEngine, SglangConfig
