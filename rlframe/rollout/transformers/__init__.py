"""Hugging Face transformers as a rollout engine, in the process of its actor."""

from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine

COMPONENT, CONFIG = TransformersEngine, TransformersConfig
