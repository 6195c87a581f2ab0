"""Hugging Face transformers as a rollout engine, in the engine's own process: batched decoding without a server.

It needs nothing but transformers and runs on CPU and on one GPU. The model's code and weights are Hugging Face's; the
decode loop and the cache are rlframe's.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from rlframe.models import tokenizer, transformers_config
from rlframe.models.hub import load_family, read_config
from rlframe.ops.float32_logits import float32_logits as float32_product
from rlframe.rollout.base.adapter import EngineAdapter
from rlframe.rollout.base.config import CacheAfterSync, RolloutConfig
from rlframe.rollout.base.engine import RolloutEngine, check_names
from rlframe.rollout.base.gate import VersionGate
from rlframe.rollout.base.routes import RouteRecorder, Routers
from rlframe.rollout.served.plain import dequantized_model, is_quantized, plain_config
from rlframe.rollout.served.recording import random_weights
from rlframe.rollout.transformers.decode import Control, DecodeLoop
from rlframe.rollout.transformers.kv_cache import ATTENTION, KVCache, attend
from rlframe.rollout.transformers.states import KIND
from rlframe.types.batch import TopLogprobs
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, GenerationRequest, SamplingParams, Scored
from rlframe.utils.bounds import Range
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.endpoints import WeightDestination
from rlframe.weight_sync.layout.memory import record

T = TypeVar("T")
EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<index>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
MIXTRAL = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
"""Rules that rename Mixtral's tensors on disk to transformers' parameters."""
FIXED = "e_score_correction_bias"
"""End of the name of the one weight that is a buffer."""


@dataclass(kw_only=True, slots=True)
class TransformersConfig(RolloutConfig):
    """Settings of the embedded engine."""

    keeps_cache: ClassVar[bool] = True
    """See RolloutConfig."""
    has_loader: ClassVar[bool] = False
    """See RolloutConfig."""

    max_batch: Annotated[int, Range(1, 1 << 16)] = 256
    """Greatest number of sequences decoded at once, which bounds the memory of the key-value cache. Further requests
    wait."""

    def route_faults(self, *, cuda: bool) -> Iterator[str]:
        """Yields nothing: the routers run in this process. See RolloutConfig."""
        yield from ()

    def float32_logits_faults(self) -> Iterator[Fault]:
        """Yields nothing: the output layer is a module of this process. See RolloutConfig."""
        yield from ()

    def exact_faults(self, *, cuda: bool) -> Iterator[Fault]:
        """See RolloutConfig."""
        if cuda:
            yield Fault(
                "rollout.logprobs",
                "must be sampled on CUDA",
                got=self.logprobs,
                why="there float32 products are of TF32, and Transformer Engine's are other ones than torch's",
                hint="train.moe.router_replay=true removes the largest part with experts",
            )


class TransformersEngine(RolloutEngine):
    """A causal language model of transformers and its tokenizer.

    It accepts one `generate` call at a time, whose requests decode together. It can be paused and aborted between two
    tokens.
    """

    def __init__(
        self,
        config: TransformersConfig,
        *,
        folder: Path,
        dtype: torch.dtype,
        device: str,
        random_seed: int | None = None,
        with_routes: bool = False,
        adapter: EngineAdapter | None = None,
        float32_logits: bool = False,
        with_mtp: bool = False,
    ):
        """Loads the model the way transformers itself loads it.

        Args:
            folder: model and tokenizer in Hugging Face format.
            random_seed: seed from which the weights are drawn; the folder then needs none.
            with_routes: completions carry their routed experts.
            float32_logits: see ModelConfig.

        Raises:
            ConfigError: the model has attention over a sliding window.
        """
        assert adapter is None, "`config.adapter_faults` is checked with the configuration"
        assert not with_mtp, "`config.speculative_faults` is checked with the configuration"
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, attend)
        self.config = config
        self.folder = folder
        self.tokenizer = tokenizer.load(folder)
        self.model = self._load(dtype, random_seed, device).to(device).eval().requires_grad_(False)
        if float32_logits:
            keep_float32(self.model.get_output_embeddings())
        self.stop_tokens = tokenizer.stop_token_ids(folder, self.tokenizer)
        routers = Routers.of(load_family(folder).architecture(read_config(folder)))
        self._recorder = RouteRecorder(self.model, routers) if with_routes else None
        self._slots: KVCache | None = None
        self._control = Control()
        self.gate = VersionGate()
        parameters = weights_of(self.model)
        tensors = self._tensors()
        self.weights = WeightDestination(
            record(load_weights, parameters, tensors),
            parameters,
            tensors=tensors,
            dtype=dtype,
            device=self.model.device,
        )
        """Layout of the engine's memory for weight sync, recorded from the engine's own loader."""

    def _load(self, dtype: torch.dtype, random_seed: int | None, device: str) -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

        hf = transformers_config.read(self.folder)
        kinds = set(getattr(hf, "layer_types", None) or [])
        self._with_states = KIND in kinds
        windowed = bool(kinds - {"full_attention", KIND})
        if windowed or (getattr(hf, "sliding_window", None) and getattr(hf, "use_sliding_window", True)):
            said = (
                f"{self.folder} has layers without full attention, which rollout.name=transformers "
                "does not support; use vllm or sglang"
            )
            raise ConfigError([Fault("rollout.name", got="transformers", stated=True, said=said)])
        options = {"dtype": dtype, "attn_implementation": ATTENTION}
        if random_seed is None:
            if is_quantized(self.folder):
                return dequantized_model(self.folder, **options)
            return AutoModelForCausalLM.from_pretrained(self.folder, config=hf, **options)
        # The weights are drawn on the trainer's device, as the trainer's are; the model is built on the CPU.
        drawn = random_weights(self._tensors(), self.folder, seed=random_seed, device=device)
        weights = {name: weight.cpu() for name, weight in drawn}
        hf = plain_config(hf, overrides={})
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)]
        return model_class.from_pretrained(None, config=hf, state_dict=weights, **options)

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        family = load_family(self.folder)
        return family.tensors(family.architecture(read_config(self.folder)))

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        check_names(requests)
        alike: dict[SamplingParams, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            self._check(request)
            # Lengths may differ from row to row; rows that decode together share all other parameters.
            alike[replace(request.sampling, max_tokens=1, min_tokens=0)].append(index)
        completions: dict[int, Completion] = {}
        version, started = self._begin()
        try:
            for indices in alike.values():
                loop = self._loop([requests[index] for index in indices], version, started)
                completions.update(zip(indices, loop.run(), strict=True))
                version = loop.version
        finally:
            self._control.end()
        return [completions[index] for index in range(len(requests))]

    def _begin(self) -> tuple[int, int]:
        """Returns the version to sample from, and the number of this computation for `Control.proceed`."""
        while True:
            version = self.gate.enter()
            started = self._control.start()
            # A sync may have begun between the two calls. It did not wait for this call, so this call waits for it.
            if self.gate.verified and self.gate.version == version:
                return version, started
            self._control.end()

    def _loop(self, requests: list[GenerationRequest], version: int, started: int) -> DecodeLoop:
        return DecodeLoop(
            self.model,
            requests=requests,
            stop_tokens=self.stop_tokens,
            tokenizer=self.tokenizer,
            slots=self._reserve(requests),
            recorder=self._recorder,
            version=version,
            recompute=self.config.cache_after_sync is CacheAfterSync.RECOMPUTE,
            control=self._control,
            proceed=partial(self._proceed, started),
        )

    def _proceed(self, started: int, version: int) -> int | None:
        """Returns the version to continue with after `version`. Returns None if the computation must end."""
        paused = self._control.proceed(started)
        if paused is None:
            return None
        # Without a pause the weights are those before. A sync that has begun waits for this computation to pause, so
        # this computation must not wait for its end.
        return self.gate.enter() if paused else version

    def score(self, sequences: list[ModelInput]) -> list[list[float]]:
        return [each.logprobs for each in self.score_with_routes(sequences)]

    @torch.inference_mode()
    def score_with_routes(self, sequences: list[ModelInput]) -> list[Scored]:
        self.gate.enter()
        scores = []
        for sequence in sequences:
            following = torch.from_numpy(sequence.token_ids[1:]).to(self.model.device, torch.int64)[:, None]
            logprobs = self._logprobs(sequence).gather(1, following)[:, 0].tolist()
            routes = self._recorder.last()[:-1].cpu().numpy() if self._recorder else None
            scores.append(Scored(logprobs=logprobs, routes=routes))
        return scores

    @torch.inference_mode()
    def top(self, sequences: list[ModelInput], k: int) -> list[TopLogprobs]:
        self.gate.enter()
        found = []
        for sequence in sequences:
            logprobs = self._logprobs(sequence)
            nats, ids = logprobs.topk(k, dim=1)
            rest = logprobs.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
            found.append(TopLogprobs(ids=ids.int().cpu(), logprobs=torch.cat([nats, rest], 1).cpu()))
        return found

    def _logprobs(self, sequence: ModelInput) -> Tensor:
        """Returns [L - 1, V] nats of every token in the place of each but the first."""
        tokens = torch.from_numpy(sequence.token_ids).to(self.model.device, torch.int64)[None]
        slots = self._new_slots(num_slots=1, width=len(sequence))
        first = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        slots.prefill(slots=first, prompts=first)
        positions = torch.arange(len(sequence), device=self.model.device)[None]
        output = self.model(
            tokens,
            position_ids=positions,
            use_cache=False,
            past_key_values=slots.states,
            slots=slots,
            return_dict=True,
        )
        return output.logits[0, :-1].float().log_softmax(-1)

    def _check(self, request: GenerationRequest) -> None:
        if not len(request.input):
            raise ValueError("a prompt must have at least 1 token, got 0")
        prompt, response = request.prompt_tokens, request.sampling.max_tokens
        positions = self.model.config.max_position_embeddings
        if prompt + response > positions:
            raise ValueError(
                f"rollout.max_tokens: a prompt of {prompt} tokens and a response of {response} exceed the {positions} "
                "positions of the model"
            )

    def _reserve(self, requests: list[GenerationRequest]) -> KVCache:
        """Returns the cache of the last call if it is large enough. First writes to fresh memory cost more than
        reuse."""
        num_slots = min(len(requests), self.config.max_batch)
        width = max(request.prompt_tokens + request.sampling.max_tokens for request in requests)
        if self._slots is None or not self._slots.fits(num_slots=num_slots, width=width):
            self._slots = None
            self._slots = self._new_slots(num_slots=num_slots, width=width)
        return self._slots

    def _new_slots(self, *, num_slots: int, width: int) -> KVCache:
        return KVCache(num_slots=num_slots, width=width, device=self.model.device, with_states=self._with_states)

    def on_ranks(self, calls: Sequence[RankCall[DestinationRank, T]]) -> list[T]:
        (own,) = calls
        return [own.on(self.weights)]

    def pause(self) -> None:
        self._control.pause()

    def resume(self) -> None:
        """See RolloutEngine.resume. The cache of a paused call is recomputed if the weights have changed and it is not
        to be kept; no cache outlives its call."""
        self._control.resume()

    def abort(self, names: Collection[str] | None = None) -> None:
        self._control.abort(names)

    def sleep(self) -> None:
        """Frees the key-value cache; the weights stay."""
        before = self._reserved_bytes()
        self._slots = None
        if before is not None:
            torch.cuda.empty_cache()
            self.freed_bytes = before - (self._reserved_bytes() or 0)

    def _reserved_bytes(self) -> int | None:
        """Returns the bytes of device memory that this process reserves. None on a CPU, where the memory is not
        shared."""
        return torch.cuda.memory_reserved() if self.model.device.type == "cuda" else None

    def wake_weights(self) -> None:
        """Does nothing, because the weights stay in memory."""

    def wake(self) -> None:
        """Does nothing, because the next `generate` creates its cache."""

    def is_alive(self) -> bool:
        """Returns True: the engine has no process but its actor's."""
        return True

    def close(self) -> None:
        self.sleep()
        self.weights.close()


