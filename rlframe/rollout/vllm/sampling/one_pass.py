"""Draws the next tokens of all requests and takes their logprobs in one pass over the logits, for model runner V2.

vLLM's own way reads the logits of a step five times, and starts a dozen kernels: it copies them, forbids tokens in the
copy, draws, takes the logarithm of the sum of their exponentials, and counts the likelier tokens. 256 rows of 152,000
numbers took an H200 0.55 ms of a step of 6.5; here they take 0.18, and the host less too. Rows that need more than a
temperature, forbidden stops and a seed are left to vLLM, whose noise is replaced by that of here, so that a request's
draws do not depend on which other requests there are.
"""

# Inside a kernel the language is Triton's: annotations are its own types, and constants are compile-time values.
# pyright: reportMissingParameterType=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlframe.rollout.vllm.sampling.gumbel import exponential
from rlframe.rollout.vllm.sampling.sampler import record_second

LANES = 512
"""Tokens of a quarter of a block: each Philox call gives four numbers."""
BLOCKS = 4
"""Blocks of a program, one after the other: 8,192 tokens."""
FEW = 512
"""Programs below which each has one block: otherwise most of a GPU's processors would have none, or one."""
WARPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """The tokens that a request may not sample before it has its least number of tokens."""

    least: Int[Tensor, " S"]
    """[S] the least number of tokens of a request, those of its prompt included."""
    counts: Int[Tensor, " S"]
    tokens: Int[Tensor, "S K"]
    """[S, K] of which a request has the first `counts`."""


def install(runner: Any) -> None:
    """Makes the sampler of vLLM's `runner`, which follows rlframe's rule, sample in one pass. Others than that of model
    runner V2 of 0.26 are left as they are: they have other parts."""
    sampler: Any = getattr(runner, "sampler", None)
    if not hasattr(sampler, "logit_bias_state"):
        return
    sampler.plain, sampler.staged = np.zeros(runner.max_num_reqs, dtype=bool), True
    sampler.one_pass = OnePass(sampler, dtype=runner.dtype, device=runner.device)
    sampler.__class__ = over(type(sampler))


