"""A component of each kind, as a user writes them. Tests copy this file out of the repository before they name it."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.grpo import GrpoConfig
from rlframe.algorithms.policy_gradient import ClippedPolicyGradient
from rlframe.environments.base import Environment, Step, Turn
from rlframe.models.families.qwen3_moe import Qwen3Moe
from rlframe.rewards.base import Attempt, Reward
from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine
from rlframe.types.batch import Batch
from rlframe.types.messages import Message
from rlframe.types.prompt import Prompt
from rlframe.weight_sync.transports.shm import SharedMemory

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class DoubledConfig(GrpoConfig):
    """Settings of an algorithm."""

    name: str = "doubled"
    factor: float = 2.0


class Doubled(ClippedPolicyGradient[DoubledConfig]):
    """Names its settings by its generic base."""

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        return super().advantages(batch) * self.config.factor


@dataclass(kw_only=True, slots=True)
class PatientConfig:
    """Settings of an environment."""

    greeting: str = ""


class Patient(Environment):
    """Ends each attempt after its first response."""

    def __init__(self, config: PatientConfig):
        assert config.greeting
        sys.stdout.write(f"the environment says {config.greeting}\n")

    async def reset(self, prompt: Prompt, *, seed: int) -> Sequence[Message]:
        return prompt.messages

    async def step(self, turn: Turn) -> Step:
        return Step(done=True)


@dataclass(kw_only=True, slots=True)
class ShortConfig:
    """Settings of a reward."""

    tokens: int


class Short(Reward):
    """Gives 1 for a response of an even number of characters, plus 0.25 for a short one."""

    def __init__(self, config: ShortConfig):
        self.tokens = config.tokens

    def score(self, attempt: Attempt) -> float:
        return (len(attempt.response_text) % 2 == 0) + 0.25 * (attempt.num_response_tokens <= self.tokens)


@dataclass(kw_only=True, slots=True)
class WordyConfig(TransformersConfig):
    """Settings of an engine."""

    name: str = "wordy"
    word: str = "hello"


class WordyEngine(TransformersEngine):
    """Says a word when it starts."""

    def __init__(self, config: WordyConfig, **parts):
        super().__init__(config, **parts)
        logger.warning("the engine says %s", config.word)


class Family(Qwen3Moe):
    """The mapping of Qwen3-MoE under another name."""


class Mapped(SharedMemory):
    """Shared memory under another name."""