def keep_float32(head: Any) -> None:
    """Makes the model's output layer return logits in float32."""
    assert head.bias is None, "no family has an output layer with bias"
    head.forward = partial(_head_in_float32, head)


def _head_in_float32(head: torch.nn.Linear, states: Tensor) -> Tensor:
    return float32_product(states.flatten(0, -2), head.weight).unflatten(0, states.shape[:-1])


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of the model that a checkpoint holds."""
    fixed = {name: buffer for name, buffer in model.named_buffers() if name.endswith(FIXED)}
    return dict(model.named_parameters()) | fixed


def load_weights(parameters: Mapping[str, Tensor], checkpoint: Mapping[str, Tensor]) -> None:
    """Fills transformers' parameters from checkpoint tensors. Uses only views and copy_, so that it can be recorded.

    On disk each expert has tensors of its own; in memory transformers 5 holds the experts of a layer as `gate_up_proj`
    [E, 2 I, H], gate rows above up rows, and `down_proj` [E, H, I].

    Raises:
        CheckpointError: no parameter of the model takes a tensor.
    """
    for name, tensor in checkpoint.items():
        if ".block_sparse_moe." in name:
            for theirs, ours in MIXTRAL.items():
                name = name.replace(theirs, ours)
        expert = EXPERT.fullmatch(name)
        if name in parameters:
            parameters[name].copy_(tensor)
        elif expert is None or f"{expert['experts']}.down_proj" not in parameters:
            raise CheckpointError(f"no parameter of the transformers model takes the checkpoint's tensor {name}")
        elif expert["projection"] == "down":
            parameters[f"{expert['experts']}.down_proj"][int(expert["index"])].copy_(tensor)
        else:
            gate, up = parameters[f"{expert['experts']}.gate_up_proj"][int(expert["index"])].chunk(2)
            (gate if expert["projection"] == "gate" else up).copy_(tensor)
