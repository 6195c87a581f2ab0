"""Requests to vLLM: their parameters, and the reading of its answers."""

from contextlib import aclosing, nullcontext
from typing import Any

import torch

from rlframe.rollout.base.routes import Routers
from rlframe.rollout.served.pending import PendingRequest, spelled, top_logprobs
from rlframe.rollout.vllm.fetch import Fetcher
from rlframe.rollout.vllm.sampling.sampler import FIRST_POSITION, RECORD
from rlframe.types.batch import TopLogprobs
from rlframe.types.input import ModelInput
from rlframe.types.rollout import FinishReason, GenerationRequest, Scored
from rlframe.utils.errors import RlframeError


async def follow(
    pending: PendingRequest,
    engine: Any,
    *,
    stop_tokens: list[int],
    tokenizer: Any,
    fetcher: Fetcher | None = None,
    routers: Routers | None = None,
    lora: Any = None,
) -> None:
    """Samples until the request ends; `pending` then holds the whole response.

    Args:
        engine: AsyncLLM.
        stop_tokens: end-of-sequence tokens.
        fetcher: fetches logprobs and experts. None if vLLM returns the logprobs itself.
        routers: routers of the model, if the engine records routed experts.
        lora: vLLM's LoRARequest, if the engine computes with adapters.
    """
    while pending.finish_reason is None:
        # Once more if `begin_again` has moved the request to another epoch.
        epoch = pending.epoch
        with fetcher.record(f"{pending.name} {epoch}") if fetcher else nullcontext() as record:
            parameters = sampling_parameters(pending.request, stop_tokens=stop_tokens, record=record)
            inputs = prompt(pending.request.input, epoch=epoch)
            outputs = engine.generate(inputs, parameters, pending.name, lora_request=lora)
            await last_output(pending, outputs, epoch=epoch, tokenizer=tokenizer)
            if fetcher and record and pending.finish_reason is not None:
                await fetched(pending, fetcher, record, routers)


async def fetched(pending: PendingRequest, fetcher: Fetcher, record: str, routers: Routers | None) -> None:
    """Gives an ended request its logprobs, and its experts unless it was aborted."""
    num_tokens = len(pending.request.input) + len(pending.token_ids)
    with_routes = routers is not None and pending.finish_reason is not FinishReason.ABORT
    num_rows = num_tokens - 1 if with_routes else 0
    logprobs, experts = await fetcher.take(record, pending.token_ids, num_rows=num_rows)
    pending.logprobs = logprobs.tolist()
    if routers is not None and with_routes:
        pending.routes = routers.routes(experts, num_tokens=num_tokens, engine="vLLM")


async def last_output(pending: PendingRequest, outputs: Any, *, epoch: int, tokenizer: Any) -> None:
    """Takes the tokens from vLLM's outputs until the response has ended, or has another epoch before its first
    token."""
    # Leaving the loop early closes the generator, which makes vLLM abort the request.
    async with aclosing(outputs):
        async for output in outputs:
            if pending.epoch != epoch and not pending.token_ids:
                return
            seen = len(pending.token_ids)
            take(pending, output.outputs[0])
            count = spelled(pending.token_ids, first=seen + 1, request=pending.request, tokenizer=tokenizer)
            if count is not None:
                pending.stop_at(count)
            if pending.finish_reason is None and pending.aborted:
                # The abort came before the request had reached vLLM.
                pending.finish(FinishReason.ABORT)
            if pending.finish_reason is not None:
                return
    raise RlframeError("vLLM ended a request without an answer")


def prompt(sequence: ModelInput, *, epoch: int) -> dict[str, Any]:
    """Returns vLLM's prompt. Prompts of different epochs share nothing of the prefix cache."""
    ids = {"prompt_token_ids": sequence.token_ids.tolist()}
    return ids | {"cache_salt": f"rlframe {epoch}"} if epoch else ids


