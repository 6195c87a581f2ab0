"""The embedded engine: Hugging Face transformers in the engine's own process, batched decoding, no server.

It needs nothing but transformers and runs on CPU and on one GPU. The model's code and weights are Hugging Face's own;
only the decode loop and the cache are ours.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframe.models.hub import load_family, read_config
from rlframe.models.random_init import random_tensor
from rlframe.rollout.base import RolloutEngine
from rlframe.rollout.config import RolloutConfig
from rlframe.rollout.decode import DecodeLoop
from rlframe.rollout.slots import ATTENTION, Slots, attend
from rlframe.types.rollout import Completion, GenerationRequest, SamplingParams
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.weight_sync.channel import WeightDestination
from rlframe.weight_sync.layout import record

EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<index>\d+)\.(?P<projection>gate|up|down)_proj\.weight")


@dataclass(kw_only=True, slots=True)
class TransformersConfig(RolloutConfig):
    """Settings of the embedded engine."""

    max_batch: int = 256
    """Sequences decoded at once, at most: bounds the memory of the key-value cache. More requests wait their turn."""

    def __post_init__(self) -> None:
        # Dataclasses with slots are made anew, which leaves the zero-argument super() without its class.
        RolloutConfig.__post_init__(self)
        if self.max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {self.max_batch}")


class TransformersEngine(RolloutEngine):
    """A causal language model of transformers and its tokenizer."""

    def __init__(
        self,
        config: TransformersConfig,
        *,
        folder: Path,
        dtype: torch.dtype,
        device: str,
        random_seed: int | None = None,
    ):
        """Load the model through transformers' own full path.

        Args:
            folder: model and tokenizer in Hugging Face format.
            random_seed: draw the weights from this seed; the folder then needs none.

        Raises:
            ConfigError: an attention that looks back over a window only.
        """
        from transformers import AttentionInterface, AutoTokenizer

        AttentionInterface.register(ATTENTION, attend)
        self.config = config
        self.folder = folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = self._load(dtype, random_seed).to(device).eval().requires_grad_(False)
        self.stop_tokens = self._stop_tokens()
        self._slots: Slots | None = None
        parameters = dict(self.model.named_parameters())
        self.weights = WeightDestination(record(load_weights, parameters, self._tensors()), parameters)

    def _load(self, dtype: torch.dtype, random_seed: int | None) -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

        hf = AutoConfig.from_pretrained(self.folder)
        windowed = any(kind != "full_attention" for kind in getattr(hf, "layer_types", None) or [])
        if windowed or (getattr(hf, "sliding_window", None) and getattr(hf, "use_sliding_window", True)):
            raise ConfigError([f"rollout.name=transformers: {self.folder} has layers without full attention"])
        options = {"dtype": dtype, "attn_implementation": ATTENTION}
        if random_seed is None:
            return AutoModelForCausalLM.from_pretrained(self.folder, **options)
        weights = {name: random_tensor(name, shape, seed=random_seed) for name, shape in self._tensors().items()}
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf)]
        return model_class.from_pretrained(None, config=hf, state_dict=weights, **options)

    def _tensors(self) -> dict[str, tuple[int, ...]]:
        family = load_family(self.folder)
        return family.tensors(family.architecture(read_config(self.folder)))

    def _stop_tokens(self) -> list[int]:
        """The end-of-sequence tokens of the generation config and of the tokenizer."""
        from transformers import GenerationConfig

        stated = [self.model.config.eos_token_id, self.tokenizer.eos_token_id]
        if (self.folder / "generation_config.json").is_file():
            stated.append(GenerationConfig.from_pretrained(self.folder).eos_token_id)
        ids = itertools.chain.from_iterable(each if isinstance(each, list) else [each] for each in stated)
        return sorted({token for token in ids if token is not None})

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        self.weights.require_verified()
        alike: dict[SamplingParams, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            self._check(request)
            # Lengths may differ from row to row; all else is shared by the rows that decode together.
            alike[replace(request.sampling, max_tokens=1, min_tokens=0)].append(index)
        completions: dict[int, Completion] = {}
        for indices in alike.values():
            members = [requests[index] for index in indices]
            completions.update(zip(indices, self._generate_alike(members), strict=True))
        return [completions[index] for index in range(len(requests))]

    def _generate_alike(self, requests: list[GenerationRequest]) -> list[Completion]:
        loop = DecodeLoop(
            self.model,
            requests=requests,
            stop_tokens=self.stop_tokens,
            tokenizer=self.tokenizer,
            slots=self._reserve(requests),
        )
        version = self.weights.version
        assert version is not None, "verified weights have a version"
        return [
            Completion(
                token_ids=continuation.token_ids,
                logprobs=continuation.logprobs,
                finish_reason=continuation.finish_reason,
                version=version,
            )
            for continuation in loop.run()
        ]

    def _check(self, request: GenerationRequest) -> None:
        if not request.token_ids:
            raise ValueError("a prompt must have at least 1 token, got 0")
        prompt, response = len(request.token_ids), request.sampling.max_tokens
        positions = self.model.config.max_position_embeddings
        if prompt + response > positions:
            raise ValueError(
                f"rollout.max_tokens: a prompt of {prompt} tokens and a response of {response} exceed the {positions} "
                "positions of the model"
            )

    def _reserve(self, requests: list[GenerationRequest]) -> Slots:
        """The cache of the last call where it is large enough: fresh memory costs more to touch than to reuse."""
        num_slots = min(len(requests), self.config.max_batch)
        width = max(len(request.token_ids) + request.sampling.max_tokens for request in requests)
        if self._slots is None or not self._slots.fits(num_slots=num_slots, width=width):
            self._slots = None
            self._slots = Slots(num_slots=num_slots, width=width, device=self.model.device)
        return self._slots

    def sleep(self) -> None:
        """Frees the key-value cache."""
        self._slots = None
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Nothing to do: the next `generate` makes its cache."""

    def close(self) -> None:
        self.sleep()


def load_weights(parameters: Mapping[str, Tensor], checkpoint: Mapping[str, Tensor]) -> None:
    """Fills transformers' parameters from checkpoint tensors, with views and copy_ only: it is run to be recorded.

    On disk each expert has tensors of its own; in memory transformers 5 holds the experts of a layer as
    `gate_up_proj` [E, 2 I, H], gate rows above up rows, and `down_proj` [E, H, I].

    Raises:
        CheckpointError: a tensor has no place in the model.
    """
    for name, tensor in checkpoint.items():
        expert = EXPERT.fullmatch(name)
        if name in parameters:
            parameters[name].copy_(tensor)
        elif expert is None or f"{expert['experts']}.down_proj" not in parameters:
            raise CheckpointError(f"checkpoint tensor {name} has no place in the transformers model")
        elif expert["projection"] == "down":
            parameters[f"{expert['experts']}.down_proj"][int(expert["index"])].copy_(tensor)
        else:
            gate, up = parameters[f"{expert['experts']}.gate_up_proj"][int(expert["index"])].chunk(2)
            (gate if expert["projection"] == "gate" else up).copy_(tensor)


COMPONENT, CONFIG = TransformersEngine, TransformersConfig
