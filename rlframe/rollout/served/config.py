"""ServedConfig: the settings that engines with processes of their own have in common."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from rlframe.models.families.base import Architecture
from rlframe.rollout.base.config import RolloutConfig
from rlframe.utils.bounds import Range
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault


@dataclass(kw_only=True, slots=True)
class ServedConfig(RolloutConfig):
    """Settings of vLLM and of SGLang."""

    own_options: ClassVar[frozenset[str]] = frozenset()
    """Engine arguments that have a setting of their own, or on which the engine's correctness rests."""

    tp: Annotated[int, Range(1, 1024)] = 1
    """Devices over which each engine splits the model."""
    expert_parallel: bool = False
    """Split the experts by expert over the tp devices, not each expert into tp parts."""
    gpu_memory_utilization: Annotated[float, Range(above=0, maximum=1)] = 0.5
    """Share of the device's memory for weights and key-value cache (with vLLM also activations; SGLang calls it
    mem_fraction_static), which must be free when the engine starts, after the policy. An engine with devices of its own
    can have 0.9 with vLLM and 0.85 with SGLang. No effect on CPU."""
    max_model_len: Annotated[int, Range(2, 1 << 24)] | None = None
    """Tokens of the longest sequence, prompt and response; null: the model's positions. Less may save cache memory."""
    max_num_seqs: Annotated[int, Range(1, 1 << 16)] = 256
    """Sequences decoded at once, at most. More requests wait their turn."""
    enforce_eager: bool = False
    """Do without compilation and CUDA graphs: starts faster, decodes slower. No effect with SGLang on a CPU."""
    sleep_level: Annotated[int, Range(1, 2)] = 2
    """What sleeping frees besides the key-value cache. 2: the weights are dropped, for the next weight sync brings
    others. 1: they wait in host memory, which costs as much of it and the time to copy them both ways, and keeps the
    engine usable without a sync. No effect on CPU."""
    enable_prefix_caching: bool = True
    """Share the keys and values of equal prompt beginnings, such as those of a group."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Further engine arguments, passed on to the engine by their names there."""

    def __post_init__(self) -> None:
        # Dataclasses with slots are made anew, which leaves the zero-argument super() without its class.
        RolloutConfig.__post_init__(self)
        if self.expert_parallel and self.tp == 1:
            raise SettingError(
                "expert_parallel", "must come with tp above 1 (it splits the experts over the tp devices)"
            )
        if own := sorted(self.own_options & self.engine_options.keys()):
            raise SettingError(
                "engine_options", f"must not hold {own[0]}", why="the engine sets it, from a setting of its own"
            )

    @property
    def devices_per_engine(self) -> int:
        """Devices of one engine, all on one node."""
        return self.tp

    @property
    def sequence_tokens(self) -> int | None:
        """Tokens of the longest sequence that an engine takes, prompt and response; None: the model's positions."""
        return self.max_model_len

    def faults(self, architecture: Architecture) -> Iterator[Fault]:
        """See RolloutConfig. A subclass adds how its engine can split a model."""
        if self.max_model_len is not None and self.max_model_len > architecture.max_positions:
            yield Fault(
                "rollout.max_model_len",
                f"must not exceed the model's {architecture.max_positions} positions",
                got=self.max_model_len,
                stated=True,
            )

    def route_faults(self, *, cuda: bool) -> Iterator[Fault]:
        """See RolloutConfig. We look for stop strings and then abort the request, while the engine tells the experts
        of requests that end by themselves."""
        if self.stop:
            yield Fault(
                "rollout.stop",
                f"must be empty where rollout.name={self.name} is to say which experts tokens go to: it "
                "tells that of responses which end by a token or by their length",
                got=self.stop,
            )
