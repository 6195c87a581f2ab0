import asyncio
import pickle

import numpy as np
import pytest

from rlframe.rollout.vllm.fetch import MOST_ROWS, Fetcher, Wanted, parts
from rlframe.utils.errors import RlframeError


class Ranks:
    """Two ranks, of which one has the records."""

    def __init__(self, **records: list[int]):
        self.records = records
        self.calls: list[list[Wanted]] = []

    async def take(self, wanted: list[Wanted]) -> list[bytes]:
        self.calls.append(wanted)
        await asyncio.sleep(0)
        found = [np.array(self.records.get(key, [])[:count], dtype=np.int32) for key, count, _ in wanted]
        experts = [np.full((num_rows, 1, 1), len(key), dtype=np.uint8) for key, _, num_rows in wanted]
        answer = [(each, -each.astype(np.float32), chosen) for each, chosen in zip(found, experts, strict=True)]
        return [pickle.dumps(answer), pickle.dumps([])]


async def fetched(fetcher: Fetcher, key: str, token_ids: list[int]) -> list[float]:
    with fetcher.record(key):
        return (await fetcher.take(key, token_ids))[0].tolist()


def test_responses_that_end_together_share_a_call():
    ranks = Ranks(a=[5, 6], b=[7])

    async def both() -> list[list[float]]:
        fetcher = Fetcher(ranks.take)
        return await asyncio.gather(fetched(fetcher, "a", [5, 6]), fetched(fetcher, "b", [7]))

    assert asyncio.run(both()) == [[-5.0, -6.0], [-7.0]]
    assert ranks.calls == [[("a", 2, 0), ("b", 1, 0)]]


def test_a_response_that_ends_during_a_call_has_the_next_one():
    ranks = Ranks(a=[5], b=[7])

    async def both() -> list[list[float]]:
        fetcher = Fetcher(ranks.take)
        first = asyncio.create_task(fetched(fetcher, "a", [5]))
        while not ranks.calls:
            await asyncio.sleep(0)
        return [await fetched(fetcher, "b", [7]), await first]

    assert asyncio.run(both()) == [[-7.0], [-5.0]]
    assert ranks.calls == [[("a", 1, 0)], [("b", 1, 0)]]


@pytest.mark.parametrize(
    ("record", "token_ids", "message"),
    [
        ([5, 6], [5, 7], "it has 2 of 2, and the first 1 are equal"),
        ([5], [5, 7], "it has 1 of 2, and the first 1 are equal"),
        ([], [5], "it has 0 of 1, and the first 0 are equal"),
    ],
)
def test_logprobs_of_other_tokens_are_an_error(record: list[int], token_ids: list[int], message: str):
    with pytest.raises(RlframeError, match=message):
        asyncio.run(fetched(Fetcher(Ranks(a=record).take), "a", token_ids))


def test_a_record_that_nobody_wants_ends_with_the_next_call():
    ranks = Ranks(a=[5], b=[7])

    async def one() -> list[float]:
        fetcher = Fetcher(ranks.take)
        with fetcher.record("a"):
            pass
        return await fetched(fetcher, "b", [7])

    assert asyncio.run(one()) == [-7.0]
    assert ranks.calls == [[("b", 1, 0), ("a", 0, 0)]]


def test_an_error_of_the_engine_reaches_all_who_wait():
    async def take(wanted: list[Wanted]) -> list[bytes]:
        raise RlframeError("dead")

    async def both() -> list[BaseException | list[float]]:
        fetcher = Fetcher(take)
        waits = [fetched(fetcher, "a", [5]), fetched(fetcher, "b", [7])]
        return await asyncio.gather(*waits, return_exceptions=True)

    assert [str(each) for each in asyncio.run(both())] == ["dead", "dead"]


def test_experts_come_in_calls_of_bounded_size():
    half = MOST_ROWS // 2
    ranks = Ranks(a=[5], b=[6], c=[7])

    async def one(fetcher: Fetcher, key: str, token_ids: list[int], num_rows: int) -> int:
        with fetcher.record(key):
            _, experts = await fetcher.take(key, token_ids, num_rows=num_rows)
        assert experts is not None and set(experts.ravel().tolist()) == {1}
        return len(experts)

    async def all_of_them() -> list[int]:
        fetcher = Fetcher(ranks.take)
        wanted = [("a", [5], half), ("b", [6], half), ("c", [7], 1)]
        return await asyncio.gather(*(one(fetcher, *each) for each in wanted))

    assert asyncio.run(all_of_them()) == [half, half, 1]
    assert ranks.calls == [[("a", 1, half), ("b", 1, half)], [("c", 1, 1)]]
    assert list(parts([("a", 1, 3 * MOST_ROWS), ("b", 1, 1)])) == [[("a", 1, 3 * MOST_ROWS)], [("b", 1, 1)]]
    assert list(parts([])) == [[]]
