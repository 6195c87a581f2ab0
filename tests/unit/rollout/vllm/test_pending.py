import asyncio
import pickle
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlframe.rollout.base.routes import Routers
from rlframe.rollout.served.pending import PendingRequest, spelled
from rlframe.rollout.vllm.fetch import Fetcher, Wanted
from rlframe.rollout.vllm.pending import follow, prompt, score, take
from rlframe.types.input import ModelInput
from rlframe.types.rollout import FinishReason, GenerationRequest, SamplingParams, Span
from rlframe.utils.errors import RlframeError


class Letters:
    """A tokenizer in which token n is the n-th letter."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


def request(begun: tuple[int, ...] = (), **sampling: Any) -> GenerationRequest:
    """A request with a prompt of one token, of whose response some are there."""
    return GenerationRequest(
        input=ModelInput((9, *begun)), sampling=SamplingParams(**sampling), seed=0, first_position=len(begun)
    )


def pending(version: int) -> PendingRequest:
    return PendingRequest(request(), name="r", version=version)


def piece(tokens: list[int], reason: str | None = None):
    flat = SimpleNamespace(token_ids=list(tokens), logprobs=[-float(token) for token in tokens])
    return SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=reason)


def test_a_stop_string_ends_the_response_at_the_token_that_completes_it():
    tokens = [0, 1, 2, 0, 1, 2]  # abcabc
    stops = request(stop=("bc",))
    assert spelled(tokens, first=1, request=stops, tokenizer=Letters()) == 3
    assert spelled(tokens[:2], first=1, request=stops, tokenizer=Letters()) is None
    assert spelled(tokens, first=1, request=request(), tokenizer=Letters()) is None


def test_a_stop_string_that_is_complete_before_min_tokens_ends_nothing():
    tokens = [0, 1, 2, 0, 1, 2]
    stops = request(stop=("bc",), min_tokens=4)
    assert spelled(tokens[:5], first=1, request=stops, tokenizer=Letters()) is None
    assert spelled(tokens, first=1, request=stops, tokenizer=Letters()) == 6
    assert spelled(tokens, first=1, request=request(stop=("bc",), min_tokens=3), tokenizer=Letters()) == 3


def test_a_stop_string_may_end_within_a_token_and_begin_with_half_a_character():
    class Pieces:
        def decode(self, token_ids: list[int]) -> str:
            pieces = [b"\xf0\x9f", b"\xa6\x8a", b"a", b"aba!"]
            return b"".join(pieces[token] for token in token_ids).decode(errors="replace")

    for stop in ("\U0001f98aaab", "ab", "aa"):
        stops = request(stop=(stop,), min_tokens=2)
        assert spelled([0, 1, 2, 3], first=1, request=stops, tokenizer=Pieces()) == 4
    assert spelled([0, 1, 2, 3], first=1, request=request(stop=("\U0001f98a",)), tokenizer=Pieces()) == 2


def test_a_stop_string_may_begin_in_what_an_earlier_request_sampled():
    stops = request(begun=(0, 1), stop=("bc",))
    assert spelled([2, 0], first=1, request=stops, tokenizer=Letters()) == 1
    assert spelled([0, 0], first=1, request=stops, tokenizer=Letters()) is None
    late = request(begun=(0, 1), stop=("bc",), min_tokens=4)
    assert spelled([2, 0], first=1, request=late, tokenizer=Letters()) is None


def test_tokens_are_told_apart_by_the_version_that_sampled_them():
    one = pending(version=3)
    take(one, piece([5, 6]))
    one.mark(4)
    one.mark(5)
    take(one, piece([7], "length"))
    done = one.completion()
    assert done.token_ids.tolist() == [5, 6, 7] and done.logprobs.tolist() == [-5.0, -6.0, -7.0]
    assert done.spans == [Span(version=3, start=0, end=2), Span(version=5, start=2, end=3)]
    assert done.finish_reason is FinishReason.LENGTH


def test_a_request_that_had_no_token_before_a_sync_is_all_of_the_new_version():
    one = pending(version=3)
    one.mark(4)
    take(one, piece([5], "stop"))
    assert one.completion().spans == [Span(version=4, start=0, end=1)]


def test_an_abort_without_new_tokens_adds_none():
    one = pending(version=3)
    take(one, piece([5]))
    # vLLM slices the logprobs by minus the number of new tokens, which for 0 is everything.
    last = piece([], "abort")
    last.logprobs = piece([5]).logprobs
    take(one, last)
    assert one.completion().token_ids.tolist() == [5] and one.completion().finish_reason is FinishReason.ABORT
    none = pending(version=3)
    take(none, piece([], "abort"))
    assert none.completion().spans == []


def test_a_stop_string_cuts_off_what_was_sampled_beyond_it():
    one = pending(version=3)
    take(one, piece([5, 6, 7, 8]))
    one.mark(4)
    one.stop_at(2)
    assert one.completion().token_ids.tolist() == [5, 6]
    assert one.completion().spans == [Span(version=3, start=0, end=2)]
    assert one.completion().finish_reason is FinishReason.STOP


class Ranks:
    """A rank whose records have these experts, and the tokens 5 and 6."""

    def __init__(self, experts: np.ndarray):
        self.experts = experts
        self.wanted: list[Wanted] = []

    async def take(self, wanted: list[Wanted]) -> list[bytes]:
        self.wanted += wanted
        tokens = np.array([5, 6])
        return [
            pickle.dumps([(tokens[:count], -tokens[:count].astype(np.float32), self.experts[:num_rows])])
            for _, count, num_rows in wanted
        ]


def followed(experts: np.ndarray, reason: str) -> tuple[PendingRequest, list[Wanted]]:
    """A request whose prompt has 1 token and whose response has 2, and what was fetched for it."""
    pytest.importorskip("vllm")

    async def outputs(*arguments: Any, **named: Any) -> AsyncIterator[Any]:
        for ids, end in (([5], None), ([6], reason)):
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=None, finish_reason=end)])

    one, routers = pending(version=3), Routers(num_layers=2, layers=(1,), experts_per_token=2, num_experts=4)
    engine, ranks = SimpleNamespace(generate=outputs), Ranks(experts)
    asyncio.run(follow(one, engine, stop_tokens=[], tokenizer=None, fetcher=Fetcher(ranks.take), routers=routers))
    return one, ranks.wanted


def test_a_request_that_has_not_begun_begins_again_in_another_epoch():
    """In which vLLM's prefix cache has nothing of the earlier one. A request that has begun stays in its own."""
    pytest.importorskip("vllm")
    prompts: list[dict[str, Any]] = []

    async def outputs(prompt: dict[str, Any], *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        prompts.append(prompt)
        if len(prompts) == 1:
            one.epoch = 2
            yield SimpleNamespace(outputs=[piece([], "abort")])
        else:
            yield SimpleNamespace(outputs=[piece([5])])
            one.epoch = 3
            yield SimpleNamespace(outputs=[piece([6], "length")])

    one = pending(version=3)
    one.epoch = 1
    asyncio.run(follow(one, SimpleNamespace(generate=outputs), stop_tokens=[], tokenizer=None))
    assert one.completion().token_ids.tolist() == [5, 6]
    assert [each["cache_salt"] for each in prompts] == ["rlframe 1", "rlframe 2"]
    assert prompt(ModelInput((7, 8)), epoch=0) == {"prompt_token_ids": [7, 8]}


def test_an_abort_that_overtakes_its_request_ends_it_at_its_first_token():
    pytest.importorskip("vllm")

    async def outputs(*arguments: Any, **named: Any) -> AsyncIterator[Any]:
        one.aborted = True
        yield SimpleNamespace(outputs=[piece([5])])
        yield SimpleNamespace(outputs=[piece([6])])

    one = pending(version=3)
    asyncio.run(follow(one, SimpleNamespace(generate=outputs), stop_tokens=[], tokenizer=None))
    assert one.completion().token_ids.tolist() == [5]
    assert one.ended and one.completion().finish_reason is FinishReason.ABORT


def test_routes_cover_all_but_the_last_token():
    rows = np.array([[[0, 0], [3, 1]], [[0, 0], [0, 2]]], dtype=np.uint8)
    one, wanted = followed(rows, "length")
    routes = one.completion().routes
    assert routes is not None and routes.tolist() == [[[3, 1]], [[0, 2]]]
    assert [each[1:] for each in wanted] == [(2, 2)]
    one, wanted = followed(rows, "abort")
    assert one.completion().routes is None and [each[1:] for each in wanted] == [(2, 0)]
    with pytest.raises(RlframeError, match=r"shape \(2, 2, 2\) for 2 tokens, got 4 numbers"):
        followed(rows[:1], "stop")


class Scoring:
    """An engine that has answered a scoring request for three tokens."""

    def __init__(self):
        flat = SimpleNamespace(token_ids=[8, 7], logprobs=[-1.0, -2.0])
        self._output = SimpleNamespace(prompt_logprobs=flat, outputs=[SimpleNamespace(token_ids=[5])])

    async def generate(self, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        yield self._output


def test_a_scored_prompt_has_the_experts_of_all_tokens_but_the_last():
    pytest.importorskip("vllm")
    routers = Routers(num_layers=1, layers=(0,), experts_per_token=2, num_experts=4)
    # vLLM has those of the last token too, because one token is sampled after it.
    ranks = Ranks(np.array([[[3, 1]], [[0, 2]], [[1, 2]]], dtype=np.uint8))
    sequence, fetcher = ModelInput((9, 8, 7)), Fetcher(ranks.take)
    scored = asyncio.run(score(sequence, Scoring(), name="s", routers=routers, fetcher=fetcher))
    assert scored.logprobs == [-1.0, -2.0]
    assert scored.routes is not None and scored.routes.tolist() == [[[3, 1]], [[0, 2]]]
    assert asyncio.run(score(sequence, Scoring(), name="s", fetcher=fetcher)).routes is None
    assert ranks.wanted == [("s", 1, 2)]