def sampling_parameters(request: GenerationRequest, *, stop_tokens: list[int], record: str | None = None) -> Any:
    """Returns vLLM's SamplingParams. The model's generation config is ignored, and stop strings are left to `spelled`,
    which reads the tokens as they come.

    Args:
        record: name of the record that gets the logprobs. None makes vLLM return them.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Parameters

    sampling, first = request.sampling, request.first_position
    extra = ({FIRST_POSITION: first} if first else {}) | ({RECORD: record} if record else {})
    return Parameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens - first,
        min_tokens=max(0, sampling.min_tokens - first),
        seed=request.seed,
        extra_args=extra or None,
        stop_token_ids=stop_tokens,
        # vLLM's own end-of-sequence token; rlframe passes all stop tokens itself.
        ignore_eos=True,
        detokenize=False,
        logprobs=None if record else 0,
        flat_logprobs=record is None,
        output_kind=RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


def scoring_parameters(top_k: int, *, record: str | None = None) -> Any:
    """Returns vLLM's SamplingParams for the logprobs of a prompt's tokens and of the most likely tokens in their
    places. One token must be sampled after the prompt.

    Args:
        record: name of the record that gets the experts. None if nobody wants them.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Parameters

    return Parameters(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=top_k,
        extra_args={RECORD: record} if record else None,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def score(
    sequence: ModelInput,
    engine: Any,
    *,
    name: str,
    routers: Routers | None = None,
    fetcher: Fetcher | None = None,
    lora: Any = None,
) -> Scored:
    """Returns the nats of each token but the first, under log_softmax(logits).

    Args:
        routers: routers of the model, if the experts of the same pass are wanted.
        fetcher: fetches the experts.
        lora: vLLM's LoRARequest, if the engine computes with adapters.
    """
    wanted = fetcher if routers is not None else None
    with wanted.record(name) if wanted else nullcontext() as record:
        output = await scored(sequence, engine, name=name, top_k=0, record=record, lora=lora)
        flat = output.prompt_logprobs
        assert flat.token_ids == sequence.token_ids[1:].tolist(), "prompt logprobs are of the prompt's tokens"
        routes = None
        if routers is not None and wanted and record:
            _, experts = await wanted.take(record, output.outputs[0].token_ids, num_rows=len(sequence) - 1)
            routes = routers.routes(experts, num_tokens=len(sequence), engine="vLLM")
    return Scored(logprobs=list(flat.logprobs), routes=routes)


async def top(sequence: ModelInput, engine: Any, *, name: str, k: int, lora: Any = None) -> TopLogprobs:
    """Returns the k most likely tokens in the place of each token but the first."""
    flat = (await scored(sequence, engine, name=name, top_k=k, lora=lora)).prompt_logprobs
    # At each place the prompt's own token comes first, whatever its probability.
    ids = torch.tensor(flat.token_ids, dtype=torch.int32).view(-1, k + 1)
    assert ids[:, 0].tolist() == sequence.token_ids[1:].tolist(), "prompt logprobs are of the prompt's tokens"
    nats = torch.tensor(flat.logprobs, dtype=torch.float64).view(-1, k + 1)[:, 1:]
    return top_logprobs(ids[:, 1:], nats)


async def scored(
    sequence: ModelInput, engine: Any, *, name: str, top_k: int, record: str | None = None, lora: Any = None
) -> Any:
    """Returns vLLM's output for a prompt, whose FlatLogprobs are of each token but the first, each followed by the
    `top_k` most likely tokens in its place."""
    inputs = {"prompt_token_ids": sequence.token_ids.tolist()}
    outputs = engine.generate(inputs, scoring_parameters(top_k, record=record), name, lora_request=lora)
    async with aclosing(outputs):
        async for output in outputs:
            return output
    raise RlframeError("vLLM ended a scoring request without an answer")


def take(pending: PendingRequest, piece: Any) -> None:
    """Appends to `pending` the tokens that vLLM has sampled since the last call.

    Args:
        piece: a CompletionOutput of kind DELTA, or FINAL_ONLY, with flat logprobs of the sampled token only, or none.
    """
    count = len(piece.token_ids)
    if count and piece.logprobs is None:
        pending.take(piece.token_ids)
    elif count:
        flat = piece.logprobs
        # After an abort without new tokens vLLM repeats old logprobs, so they are counted from the end.
        assert flat.token_ids[-count:] == list(piece.token_ids), "logprobs are of the sampled tokens"
        pending.take(piece.token_ids, flat.logprobs[-count:])
    if piece.finish_reason is not None:
        pending.finish(piece.finish_reason)
