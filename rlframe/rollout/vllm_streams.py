"""One request inside vLLM: what has come of it so far, under which versions, and where a stop string ends it."""

from contextlib import aclosing
from typing import Any

from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, SamplingParams, Segment
from rlframe.utils.errors import RlframeError


class Stream:
    """A request that vLLM is working on. Lives in the engine's event loop."""

    def __init__(self, request: GenerationRequest, *, name: str, version: int):
        self.request = request
        self.name = name
        """vLLM's request id."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self._starts: list[tuple[int, int]] = [(version, 0)]
        """Versions in order, each with the number of tokens that were there when it began."""

    def take(self, piece: Any) -> None:
        """Append what vLLM has sampled since the last time.

        Args:
            piece: a CompletionOutput of DELTA kind with flat logprobs, of the sampled token alone.
        """
        count = len(piece.token_ids)
        if count:
            flat = piece.logprobs
            # After an abort without new tokens vLLM repeats old logprobs, so these are counted from the end.
            assert flat.token_ids[-count:] == list(piece.token_ids), "logprobs are of the sampled tokens"
            self.token_ids += piece.token_ids
            self.logprobs += flat.logprobs[-count:]
        if piece.finish_reason is not None:
            if piece.finish_reason not in set(FinishReason):
                raise RlframeError(f"vLLM ended a request with {piece.finish_reason!r}")
            self.finish_reason = FinishReason(piece.finish_reason)

    def stop_at(self, count: int) -> None:
        """The response ends after `count` tokens, because they spell a stop string."""
        del self.token_ids[count:], self.logprobs[count:]
        self.finish_reason = FinishReason.STOP

    def mark(self, version: int) -> None:
        """What comes from here on is sampled by weights of `version`."""
        self._starts.append((version, len(self.token_ids)))

    def completion(self) -> Completion:
        """The finished response."""
        assert self.finish_reason is not None, "the request has ended"
        length = len(self.token_ids)
        ends = [start for _, start in self._starts[1:]] + [length]
        segments = [
            Segment(version=version, start=start, end=min(end, length))
            for (version, start), end in zip(self._starts, ends, strict=True)
            if start < min(end, length)
        ]
        if not segments:
            segments = [Segment(version=self._starts[-1][0], start=0, end=0)]
        return Completion(
            token_ids=self.token_ids, logprobs=self.logprobs, finish_reason=self.finish_reason, segments=segments
        )


async def follow(stream: Stream, engine: Any, *, stop_tokens: list[int], tokenizer: Any) -> None:
    """Sample until the request ends; `stream` then holds all of it.

    Args:
        engine: AsyncLLM.
        stop_tokens: end-of-sequence tokens.
    """
    parameters = sampling_parameters(stream.request.sampling, seed=stream.request.seed, stop_tokens=stop_tokens)
    outputs = engine.generate({"prompt_token_ids": list(stream.request.token_ids)}, parameters, stream.name)
    # Leaving the loop early closes the generator, and with it vLLM drops the request.
    async with aclosing(outputs):
        async for output in outputs:
            seen = len(stream.token_ids)
            stream.take(output.outputs[0])
            count = spelled(stream.token_ids, first=seen + 1, sampling=stream.request.sampling, tokenizer=tokenizer)
            if count is not None:
                stream.stop_at(count)
            if stream.finish_reason is not None:
                return


def sampling_parameters(sampling: SamplingParams, *, seed: int, stop_tokens: list[int]) -> Any:
    """vLLM's SamplingParams: nothing of the model's generation config, and stop strings left to `spelled`."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Parameters

    return Parameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        seed=seed,
        stop_token_ids=stop_tokens,
        # vLLM's own idea of the end-of-sequence token; ours are the stop tokens.
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )


def scoring_parameters() -> Any:
    """vLLM's SamplingParams for the logprobs of a prompt; it does not work without sampling a token after it."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Parameters

    return Parameters(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def score(token_ids: tuple[int, ...], engine: Any, *, name: str) -> list[float]:
    """Nats of each token but the first, under log_softmax(logits)."""
    outputs = engine.generate({"prompt_token_ids": list(token_ids)}, scoring_parameters(), name)
    async with aclosing(outputs):
        async for output in outputs:
            flat = output.prompt_logprobs
            assert flat.token_ids == list(token_ids[1:]), "prompt logprobs are of the prompt's tokens"
            return list(flat.logprobs)
    raise RlframeError("vLLM ended a scoring request without an answer")


def spelled(token_ids: list[int], *, first: int, sampling: SamplingParams, tokenizer: Any) -> int | None:
    """The least number of tokens, from `first` on, that end with a stop string; None when there is none.

    The rule of the transformers engine, so that both stop at the same token: no stop before min_tokens, and the text
    looked at is that of the newest tokens, enough of them for the longest string.
    """
    if not sampling.stop:
        return None
    # A character takes at most 4 byte-level tokens, so a stop string just finished lies within this many.
    tail = 4 * max(len(string) for string in sampling.stop) + 4
    for count in range(max(first, sampling.min_tokens), len(token_ids) + 1):
        text = tokenizer.decode(token_ids[max(0, count - tail) : count])
        if any(string in text for string in sampling.stop):
            return count
    return None
