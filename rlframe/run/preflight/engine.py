"""Memory of a device of engines."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlframe.megatron.config.mtp import MtpMode
from rlframe.megatron.config.parallel import Parallel
from rlframe.models.config import ModelConfig
from rlframe.models.families.base import Architecture
from rlframe.models.quantized.blocks import SIZE, EngineFormat
from rlframe.rollout.base.config import EngineDtype, RolloutConfig
from rlframe.rollout.base.speculative import SpeculativeMethod
from rlframe.rollout.served.cache import token_bytes
from rlframe.rollout.served.config import ServedConfig
from rlframe.run.preflight import constants
from rlframe.run.preflight.parts import Part, Phase, Process
from rlframe.run.preflight.weights import Counter
from rlframe.utils.errors import CheckpointError, ConfigError

SCALE_BYTES = 4
"""Bytes of the scale of a block of SIZE x SIZE weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafter:
    """A draft model or head of an engine, split over its devices like the model."""

    architecture: Architecture
    """Its layers, whose keys and values lie in the engine's cache."""
    parameters: int
    """Number of its parameters that the model does not have."""


def drafter_of(config: RolloutConfig, model: ModelConfig, count: Callable[..., Counter]) -> Drafter | None:
    """Returns what drafts for an engine of `model`. None if nothing with weights does, or if it is of no known family.

    Args:
        count: returns what counts a model's parameters.
    """
    speculative = config.speculative
    if speculative is None or speculative.method is SpeculativeMethod.NGRAM:
        return None
    if speculative.method is SpeculativeMethod.MTP:
        plain, headed = count(model), count(model, mtp=MtpMode.KEEP)
        head = headed.stages(Parallel())[0].all - plain.stages(Parallel())[0].all
        return Drafter(architecture=replace(plain.architecture, num_layers=1, gated_delta_layers=()), parameters=head)
    assert speculative.model is not None, "the draft model is checked with the configuration"
    try:
        counter = count(ModelConfig(path=speculative.model))
    except (ConfigError, CheckpointError):
        return None
    return Drafter(architecture=counter.architecture, parameters=counter.stages(Parallel())[0].all)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """One device of an engine."""

    role: str
    config: RolloutConfig
    architecture: Architecture
    parameters: int
    """Number of parameters of the whole model."""
    device_bytes: float
    train_itemsize: int
    sequences: int
    """Sequences that an engine gets in a step."""
    sequence_tokens: int
    """Tokens of the longest, prompt and response."""
    cuda: bool = True
    shares: bool = False
    """Whether it takes turns with other roles on the device."""
    drafter: Drafter | None = None

    @property
    def drafter_bytes(self) -> float:
        """Bytes of the weights on one device that only draft."""
        return self.drafter.parameters * self.itemsize / self.config.devices_per_engine if self.drafter else 0.0

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        trained = EngineDtype.FLOAT32 if self.train_itemsize == 4 else EngineDtype.BFLOAT16
        return 4 if self.config.number_format(trained) is EngineDtype.FLOAT32 else 2

    @property
    def weights_bytes(self) -> float:
        """Bytes of the weights on one device."""
        matrices = 0
        if self.config.engine_format is not EngineFormat.NONE:
            embeddings = 1 if self.architecture.tie_embeddings else 2
            matrices = self.parameters - embeddings * self.architecture.vocab_size * self.architecture.hidden_size
        plain = (self.parameters - matrices) * self.itemsize
        return (plain + matrices * (1 + SCALE_BYTES / SIZE**2)) / self.config.devices_per_engine

    @property
    def token_bytes(self) -> float:
        """Bytes of the keys and values of one token on one device, with its share of the sequence's states. Key heads
        that tp does not divide are copied."""
        return self._keys(self.architecture) + self.state_bytes / self.sequence_tokens

    @property
    def cached_bytes(self) -> float:
        """The same with the keys and values of what drafts."""
        return self.token_bytes + (self._keys(self.drafter.architecture) if self.drafter else 0.0)

    def _keys(self, architecture: Architecture) -> float:
        itemsize = self.config.cache_format.itemsize(self.itemsize)
        return token_bytes(architecture, tp=self.config.devices_per_engine, itemsize=itemsize)

    @property
    def state_bytes(self) -> float:
        """Bytes of the states of one sequence's gated delta nets on one device: of the rule in float32, and of the
        convolution."""
        net = self.architecture.gated_delta_net
        if net is None:
            return 0.0
        rule = net.num_value_heads * net.key_head_dim * net.value_head_dim * 4
        convolution = net.num_key_heads * net.conv_channels * (net.conv_kernel - 1) * self.itemsize
        return sum(self.architecture.gated_delta_layers) * (rule + convolution) / self.config.devices_per_engine

    @property
    def cache_bytes(self) -> float:
        """Bytes of the key-value cache of one device; negative if the weights leave none."""
        if not isinstance(self.config, ServedConfig) or not self.cuda:
            return self.sequences * self.sequence_tokens * self.cached_bytes
        if self.config.cache_bytes is not None:
            return self.config.cache_bytes
        claimed = self.config.gpu_memory_utilization * self.device_bytes
        return claimed - self.weights_bytes - self.drafter_bytes - constants.ENGINE_WORKSPACE_BYTES

    @property
    def cache_setting(self) -> str:
        """The setting of `rollout` that decides the size of the cache."""
        return "gpu_memory_utilization" if self.config.measures_memory else "kv_cache_gb"

    @property
    def holds_a_sequence(self) -> bool:
        """Returns whether the weights leave room for the keys and values of one sequence, if nothing else takes any."""
        if not isinstance(self.config, ServedConfig) or not self.cuda:
            return True
        held = self.weights_bytes + self.drafter_bytes
        room = self.config.cache_bytes or self.config.gpu_memory_utilization * self.device_bytes - held
        return room >= self.sequence_bytes

    @property
    def sequence_bytes(self) -> float:
        """Bytes of the keys and values of the longest sequence on one device."""
        return self.sequence_tokens * self.cached_bytes

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values fit an engine at once."""
        return max(0, int(self.cache_bytes / self.cached_bytes))

    @property
    def sleeps(self) -> bool:
        """Returns whether it gives its memory back while other roles work on the device."""
        return self.shares and self.cuda and self.config.sleeps

    def process(self) -> Process:
        """Returns one device's part of the engines that share it."""
        sharing = self.config.engines_per_device
        weights = Part("weights", sharing * self.weights_bytes)
        drafts = Part("weights that draft", sharing * self.drafter_bytes)
        cache = Part("key-value cache", sharing * max(0.0, self.cache_bytes))
        if not isinstance(self.config, ServedConfig) or not self.cuda:
            return Process(role=self.role, resident=(weights, drafts), work={Phase.GENERATION: (cache,)}, keeps=False)
        graphs_bytes = 0.0 if self.config.enforce_eager else constants.GRAPH_BYTES
        graphs = Part("CUDA graphs", sharing * graphs_bytes, measured=False)
        workspace = Part("workspaces and context", sharing * constants.ENGINE_WORKSPACE_BYTES, measured=False)
        if not self.sleeps:
            return Process(role=self.role, resident=(weights, drafts, cache, graphs, workspace), keeps=False)
        asleep = Part("context of the engine asleep", sharing * constants.ENGINE_ASLEEP_BYTES, measured=False)
        return Process(
            role=self.role,
            resident=(weights, drafts, graphs, workspace),
            asleep=(graphs, asleep),
            # Weights are awake for a sync, the cache is not.
            work={Phase.GENERATION: (cache,), Phase.SYNC: ()},
            keeps=False,
        )
