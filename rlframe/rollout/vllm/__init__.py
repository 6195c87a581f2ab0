"""vLLM as a rollout engine."""

from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine

COMPONENT, CONFIG = VllmEngine, VllmConfig
