"""Trainer and engine of a ladder in one process: a rank of Megatron and the embedded engine, with planted faults."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlframe.cluster.config import Device
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config
from rlframe.tools.explain_gap.gap import Nats
from rlframe.tools.explain_gap.ladder import Climb, Ladder
from rlframe.tools.explain_gap.rest import describe
from rlframe.tools.explain_gap.rung import Subject
from rlframe.tools.explain_gap.rungs import rungs
from rlframe.tools.explain_gap.sides import Routes, Sample
from rlframe.types.batch import TopLogprobs
from rlframe.types.rollout import SamplingParams, Scored
from tests.rollout_models import make_requests

NUM_PROMPTS = 12
RESPONSE_TOKENS = 16


class LocalSides:
    """See rlframe.tools.explain_gap.sides.Sides. Planted faults are done again after each start."""

    def __init__(self, folder: Path, init_method: str, plant: Callable[["LocalSides"], None], **settings: Any):
        """
        Args:
            plant: puts a fault into the started sides.
            settings: settings of the rollout, and `dtype`.
        """
        self.num_engine_starts, self.longest_start_s = 0, 0.0
        self._folder, self._init_method, self._plant = folder, init_method, plant
        self.dtype = settings.pop("dtype", "float32")
        self.exact = settings.pop("exact", False)
        self.sampling = SamplingParams(max_tokens=RESPONSE_TOKENS, min_tokens=RESPONSE_TOKENS, **settings)
        self.engine_temperature: float | None = None
        self._running: tuple[str, bool] | None = None
        self.stale = ""

    def start(self, settings: Mapping[str, Any]) -> None:
        dtype, float32_logits = settings.get("train.dtype", self.dtype), settings.get("model.float32_logits", False)
        if (dtype, float32_logits) == self._running:
            return
        from rlframe.megatron.worker import parallel
        from rlframe.megatron.worker.trainer import Trainer, TrainerSetup
        from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine

        if self._running:
            parallel.shutdown()
        train = TrainConfig(dtype=Dtype(dtype))
        train.moe.router_replay = True
        setup = TrainerSetup(
            init_method=f"{self._init_method}-{self.num_engine_starts}", device=torch.device("cpu"), seed=0,
            model=ModelConfig(path=str(self._folder), float32_logits=float32_logits), train=train,
            total_optimizer_steps=1, timeout_s=60, with_reference=False, float32=self.exact,
        )  # fmt: skip
        self.rank = Trainer(setup)
        self.engine_behind = TransformersEngine(
            TransformersConfig(),
            folder=self._folder,
            dtype=torch.float32 if self.exact else getattr(torch, dtype),
            device="cpu",
            with_routes=True,
            float32_logits=float32_logits,
        )
        # transformers fills this buffer after loading, which the platform's stand-in for CUDA keeps it from.
        inner = self.engine_behind.model.model
        inner.rotary_emb = type(inner.rotary_emb)(self.engine_behind.model.config)
        if self.exact:
            # What a sync leaves there: the trainer's weights, of 16 bits.
            for value in self.engine_behind.model.parameters():
                value.data = value.data.bfloat16().float()
        self.engine_behind.gate.commit(0)
        self._running, self.num_engine_starts = (dtype, float32_logits), self.num_engine_starts + 1
        self._plant(self)

    def sample(self) -> Sample:
        from dataclasses import replace

        temperature = self.engine_temperature or self.sampling.temperature
        requests = make_requests(NUM_PROMPTS, sampling=replace(self.sampling, temperature=temperature))
        return Sample.of(requests, self.engine_behind.generate(requests))

    def engine(self, sample: Sample, *, alone: bool) -> list[Scored]:
        return self.engine_behind.score_with_routes(sample.sequences)

    def engine_top(self, sample: Sample, k: int) -> list[TopLogprobs]:
        return self.engine_behind.top(sample.sequences, k)

    def trainer(self, sample: Sample, *, temperature: float, routes: Routes | None, alone: bool) -> Nats:
        from rlframe.megatron.messages.microbatch import Microbatch

        indices = range(len(sample.sequences))
        batches = [sample.batch(routes, chosen) for chosen in ([[i] for i in indices] if alone else [list(indices)])]
        microbatches = [Microbatch(batch=batch, weights=torch.zeros(batch.num_tokens)) for batch in batches]
        found = self.rank.logprobs(microbatches, reference=False, temperature=temperature)
        pairs = zip(found, batches, strict=True)
        nats = [each[1:].tolist() for own, batch in pairs for each in own.split(batch.lengths.tolist())]
        return sample.of_responses(nats)

    def stale_weights(self) -> str:
        return self.stale

    def send_weights(self) -> None:
        source = self.rank.export(list(self.rank.layout.tensors), torch.float32)
        from rlframe.rollout.transformers.engine import load_weights, weights_of

        whole = {}
        for name, pieces in source.items():
            shape = self.rank.layout.tensors[name]
            whole[name] = torch.empty(shape)
            matrix = whole[name].view(-1, shape[-1]) if len(shape) > 1 else whole[name][None]
            for (row, rows, column, columns), values in pieces:
                matrix[row : row + rows, column : column + columns] = values
        load_weights(weights_of(self.engine_behind.model), whole)
        self.stale = ""


def climb(sides: LocalSides, folder: Path) -> tuple[Climb, list[str]]:
    """Returns the climb of all rungs, and what is said of the rest."""
    from rlframe.run.load import load

    overrides = [
        f"model.path={folder}",
        f"train.dtype={sides.dtype}",
        f"rollout.temperature={sides.sampling.temperature}",
        f"rollout.top_p={sides.sampling.top_p}",
    ]
    architecture = load_family(folder).architecture(read_config(folder))
    run = load("grpo_qwen3_moe", overrides)
    subject = Subject(run=run, architecture=architecture, device=Device.CPU, replays=True)
    ladder = Ladder(sides, subject, rungs())
    found = ladder.climb()
    return found, describe(ladder.sample, ladder.engine_nats, ladder.trainer_nats)
