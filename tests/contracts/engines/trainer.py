"""A trainer of one rank in the test process, an engine as the only destination of its weights, and what transformers
says that the engine should have sampled."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframe.rollout.base.engine import RolloutEngine
from rlframe.rollout.transformers.engine import load_weights
from rlframe.types.rollout import Completion, GenerationRequest
from rlframe.utils.calls import RankCall
from rlframe.weight_sync.border import DestinationInfo, DestinationRank
from rlframe.weight_sync.channel import DestinationGroup, Received, SourceGroup, WeightSource, WeightSync
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.layout.boxes import Region
from rlframe.weight_sync.layout.memory import record
from tests.contracts.engines.kinds import Kind
from tests.rollout_models import make_with_tokenizer

Described = list[tuple[DestinationInfo, dict[str, dict[Region, int]]]]
"""By rank: what it says of its weights, and its digest of each part that it holds, by tensor."""
STOP_TOKENS = [2, 10, 11, 12, 13, 14, 15]
"""So many that responses of a random model meet one of them soon."""

CLOSE = {"atol": 1e-4, "rtol": 0}
"""Nats, between two ways to compute the same in float32."""


class Trainer(SourceGroup):
    """Holds whole tensors by their names in the checkpoint."""

    def __init__(self, weights: dict[str, Tensor]):
        self.parameters = {name: value.clone() for name, value in weights.items()}
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
        self.source = WeightSource(record(_load, self.parameters, shapes), self.parameters)

    def train(self, weights: dict[str, Tensor]) -> None:
        """Take on other values, in place."""
        for name, value in weights.items():
            self.parameters[name].copy_(value)

    @property
    def num_ranks(self) -> int:
        return 1

    def on_ranks(self, calls: Sequence[RankCall]) -> list[Any]:
        return [call.on(self.source) for call in calls]


class OneEngine(DestinationGroup):
    """What RolloutGroup and RolloutWorker do for an engine, without Ray."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.after_pause: Callable[[], Any] = lambda: None
        """Called in each sync when nothing runs any more and the old weights are still there."""

    def engines(self) -> list[int]:
        return [0] * self.engine.config.devices_per_engine

    def on_ranks(self, calls: Sequence[RankCall], *, engines: Sequence[int] | None = None) -> list[Any]:
        return self.engine.on_ranks(calls)

    def receive(self, version: int, *, engines: Sequence[int] | None = None) -> list[Received]:
        self.engine.gate.begin(version)
        self.engine.pause()
        self.after_pause()
        return self.call(DestinationRank.receive)

    def commit(self, version: int, *, engines: Sequence[int] | None = None) -> None:
        self.engine.resume()
        self.engine.gate.commit(version)

    def fail(self, reason: str, *, engines: Sequence[int] | None = None) -> None:
        self.engine.gate.fail(reason)
        self.engine.abort()


@dataclass
class Running:
    """An engine that many tests use."""

    kind: Kind
    engine: RolloutEngine
    described: Described
    has_other_weights: bool = False


@dataclass
class Case:
    """An engine and its trainer, both at the checkpoint's weights, which are version 0."""

    kind: Kind
    engine: RolloutEngine
    folder: Path
    weights: dict[str, Tensor]
    trainer: Trainer
    destination: OneEngine
    sync: WeightSync


def describe(engine: RolloutEngine) -> Described:
    """See Described. To be asked before there is a connection, which chooses words and a seed for digests."""
    count, found = engine.config.devices_per_engine, []
    for rank, info in enumerate(engine.on_ranks([RankCall.of(DestinationRank.describe)] * count)):
        boxes = info.layout.boxes if info.layout else {}
        held = {}
        for name, mine in boxes.items():
            call = RankCall.of(DestinationRank.box_digests, name, [box.region for box in mine])
            held[name] = engine.on_ranks([call] * count)[rank]
        found.append((info, held))
    return found


def synced(
    engine: Any, weights: dict[str, Tensor], *, transport: str = "auto"
) -> tuple[Trainer, OneEngine, WeightSync]:
    """A trainer with `weights`, the engine with the same ones, proved to be version 0."""
    trainer, destination = Trainer(weights), OneEngine(engine)
    sync = WeightSync(trainer, destination, WeightSyncConfig(transport=transport))
    sync.connect()
    sync.calibrate(version=0)
    return trainer, destination, sync


def perturbed(weights: dict[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    """The weights after a step that is felt in every logit."""
    generator = torch.Generator().manual_seed(seed)
    return {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def _load(parameters: dict[str, Tensor], checkpoint: dict[str, Tensor]) -> None:
    for name, value in checkpoint.items():
        parameters[name].copy_(value)


def make(name: str, folder: Path) -> Path:
    """A tiny model with several stop tokens and room for prompts of more than a cache block, 128 tokens on CPU."""
    make_with_tokenizer(name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    (folder / "generation_config.json").write_text(
        # Defaults that would show in every response if they leaked in. Without `do_sample` transformers saves none.
        json.dumps(
            {
                "eos_token_id": STOP_TOKENS,
                "do_sample": True,
                "temperature": 0.1,
                "top_k": 2,
                "repetition_penalty": 3.0,
            }
        )
    )
    return folder


def transformers_model(folder: Path, weights: dict[str, Tensor]) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        load_weights(dict(model.named_parameters()), weights)
    return model


def nats(model: Any, request: GenerationRequest, tokens: list[int]) -> Tensor:
    """[len(tokens)] logprobs of a response under log_softmax(logits / temperature), in float32 and without a cache."""
    sequence = torch.tensor([[*request.input.token_ids.tolist(), *tokens]])
    with torch.no_grad():
        logprobs = (model(sequence).logits[0] / (request.sampling.temperature or 1.0)).log_softmax(-1)
    first = len(request.input)
    return logprobs[first - 1 : -1].gather(1, sequence[0, first:, None])[:, 0]


def experts(model: Any, request: GenerationRequest, tokens: list[int]) -> Tensor:
    """[rows, layers, k] experts of all tokens but the last, which was sampled and sent nowhere, sorted."""
    sequence = torch.tensor([[*request.input.token_ids.tolist(), *tokens[:-1]]])
    with torch.no_grad():
        logits = model(sequence, output_router_logits=True).router_logits
    return torch.stack([each.topk(2).indices for each in logits], dim=1).sort(-1).values


def mixed_nats(old: Any, new: Any, request: GenerationRequest, tokens: list[int], *, split: int) -> Tensor:
    """[len(tokens) - split] logprobs of what follows the first `split` tokens of a response, by the new model over the
    keys and values that the old one has computed of all before it but the last token."""
    sequence = torch.tensor([[*request.input.token_ids.tolist(), *tokens]])
    read = len(request.input) + split - 1
    with torch.no_grad():
        past = old(sequence[:, :read], use_cache=True).past_key_values
        logits = new(sequence[:, read:], past_key_values=past).logits[0, :-1]
    logprobs = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, sequence[0, read + 1 :, None])[:, 0]


def run(work: Callable[[], list[Completion]]) -> "Future[list[Completion]]":
    """`work` in a thread of its own."""
    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def verify(engine: RolloutEngine, version: int) -> None:
    """As after a sync."""
    engine.gate.begin(version)
    engine.resume()
    engine.gate.commit(version)
