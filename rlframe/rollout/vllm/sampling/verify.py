"""The check of drafts in vLLM's worker, for speculative decoding.

Model runner V1 draws a token in each place of a draft exactly as it does without drafts, with the request's own random
numbers, and accepts the draft as far as it has the drawn tokens. So a request has the same tokens with drafts and
without, up to the rounding of batches of another size, and one draw a token. A draft is accepted as often as by the
rejection sampling of arXiv 2211.17192: a drafted token stands for a distribution of this token alone, since drafts are
the likeliest tokens or copies of earlier ones. vLLM 0.32's own check repeats no response on a CPU, given its seed.

Model runner V2, which the user must ask for, keeps vLLM's own check, whose random numbers depend on a request's seed
and the position.

Both report logprobs by the rule of `sampler`; vLLM 0.26 to 0.32 would report those of temperature 1.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from rlframe.rollout.base.speculative import Drafts
from rlframe.rollout.vllm.sampling.record import NOT_RECORDED
from rlframe.rollout.vllm.sampling.sampler import GREEDY_BELOW, first_rows

REJECTED = -1
"""In the place of a token that was not sampled (vLLM's PLACEHOLDER_TOKEN_ID)."""


def install(runner: Any) -> Any | None:
    """Makes `runner`, vLLM's model runner in this process, check drafts by rlframe's rules. Returns the object that
    does so, which has `drafts`. Returns None if there are no drafts, or the rank does not sample."""
    checker = getattr(runner, "rejection_sampler", None)
    if checker is None:
        return None
    checker.counted = torch.zeros(3, dtype=torch.int64, device=runner.device)
    is_second = hasattr(checker.sampler, "sampling_states")
    checker.__class__ = (_second if is_second else _first)(type(checker))
    return checker


class Counting:
    """Counts drafts on the device, so that nothing waits for it."""

    counted: Int[Tensor, " 3"]
    """Fields of Drafts."""

    def drafts(self) -> Drafts:
        """Returns what became of the drafts so far."""
        return Drafts(*self.counted.tolist())


def _first(base: Any) -> Any:
    """Returns the check of model runner V1 (`vllm.v1.sample.rejection_sampler`) by rlframe's rules."""

    from vllm.v1.outputs import SamplerOutput

    class ExactChecker(Counting, base):
        def forward(self, metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:  # noqa: ARG002 - drafts are compared, whatever their probability
            counts = metadata.num_draft_tokens
            starts, width = _starts(counts, 1), max(counts) + 1
            tokens = self._check(metadata, logits, starts, sampling_metadata)
            wanted = sampling_metadata.max_num_logprobs
            logprobs = None
            if wanted is not None or self.sampler.begun:
                places = (torch.tensor(starts)[:, None] + torch.arange(width)).clamp(max=len(logits) - 1)
                logprobs = _logprobs(
                    self.sampler, logits[places.flatten().to(logits.device)], tokens, sampling_metadata
                )
            if logprobs is not None and self.sampler.begun:
                _record(self.sampler, tokens, logprobs.logprobs[:, 0].view_as(tokens))
            return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None if wanted is None else logprobs)

        def _check(self, metadata: Any, logits: Tensor, starts: list[int], sampling: Any) -> Int[Tensor, "B W"]:
            """Returns the tokens of each request, and REJECTED behind the first that its draft does not have."""
            counts, drafts = metadata.num_draft_tokens, metadata.draft_token_ids.tolist()
            first, width = _starts(counts, 0), max(counts) + 1
            tokens = torch.full((len(counts), width), REJECTED, dtype=torch.int32, device=logits.device)
            going, num_accepted = list(range(len(counts))), 0
            for place in range(width):
                drawn = _draw(
                    self.sampler, logits[[starts[request] + place for request in going]], going, place, sampling
                )
                tokens[going, place] = drawn.to(torch.int32)
                going = [
                    request
                    for request, token in zip(going, drawn.tolist(), strict=True)
                    if place < counts[request] and drafts[first[request] + place] == token
                ]
                num_accepted += len(going)
                if not going:
                    break
            self.counted += self.counted.new_tensor([sum(map(bool, counts)), sum(counts), num_accepted])
            return tokens

    return ExactChecker


def _record(sampler: Any, tokens: Int[Tensor, "B W"], logprobs: Float[Tensor, "B W"]) -> None:
    """Records the tokens of a step, place by place: a record takes one token of a request at a time."""
    runner, record = sampler.runner(), sampler.record
    names, lengths = first_rows(runner, len(tokens))
    rows, owners = np.array([sampler.begun.get(name, NOT_RECORDED) for name in names]).T
    wanted = ~runner.discard_request_mask.np[: len(names)]
    for place, has_token in enumerate((tokens != REJECTED).T.cpu().numpy()):
        record.add(
            rows,
            owners,
            lengths + place,
            wanted & has_token,
            tokens=tokens[:, place],
            logprobs=logprobs[:, place],
        )


def _draw(sampler: Any, logits: Tensor, requests: list[int], place: int, sampling: Any) -> Int[Tensor, " B"]:
    """Returns the tokens of these requests in a place after those they have, as vLLM's Sampler draws them.

    Args:
        logits: [B, V] a copy.
    """
    logits = logits.float()
    _forbid_stops(logits, requests, place, sampling)
    if sampling.all_greedy:
        return logits.argmax(dim=-1)
    # Before the temperature, which is applied in place.
    greedy = None if sampling.all_random else logits.argmax(dim=-1)
    temperature = sampling.temperature[requests]
    generators = {
        row: sampling.generators[request] for row, request in enumerate(requests) if request in sampling.generators
    }
    top_k, top_p = (None if limit is None else limit[requests] for limit in (sampling.top_k, sampling.top_p))
    logits = sampler.apply_temperature(logits, temperature, sampling.all_random)
    drawn, _ = sampler.topk_topp_sampler(logits, generators, top_k, top_p)
    return drawn if greedy is None else torch.where(temperature < GREEDY_BELOW, greedy, drawn)


def _logprobs(sampler: Any, logits: Float[Tensor, "N V"], tokens: Int[Tensor, "B W"], sampling: Any) -> Any:
    """Returns vLLM's LogprobsTensors of all places, of which vLLM leaves out those that were rejected. Without a wish
    for them in `sampling`, those of the chosen tokens, for the record."""
    logits = logits.float()
    if sampling.temperature is not None:
        divisor = torch.where(sampling.temperature < GREEDY_BELOW, 1.0, sampling.temperature)
        logits = logits / divisor[:, None].expand(-1, tokens.shape[1]).reshape(-1, 1)
    chosen = tokens.clamp(min=0).flatten().to(torch.int64)
    logprobs = sampler.compute_logprobs(logits)
    if sampling.max_num_logprobs is not None:
        return sampler.gather_logprobs(logprobs, sampling.max_num_logprobs, chosen)
    from vllm.v1.outputs import LogprobsTensors

    return LogprobsTensors(chosen[:, None], logprobs.gather(1, chosen[:, None]), chosen)


def _forbid_stops(logits: Float[Tensor, "B V"], requests: list[int], place: int, sampling: Any) -> None:
    """Sets the logits of stop tokens to minus infinity for requests that have fewer than their `min_tokens`.

    Args:
        place: number of accepted tokens that vLLM does not count yet.
    """
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

    for processor in sampling.logitsprocs.non_argmax_invariant:
        if not isinstance(processor, MinTokensLogitsProcessor):
            continue
        for row, request in enumerate(requests):
            least, known, stops, *_ = processor.min_toks.get(request, (0, (), ()))
            if len(known) + place < least:
                logits[row, list(stops)] = -torch.inf


def _starts(counts: list[int], extra: int) -> list[int]:
    """Returns where the rows of each request begin, if each has `extra` rows more than drafted tokens."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count + extra)
    return starts[:-1]


def _second(base: Any) -> Any:
    """Returns the check of model runner V2 (`vllm.v1.worker.gpu.spec_decode.rejection_sampler`), with logprobs by
    rlframe's rule."""

    class TemperedChecker(Counting, base):
        def __call__(self, logits: Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._tempering = input_batch.expanded_idx_mapping, input_batch.idx_mapping_np
            result = super().__call__(logits, input_batch, *args, **kwargs)
            counts = torch.from_numpy(input_batch.cu_num_logits_np[1:] - input_batch.cu_num_logits_np[:-1] - 1)
            self.counted[:2] += self.counted.new_tensor([int((counts > 0).sum()), int(counts.sum())])
            self.counted[2] += (result.num_sampled - 1).clamp(min=0).sum()
            return result

        def _verify(self, logits: Tensor, *args: Any) -> Any:
            # vLLM 0.32 checks very large batches in parts, each with rows of its own.
            self._tempering = args[6], args[5]
            return super()._verify(logits, *args)

        def _get_logprobs_tensors(self, *args: Any) -> Any:
            # The logits are the third argument in vLLM 0.32, and the fourth in 0.26, whose first is the batch.
            place = next(
                place
                for place, value in enumerate(args)
                if isinstance(value, Tensor) and value.dim() == 2 and value.is_floating_point()
            )
            rows, requests = self._tempering
            states = self.sampler.sampling_states
            temperature = states.temperature.np[requests]
            if ((temperature != 0.0) & (temperature != 1.0)).any():
                logits = args[place].to(torch.float32, copy=True)
                states.apply_temperature(logits, rows, requests)
                args = (*args[:place], logits, *args[place + 1 :])
            return super()._get_logprobs_tensors(*args)

    return TemperedChecker
