"""Logprobs that the engine renormalised over the tokens that top-p and top-k keep."""

from dataclasses import replace

import numpy as np
import torch

from rlframe.rollout.base.sampling import keep_likely
from rlframe.tools.explain_gap.gap import Nats
from rlframe.tools.explain_gap.rung import Reading, Rung, Subject, Switched, closer
from rlframe.tools.explain_gap.sides import Sample, Sides
from rlframe.types.rollout import SamplingParams

CANDIDATES = 256
"""Number of most likely tokens among which the kept ones are looked for. The others count as not kept."""


class Filters(Rung):
    """Renormalises the trainer's logprobs over the tokens that were kept, and sees whether that is closer."""

    place = 30
    name = "filters"
    question = "Are the engine's logprobs those before top-p and top-k, as the trainer's are?"
    remedy = "rollout.top_p=1 rollout.top_k=0; report an engine that answers with filtered logprobs"
    cost = "none in speed; other samples"

    def refusal(self, subject: Subject) -> str:
        """See Rung."""
        sampling = subject.run.rollout.sampling()
        filters = sampling.top_p < 1 or sampling.top_k > 0
        return "" if filters else "rollout.top_p=1 and rollout.top_k=0 filter nothing"

    def switch(self, subject: Subject, sides: Sides, sample: Sample, reading: Reading) -> Switched:
        """See Rung."""
        sampling = subject.run.rollout.sampling()
        k = min(subject.architecture.vocab_size, max(CANDIDATES, sampling.top_k))
        after = replace(reading, kept=kept_nats(sides, sample, sampling, k))
        if closer(sides, sample, reading, after):
            return Switched(reading=after, found="the engine's logprobs are those after the filters")
        return Switched(reading=reading, found="the engine's logprobs are those before the filters")


def kept_nats(sides: Sides, sample: Sample, sampling: SamplingParams, k: int) -> Nats:
    """Returns [N] log-probability of the tokens that the filters keep in the place of each response token, under the
    engine's own distribution."""
    found = []
    for prompt, top in zip(sample.prompt_tokens, sides.engine_top(sample, k), strict=True):
        logits = top.logprobs[prompt - 1 :, :-1].float() / sampling.temperature
        probabilities = logits.softmax(1)
        kept = keep_likely(probabilities, top_k=sampling.top_k, top_p=sampling.top_p)
        inside = torch.ones(len(logits)) if sampling.temperature != 1 else top.logprobs[prompt - 1 :, :-1].exp().sum(1)
        found.append((kept.sum(1) * inside).log().numpy())
    return np.concatenate(found)


RUNG = Filters()
