"""Settings that all rollout engines share. Imports neither torch nor an engine, so that configurations can be checked
without them."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar

from rlframe.cluster.profiling.config import ProfileConfig
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.base.speculative import SpeculativeConfig
from rlframe.types.rollout import SamplingParams
from rlframe.utils.bounds import PathText, Range, check_bounds
from rlframe.utils.errors import SettingError
from rlframe.utils.faults import Fault

if TYPE_CHECKING:
    from rlframe.models.families.base import Architecture

WRITTEN = re.compile(r"(\\[nrt])+")
"""Pattern of line breaks and tabs as programs write them: a backslash and a letter, which no model generates."""


class EngineDtype(StrEnum):
    """Number format of an engine's weights and activations."""

    AUTO = "auto"
    """The number format the policy trains in."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Logprobs(StrEnum):
    """Agreement of the engine's logprobs with the trainer's."""

    SAMPLED = "sampled"
    """Each side computes in its own number format with its own kernels, so that they differ by rounding."""
    EXACT = "exact"
    """Both sides compute in float32 from the same weights, and differ by less than 1e-4 nats."""


class CacheFormat(StrEnum):
    """Number format of the key-value cache."""

    AUTO = "auto"
    """The number format of activations."""
    FP8 = "fp8"
    """float8_e4m3fn, with the constant scale 1."""

    def itemsize(self, activations: int) -> int:
        """Returns the bytes of a number of the cache, where one of the activations has as many as given."""
        return activations if self is CacheFormat.AUTO else 1


class CacheAfterSync(StrEnum):
    """Keys and values with which running requests go on after a weight sync."""

    RECOMPUTE = "recompute"
    """The new weights compute them again."""
    KEEP = "keep"
    """The old ones stay."""


class OversampleRest(StrEnum):
    """Fate of the groups that a step has begun and does not wait for."""

    CARRY = "carry"
    """They keep their tokens, and go on in the next step with the new weights."""
    DROP = "drop"
    """They are thrown away."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """Settings of the engines that sample. Settings of one engine only are a subclass, in the engine's file."""

    keeps_cache: ClassVar[bool] = False
    """Whether the engine can do `cache_after_sync=keep`."""
    has_loader: ClassVar[bool] = True
    """Whether the engine has a loader of its own, which weight_sync.transport=reload needs."""
    temperatures: ClassVar[tuple[float, float]] = (0.0, math.inf)
    """Bounds of the temperatures above 0 at which the engine samples as it is told."""

    name: str = "transformers"
    """Name of the engine: a folder or file of `rlframe/rollout`."""
    num_engines: Annotated[int, Range(1, 4096)] = 1
    """Number of copies of the engine. Each prompt's group is sampled by one of them."""
    engines_per_device: Annotated[int, Range(1, 16)] = 1
    """Number of engines that share each device; num_engines is a multiple of it. A GPU that waits for an engine's
    process between two tokens works for another one meanwhile, which helps with small models and many responses at
    once. Each engine has its own weights and its own cache, whose size kv_cache_gb gives."""
    max_restarts: Annotated[int, Range(0, 10**6, note="0: the first death ends the run")] = 3
    """Greatest number of engines that may be restarted during a run. Their unfinished requests are sent again. A
    further death ends the run; 0 ends it at the first."""
    attempt_timeout_s: Annotated[float, Range(above=0, maximum=10**7)] = 3600.0
    """Seconds that one attempt may take, with all its turns and its rewards. One that takes longer is left out of its
    group."""
    oversample: Annotated[float, Range(1, 100, note="1: each step waits for all that it begins")] = 1.0
    """Factor by which the groups under way in a step exceed prompts_per_step, rounded up to whole groups. The step ends
    with the first prompts_per_step groups that are done, so that it does not wait for the longest responses. Engines
    and policy still take turns."""
    oversample_rest: OversampleRest = OversampleRest.CARRY
    """Fate of the groups that are not done then. carry: they go on in the next step with the new weights, and
    keep their tokens, which are older than the policy that trains on them: loop.max_policy_lag bounds their age, and a
    step waits for the groups that could not be trained on in time otherwise. drop: they are thrown away, which favours
    prompts with short responses."""
    dtype: EngineDtype = EngineDtype.AUTO
    """Number format of weights and activations."""
    logprobs: Logprobs = Logprobs.SAMPLED
    """Agreement of the engine's logprobs with the trainer's. sampled: each side computes in its own number format with
    its own kernels, so that they differ by rounding. exact: with train.dtype=bfloat16, parameters and their sync stay
    bfloat16, but both sides compute in float32 from them, in sampling, logprobs and gradients. They then differ by less
    than 1e-4 nats, except where experts tie. It takes a copy of the weights in float32 on both sides and the time of
    float32 products. Offered by the embedded engine on a CPU."""
    cache_after_sync: CacheAfterSync = CacheAfterSync.RECOMPUTE
    """Keys and values with which running requests go on after a weight sync. recompute: the new weights compute them
    again, which costs a prefill of every running request. keep: the old ones stay, which saves the prefill; tokens that
    follow are sampled over a prefix of older weights, so the gap between the logprobs of engine and trainer grows
    (rollout/logprob_gap_mean_nats). New requests never get keys and values of older weights."""
    max_tokens: Annotated[int, Range(1, 1 << 24)] = 256
    """Greatest number of tokens generated for one response, the stop token included."""
    min_tokens: Annotated[int, Range(0, 1 << 24)] = 0
    """Number of tokens before which no stop token is sampled. Equal to max_tokens it fixes the response length."""
    temperature: Annotated[float, Range(above=0, maximum=100, note="a policy that never explores cannot learn")] = 1.0
    """Divisor of the logits, in the engine and in the trainer."""
    top_p: Annotated[float, Range(above=0, maximum=1)] = 1.0
    """Probability of the smallest set of most likely tokens that sampling is restricted to. 1 keeps all tokens."""
    top_k: Annotated[int, Range(0, 1 << 24, note="0: all")] = 0
    """Number of most likely tokens that sampling is restricted to. 0 keeps all tokens."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a response when they appear in its text, besides the model's end-of-sequence tokens."""
    speculative: SpeculativeConfig | None = None
    """Speculative decoding: several tokens of a response in a step, with the same distribution. null: one token a
    step."""
    record: bool = False
    """Whether to keep the groups that each step trains on, in `rollouts/step-NNNNNNNN/`: 13 bytes a token, and the
    text."""
    replay: Annotated[str | None, PathText()] = None
    """Folder of a run with rollout.record=true, on whose groups to train in the place of sampling. No engines and no
    rewards are started, the data is not read, and nothing is evaluated; their settings are ignored, so that the
    recorded run's command needs no change but output, replay, record and loop. null samples."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.num_engines % self.engines_per_device:
            raise SettingError(
                "num_engines",
                f"must be a multiple of engines_per_device={self.engines_per_device}",
                got=self.num_engines,
            )
        if self.engines_per_device > 1 and self.measures_memory:
            raise SettingError(
                "engines_per_device",
                "needs kv_cache_gb",
                got=self.engines_per_device,
                why="engines that measure the free memory of one device at the same time would find each other's",
            )
        if self.record and self.replay is not None:
            raise SettingError("record", f"has no effect with replay={self.replay}", got="true", hint="remove it")
        if "" in self.stop:
            raise SettingError("stop", "must not hold an empty string", why="it would end every response at once")
        if written := next((each for each in self.stop if WRITTEN.fullmatch(each)), None):
            raise SettingError(
                "stop",
                "must hold the characters themselves",
                got=written,
                why="the command line keeps a backslash as it is",
                hint='in bash write $\'rollout.stop=["\\n"]\' for a line break, in YAML "\\n" in double quotes',
            )
        if self.logprobs is Logprobs.EXACT and self.dtype is EngineDtype.BFLOAT16:
            raise SettingError("dtype", "must be auto or float32 with logprobs=exact", got=self.dtype)
        self.sampling()

    def number_format(self, trained: str) -> EngineDtype:
        """Returns the number format of the engine, never auto.

        Args:
            trained: the number format of the policy's parameters, `train.dtype`.
        """
        if self.logprobs is Logprobs.EXACT:
            return EngineDtype.FLOAT32
        return EngineDtype(trained) if self.dtype is EngineDtype.AUTO else self.dtype

    @property
    def engine_format(self) -> EngineFormat:
        """Number format of the matrices in the engine's layers."""
        return EngineFormat.NONE

    @property
    def cache_format(self) -> CacheFormat:
        """Number format of keys and values."""
        return CacheFormat.AUTO

    def without_engine(self) -> "RolloutConfig":
        """Returns the settings that all engines share, for a process that needs no others: the file of an engine's own
        settings may import the engine."""
        return RolloutConfig(**{each.name: getattr(self, each.name) for each in fields(RolloutConfig)})

    @property
    def devices_per_engine(self) -> int:
        """Number of devices of one engine, all on one node."""
        return 1

    @property
    def num_devices(self) -> int:
        """Number of devices of all engines."""
        return self.num_engines // self.engines_per_device * self.devices_per_engine

    @property
    def sleeps(self) -> bool:
        """Returns whether the engine frees memory for other roles on its devices."""
        return True

    @property
    def stop_loses_routes(self) -> bool:
        """Returns whether a response to a request with stop strings comes without its routed experts."""
        return False

    @property
    def measures_memory(self) -> bool:
        """Returns whether the engine measures the free memory of its devices when it starts, so that nothing else may
        take or free any meanwhile."""
        return False

    @property
    def reads_shared_once(self) -> bool:
        """Returns whether a decode step reads the keys and values that sequences share once for all of them."""
        return False

    @property
    def sequence_tokens(self) -> int | None:
        """Greatest number of tokens of a sequence, prompt and response. None means the model's positions."""
        return None

    def faults(self, architecture: "Architecture") -> Iterator[Fault]:
        """Yields a fault for every reason why an engine with these settings cannot hold this model.

        Subclasses override it if their engine splits the model over devices.
        """
        yield from ()

    def cpu_faults(self, architecture: "Architecture", *, trained: str) -> Iterator[Fault]:  # noqa: ARG002
        """Yields a fault for every reason why an engine with these settings cannot run this model on a CPU.

        Subclasses override it if their engine has other kernels there.

        Args:
            trained: the number format of the policy's parameters, `train.dtype`.
        """
        yield from ()

    def route_faults(self, *, cuda: bool) -> Iterator[Fault]:
        """Yields a fault for every reason why engines with these settings cannot return routed experts.

        Subclasses override it if their engine can.

        Args:
            cuda: whether engines run on CUDA.
        """
        yield Fault("rollout.name", "does not return routed experts", got=self.name, stated=True)

    def adapter_faults(self, architecture: "Architecture", tensors: Iterable[str], *, rank: int) -> Iterator[Fault]:  # noqa: ARG002
        """Yields a fault for every reason why engines with these settings cannot compute with adapters.

        Subclasses override it if their engine can.

        Args:
            tensors: names of the adapted matrices in the checkpoint.
            rank: rank of the adapters.
        """
        yield Fault(
            "weight_sync.lora",
            f"must be merged with rollout.name={self.name}",
            got="adapter",
            why="rlframe writes adapters into vLLM only",
            hint="or use rollout.name=vllm",
        )

    def quantization_faults(self, architecture: "Architecture", *, cuda: bool) -> Iterator[Fault]:  # noqa: ARG002
        """Yields a fault for every reason why engines cannot hold this model in `engine_format`, or its keys and values
        in `cache_format`, of which one is set.

        Subclasses override it if their engine can.

        Args:
            cuda: whether engines run on CUDA.
        """
        yield from ()

    def speculative_faults(self, *, cuda: bool, shares_devices: bool, synced: bool) -> Iterator[Fault]:  # noqa: ARG002 - for subclasses
        """Yields a fault for every reason why engines cannot do `speculative`, which is set.

        Subclasses override it if their engine can.

        Args:
            cuda: whether engines run on CUDA.
            shares_devices: whether engines sleep while other roles use their devices.
            synced: whether weight sync brings all weights with which engines draft.
        """
        yield Fault(
            "rollout.speculative",
            f"must be null with rollout.name={self.name}",
            got="a section",
            why="the engine samples one token a step",
            hint="use rollout=vllm, or remove it",
        )

    def profile_faults(self, profile: ProfileConfig) -> Iterator[Fault]:  # noqa: ARG002 - for subclasses
        """Yields a fault for every reason why the profiler cannot record engines with these settings.

        Subclasses override it if their engine has a profiler of its own.
        """
        yield from ()

    def profiled(self, profile: ProfileConfig, folder: str) -> "RolloutConfig":  # noqa: ARG002 - for subclasses
        """Returns the settings of an engine that is to be profiled.

        Subclasses override it if their engine must know so from the start.

        Args:
            folder: folder of this engine's own files.
        """
        return self

    def exact_faults(self, *, cuda: bool) -> Iterator[Fault]:
        """Yields a fault for every reason why engines with these settings cannot do `logprobs=exact`.

        Subclasses override it if their engine can.

        Args:
            cuda: whether engines run on CUDA.
        """
        yield Fault(
            "rollout.logprobs",
            "must be sampled",
            got=self.logprobs,
            why=f"nobody has shown that rollout.name={self.name} and the trainer compute the same",
        )

    def float32_logits_faults(self) -> Iterator[Fault]:
        """Yields a fault for every reason why engines with these settings cannot do `model.float32_logits`.

        Subclasses override it if their engine can.
        """
        yield Fault(
            "model.float32_logits",
            f"must be false with rollout.name={self.name}",
            got="true",
            why="engine and trainer must round the same, and nobody has shown that this engine can keep float32",
        )

    def sampling(self, *, greedy: bool = False, max_tokens: int | None = None) -> SamplingParams:
        """Returns the sampling parameters of these settings.

        Args:
            greedy: takes the most likely token each time, as evaluation does; `min_tokens` is then ignored.
            max_tokens: limit that replaces the config's.
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
