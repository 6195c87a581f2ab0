"""Settings every rollout engine shares. Light: imports no torch and no engine."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from rlframe.types.rollout import SamplingParams
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault

if TYPE_CHECKING:
    from rlframe.models.families.base import Architecture


class EngineDtype(StrEnum):
    """Number format of an engine's weights and activations."""

    AUTO = "auto"
    """What the policy trains in."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The engines that sample, and how. An engine's own settings are a subclass, in the engine's file."""

    name: str = "transformers"
    """Engine: a file of `rlframe/rollout`."""
    num_engines: Annotated[int, Range(1, 4096)] = 1
    """Copies of the engine; each prompt's group is sampled by one of them."""
    max_restarts: Annotated[int, Range(0, 10**6, note="0: the first death ends the run")] = 3
    """Engines that may die and be started anew in the course of a run, their unfinished requests given again; the next
    death ends the run. 0 ends it at the first."""
    dtype: EngineDtype = EngineDtype.AUTO
    """Number format of weights and activations."""
    environment: str = "single_turn"
    """What answers the model: a file of `rlframe/environments`, `path/to/file.py:Class` or `package.module:Class`."""
    environment_options: dict[str, Any] | None = None
    """Settings of the environment itself: the fields of its config class."""
    max_tokens: Annotated[int, Range(1, 1 << 24)] = 256
    """Tokens generated at most for one response, the stop token included."""
    min_tokens: Annotated[int, Range(0, 1 << 24)] = 0
    """Stop tokens are not sampled before this many tokens. Equal to max_tokens it forces a response length."""
    temperature: Annotated[float, Range(above=0, maximum=100, note="a policy that never explores cannot learn")] = 1.0
    """Logits are divided by it, in the engine and in the trainer."""
    top_p: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """Smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: Annotated[int, Range(0, 1 << 24, note="0: all")] = 0
    """Keep this many most likely tokens; 0 keeps all."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response when they appear in its text, besides the model's end-of-sequence tokens."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if "" in self.stop:
            raise SettingError("stop", "must not hold an empty string", why="it would end every response at once")
        self.sampling()

    @property
    def devices_per_engine(self) -> int:
        """Devices of one engine, all on one node."""
        return 1

    @property
    def sequence_tokens(self) -> int | None:
        """Tokens of the longest sequence that an engine takes, prompt and response; None: the model's positions."""
        return None

    def faults(self, architecture: "Architecture") -> Iterator[Fault]:
        """Why an engine with these settings cannot hold this model: a sentence each, that starts with the dotted key.

        What a subclass overrides when its engine splits the model over devices.
        """
        yield from ()

    def route_faults(self, *, cuda: bool) -> Iterator[Fault]:
        """Why engines with these settings cannot say which experts tokens went to: a sentence each, that begins with
        the dotted key. What a subclass overrides when its engine can.

        Args:
            cuda: whether engines run on CUDA.
        """
        yield Fault("rollout.name", "does not say which experts tokens go to", got=self.name, stated=True)

    def sampling(self, *, greedy: bool = False, max_tokens: int | None = None) -> SamplingParams:
        """How these settings turn logits into tokens.

        Args:
            greedy: the likeliest token each time, as evaluation does; no length is forced then.
            max_tokens: another limit than the config's.
        """
        limit = self.max_tokens if max_tokens is None else max_tokens
        if greedy:
            return SamplingParams(temperature=0.0, max_tokens=limit, stop=tuple(self.stop))
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=limit,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
        )