def over(base: Any) -> Any:
    """Returns `sampler.TemperedSampler`, the `base`, that takes one pass over the logits of plain requests, and draws
    for others with the same noise."""

    class OnePassSampler(base):
        def add_request(self, req_idx: int, *args: Any) -> None:
            super().add_request(req_idx, *args)
            self.plain[req_idx] = is_plain(args[-1])
            self.staged = True

        def apply_staged_writes(self) -> None:
            # vLLM copies all values of all slots in every step, 0.19 ms. New requests alone change them.
            if self.staged:
                super().apply_staged_writes()
                self.one_pass.take()
                self.staged = False

        def __call__(self, logits: Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._rows = input_batch.idx_mapping_np
            if not self.plain[self._rows].all() or len(logits) != len(self._rows):
                return super().__call__(logits, input_batch, *args, **kwargs)
            choice = self.one_pass.choice(input_batch)
            return self.recorded(input_batch, *self.one_pass.choose(logits, input_batch, choice))

        def recorded(self, input_batch: Any, tokens: Tensor, logprobs: Tensor) -> Any:
            """Returns vLLM's SamplerOutput of the tokens of a batch, which are recorded."""
            if len(self.record):
                record_second(self, input_batch, tokens, logprobs)
            return self.one_pass.output(input_batch, tokens)

        def _draw(self, logits: Tensor, expanded_idx_mapping: Tensor, *args: Any, **_: Any) -> Any:
            # The arguments of vLLM's `Sampler.sample`: slots on the host, places, tokens, places in a draft.
            processed = self.apply_sampling_params(logits, expanded_idx_mapping, *args)
            return self.one_pass.draw(processed, expanded_idx_mapping, args[1]), processed

    return OnePassSampler


def is_plain(parameters: Any) -> bool:
    """Returns whether a request's SamplingParams ask for no more than a temperature, a seed and a least number of
    tokens."""
    restricts = parameters.top_k > 0 or parameters.top_p < 1.0 or parameters.min_p > 0.0
    penalises = parameters.presence_penalty or parameters.frequency_penalty or parameters.repetition_penalty != 1.0
    chooses = parameters.allowed_token_ids or parameters.logit_bias or parameters.bad_words
    return not (restricts or penalises or chooses or parameters.logprobs is not None or parameters.logprob_token_ids)


class OnePass:
    """Samples for the requests of vLLM's sampler (model runner V2 of 0.26), whose values it reads on the device."""

    def __init__(self, sampler: Any, *, dtype: torch.dtype, device: torch.device):
        """
        Args:
            dtype: of logits, for which the kernels are compiled at once.
        """
        self._sampler = sampler
        states, bias = sampler.sampling_states, sampler.logit_bias_state
        self._theirs = (states.seeds, states.temperature, bias.min_lens, bias.num_stop_token_ids)
        self._ours = tuple(torch.empty_like(each.gpu) for each in self._theirs)
        self._seeds, self._temperatures, self._least, self._counts = self._ours
        self.take()
        rows = len(states.temperature.np)
        # Of a step in which every row samples one token.
        self._all = torch.ones(rows, dtype=torch.int32, device=device)
        self._none = torch.zeros(rows, dtype=torch.int32, device=device)
        self._compile(torch.zeros(1, states.vocab_size, dtype=dtype, device=device))

    def _compile(self, logits: Float[Tensor, "1 V"]) -> None:
        """Compiles all kernels, side by side: one after the other they took a start some 4 seconds, by its log."""
        slots = torch.zeros(1, dtype=torch.int32, device=logits.device)
        draws = [
            partial(self._draw, logits, slots, slots, stops=stops, divides=divides)
            for stops in (None, self._stops())
            for divides in (False, True)
        ]
        draws.append(partial(self.draw, logits.float(), slots, slots.long()))

        def run(draw: Callable[[], object]) -> None:
            # Threads begin on the first device.
            with torch.cuda.device(logits.device):
                draw()

        if logits.is_cuda:
            with ThreadPoolExecutor(len(draws)) as pool:
                list(pool.map(run, draws))
        # Once more: Triton may have lost one of two kernels that were its first on the device at the same time.
        for draw in draws:
            draw()

    def take(self) -> None:
        """Copies the requests' values. vLLM has them in the host's memory, where each program of a kernel would read
        them: 43 microseconds for four rows in an engine, where the kernel alone takes 6 (H200, 2026-11-30)."""
        for held, theirs in zip(self._ours, self._theirs, strict=True):
            held.copy_(theirs.gpu, non_blocking=True)

    def choice(self, input_batch: Any) -> tuple[Stops | None, bool]:
        """Returns the tokens that requests of a batch may not sample yet, None if all may, and whether temperatures
        divide logits."""
        slots = input_batch.idx_mapping_np
        lengths = input_batch.seq_lens_cpu_upper_bound.numpy()[: len(slots)]
        bias = self._sampler.logit_bias_state
        forbids = (bias.use_logit_bias[slots] & (lengths < bias.min_lens.np[slots])).any()
        temperatures = self._sampler.sampling_states.temperature.np[slots]
        divides = bool(((temperatures != 0.0) & (temperatures != 1.0)).any())
        return self._stops() if forbids else None, divides

    def choose(
        self, logits: Float[Tensor, "B V"], input_batch: Any, choice: tuple[Stops | None, bool]
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        """Returns [B] tokens and their logprobs.

        Args:
            logits: of plain requests, one row of each.
            input_batch: vLLM's InputBatch.
            choice: what the method of this name returns for it.
        """
        stops, divides = choice
        lengths = input_batch.seq_lens[: len(logits)]
        return self._draw(logits, input_batch.idx_mapping, lengths, stops=stops, divides=divides)

    def output(self, input_batch: Any, tokens: Int[Tensor, " B"]) -> Any:
        """Returns vLLM's SamplerOutput of a batch. Rows that are not at the end of their prompts have no token."""
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        count = len(tokens)
        sampled = input_batch.seq_lens_cpu_upper_bound.numpy()[:count] >= input_batch.prefill_len_np
        return SamplerOutput(
            sampled_token_ids=tokens[:, None],
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=self._all[:count] if sampled.all() else self._upload(sampled),
            num_rejected=self._none[:count],
        )

    def draw(
        self, logits: Float[Tensor, "B V"], slots: Int[Tensor, " B"], places: Int[Tensor, " B"]
    ) -> Int[Tensor, " B"]:
        """Returns [B] tokens of logits that are divided by the temperature, and have minus infinity for tokens that are
        not to be drawn.

        Args:
            slots: of the rows' requests.
            places: of the last tokens that the rows have computed.
        """
        return self._draw(logits, slots, places + 1, divides=False)[0]

    def _draw(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return draw(*args, seeds=self._seeds, temperatures=self._temperatures, **options)

    def _stops(self) -> Stops:
        tokens = self._sampler.logit_bias_state.stop_token_ids.gpu
        return Stops(least=self._least, counts=self._counts, tokens=tokens)

    def _upload(self, sampled: Bool[np.ndarray, " B"]) -> Int[Tensor, " B"]:
        found = torch.from_numpy(sampled.astype(np.int32))
        return (found.pin_memory() if self._all.is_cuda else found).to(self._all.device, non_blocking=True)


def draw(
    logits: Float[Tensor, "B V"],
    slots: Int[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    *,
    seeds: Int[Tensor, " S"],
    temperatures: Float[Tensor, " S"],
    stops: Stops | None = None,
    divides: bool = True,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Returns [B] tokens and their logprobs: of each row a draw of softmax(logits / temperature), without forbidden
    tokens, and log_softmax(logits / temperature), with them. A temperature of 0 stands for the likeliest token, and for
    the logprob at 1.

    Args:
        logits: in any floating type. Tokens of minus infinity are never drawn.
        slots: where each row's request has its values, of the S of an engine.
        lengths: number of tokens that each row has computed, below 2^32: equal seeds with other lengths give
            independent draws.
        stops: None forbids nothing.
        divides: False if the logits are divided by the temperatures already, or these are 0 and 1.
    """
    count, vocabulary = logits.shape
    blocks = BLOCKS if count * triton.cdiv(vocabulary, 4 * LANES * BLOCKS) >= FEW else 1
    parts = triton.cdiv(vocabulary, 4 * LANES * blocks)
    sums = torch.empty(3, count, parts, dtype=torch.float32, device=logits.device)
    best = torch.empty(count, parts, dtype=torch.int64, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
    least, counts, forbidden = (stops.least, stops.counts, stops.tokens) if stops else (slots, slots, slots[:, None])
    rows = (logits, logits.stride(0), slots, temperatures)
    results, shape = (sums, best), (count, parts, vocabulary)
    forbids = (least, counts, forbidden, forbidden.stride(0))
    read = {"FORBIDS": stops is not None, "DIVIDES": divides, "LANES": LANES, "num_warps": WARPS}
    _read[(count, parts)](*rows, lengths, seeds, *forbids, *results, *shape, blocks, **read)
    width = triton.next_power_of_2(triton.cdiv(vocabulary, 4 * LANES))
    _choose[(count,)](*rows, *results, tokens, logprobs, *shape, DIVIDES=divides, PARTS=width, num_warps=1)
    return tokens, logprobs


@triton.jit
def _divided(logits, token, vocabulary, temperature, DIVIDES: tl.constexpr):
    """Returns the logits of some tokens at a temperature, at 1 if it is 0."""
    found = tl.load(logits + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    return found / tl.where(temperature == 0.0, 1.0, temperature) if DIVIDES else found


@triton.jit
def _added(one, two, three, four, top, total):
    """Returns the greatest logits by lane, and sums of exponentials relative to them, with four tokens more a lane."""
    new_top = tl.maximum(top, tl.maximum(tl.maximum(one, two), tl.maximum(three, four)))
    # A lane may have seen no token yet that can be drawn.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    total = total * tl.exp(top - base) + tl.exp(one - base) + tl.exp(two - base)
    return new_top, total + tl.exp(three - base) + tl.exp(four - base)


@triton.jit
def _compared(logits, bits, token, is_greedy, stops, num_stops, greatest, found):
    """Returns the greatest sums of logit and noise by lane, and their tokens, with some more tokens."""
    noisy = logits - tl.where(is_greedy, 0.0, tl.log(exponential(bits)))
    for index in range(0, num_stops):
        noisy = tl.where(token == tl.load(stops + index), float("-inf"), noisy)
    better = noisy > greatest
    return tl.where(better, noisy, greatest), tl.where(better, token, found)


@triton.jit(do_not_specialize=["count", "parts", "blocks"])
def _read(
    logits,
    stride,
    slots,
    temperatures,
    lengths,
    seeds,
    least,
    counts,
    forbidden,
    forbidden_stride,
    sums,
    best,
    count,
    parts,
    vocabulary,
    blocks,
    FORBIDS: tl.constexpr,
    DIVIDES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Reads `blocks` blocks of a row: their greatest logit, the sum of exponentials relative to it, the greatest sum of
    logit and noise, and the token of that."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, length = tl.load(slots + row).to(tl.int64), tl.load(lengths + row)
    seed, temperature = tl.load(seeds + slot), tl.load(temperatures + slot)
    is_greedy = temperature == 0.0
    num_forbidden = 0
    if FORBIDS:
        num_forbidden = tl.where(length < tl.load(least + slot), tl.load(counts + slot), 0)
    at, stops = logits + row * stride, forbidden + slot * forbidden_stride
    lanes = tl.arange(0, LANES)
    none = (lanes * 0).to(tl.uint32)
    top = tl.full((LANES,), float("-inf"), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    greatest = tl.full((LANES,), float("-inf"), tl.float32)
    found = lanes * 0
    begin = part * blocks
    for block in range(begin, tl.minimum(begin + blocks, tl.cdiv(vocabulary, 4 * LANES))):
        counter = (block * LANES + lanes).to(tl.uint32)
        first, second, third, fourth = tl.philox(seed, counter, none + length.to(tl.uint32), none, none)
        token = block * 4 * LANES + lanes
        one = _divided(at, token, vocabulary, temperature, DIVIDES)
        two = _divided(at, token + LANES, vocabulary, temperature, DIVIDES)
        three = _divided(at, token + 2 * LANES, vocabulary, temperature, DIVIDES)
        four = _divided(at, token + 3 * LANES, vocabulary, temperature, DIVIDES)
        top, total = _added(one, two, three, four, top, total)
        greatest, found = _compared(one, first, token, is_greedy, stops, num_forbidden, greatest, found)
        greatest, found = _compared(two, second, token + LANES, is_greedy, stops, num_forbidden, greatest, found)
        greatest, found = _compared(three, third, token + 2 * LANES, is_greedy, stops, num_forbidden, greatest, found)
        greatest, found = _compared(four, fourth, token + 3 * LANES, is_greedy, stops, num_forbidden, greatest, found)
    winner, whole, place = tl.max(greatest, 0), tl.max(top, 0), row * parts + part
    base = tl.where(whole == float("-inf"), 0.0, whole)
    tl.store(sums + place, whole)
    tl.store(sums + count * parts + place, tl.sum(total * tl.exp(top - base), 0))
    tl.store(sums + 2 * count * parts + place, winner)
    # Of tokens that are alike the first, as everywhere: greedy rows in bfloat16 have such.
    earliest = tl.min(tl.where(greatest == winner, found, vocabulary), 0)
    tl.store(best + place, earliest.to(tl.int64))  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit(do_not_specialize=["count", "parts"])
def _choose(
    logits,
    stride,
    slots,
    temperatures,
    sums,
    best,
    tokens,
    logprobs,
    count,
    parts,
    vocabulary,
    DIVIDES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Chooses the token of a row among those of its parts, and takes its logprob."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    used, at = part < parts, row * parts + part
    tops = tl.load(sums + at, mask=used, other=float("-inf"))
    totals = tl.load(sums + count * parts + at, mask=used, other=0.0)
    greatest = tl.load(sums + 2 * count * parts + at, mask=used, other=float("-inf"))
    token = tl.load(best + row * parts + tl.argmax(greatest, 0))
    top = tl.max(tops, 0)
    logsumexp = top + tl.log(tl.sum(totals * tl.exp(tops - top), 0))
    temperature = tl.load(temperatures + tl.load(slots + row))
    tl.store(tokens + row, token)
    tl.store(logprobs + row, _divided(logits + row * stride, token, vocabulary, temperature, DIVIDES) - logsumexp)
