"""The two sides as a ladder sees them, and the sample that both of them score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Shaped

from rlframe.tools.explain_gap.gap import Nats
from rlframe.types.batch import Sequences, TopLogprobs
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, GenerationRequest, Scored

Routes = Sequence[Shaped[np.ndarray, "rows layers k"]]
"""By sequence the experts of each token but the last; see `Completion.routes`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """Sampled responses behind their prompts, and what the engine said of them while it sampled."""

    sequences: list[ModelInput]
    prompt_tokens: list[int]
    """Number of tokens of each prompt."""
    logprobs: Nats
    """Nats of the response tokens, at the temperature of sampling."""
    routes: Routes | None

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> "Sample":
        """Returns the sample of an engine's answers to requests."""
        routes = [each.routes for each in completions if each.routes is not None]
        return cls(
            sequences=[ask.input.then(got.token_ids) for ask, got in zip(requests, completions, strict=True)],
            prompt_tokens=[len(ask.input) for ask in requests],
            logprobs=np.concatenate([each.logprobs for each in completions]),
            routes=routes if len(routes) == len(completions) else None,
        )

    def first(self, count: int) -> "Sample":
        """Returns the first sequences."""
        tokens = sum(self.response_tokens[:count])
        routes = None if self.routes is None else self.routes[:count]
        return Sample(
            sequences=self.sequences[:count],
            prompt_tokens=self.prompt_tokens[:count],
            logprobs=self.logprobs[:tokens],
            routes=routes,
        )

    @property
    def response_tokens(self) -> list[int]:
        """Number of tokens of each response."""
        return [len(each) - prompt for each, prompt in zip(self.sequences, self.prompt_tokens, strict=True)]

    def of_responses(self, scores: Sequence[Sequence[float]]) -> Nats:
        """Returns [N] nats of the response tokens, from those of each token but the first of each sequence."""
        pairs = zip(scores, self.prompt_tokens, strict=True)
        return np.concatenate([np.asarray(nats, dtype=np.float32)[prompt - 1 :] for nats, prompt in pairs])

    def batch(self, routes: Routes | None, indices: Sequence[int]) -> Sequences:
        """Returns the sequences `indices` packed for the trainer, with the experts that its routers must choose."""
        chosen = [self.sequences[index].token_ids for index in indices]
        lengths = torch.tensor([len(each) for each in chosen])
        mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
        mask[lengths.cumsum(0) - lengths] = False
        packed = None
        if routes is not None:
            # The last token of a sequence has none: nobody has fed it to the model.
            rows = [np.concatenate([routes[index], np.zeros_like(routes[index][:1])]) for index in indices]
            packed = torch.from_numpy(np.concatenate(rows))
        tokens = torch.from_numpy(np.concatenate(chosen).astype(np.int64))
        return Sequences(token_ids=tokens, lengths=lengths, loss_mask=mask, routes=packed)


class Sides(Protocol):
    """A trainer and an engine of the same model, started."""

    def start(self, settings: Mapping[str, Any]) -> None:
        """Starts both sides with the settings of the run, changed by `settings`. What does not change goes on.

        Args:
            settings: values by dotted key.
        """
        ...

    def sample(self) -> Sample:
        """Returns responses of the engine to the prompts, with the same seeds each time."""
        ...

    def engine(self, sample: Sample, *, alone: bool) -> list[Scored]:
        """Returns what the engine's prefill says of the sequences, at temperature 1.

        Args:
            alone: gives it one sequence at a time.
        """
        ...

    def engine_top(self, sample: Sample, k: int) -> list[TopLogprobs]:
        """Returns by sequence the engine's most likely tokens in the place of each token but the first, at temperature
        1."""
        ...

    def trainer(self, sample: Sample, *, temperature: float, routes: Routes | None, alone: bool) -> Nats:
        """Returns the trainer's nats of the response tokens.

        Args:
            routes: experts that its routers must choose; None lets them choose.
            alone: gives it one sequence at a time.
        """
        ...

    def stale_weights(self) -> str:
        """Returns where the engine does not hold the trainer's weights, by digest. Empty if it holds them."""
        ...

    def send_weights(self) -> None:
        """Sends the trainer's weights to the engine again."""
        ...
