"""When requests are admitted into the steps of vLLM's scheduler while more wait than fit."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rlframe.rollout.vllm.decode import admission
from rlframe.rollout.vllm.decode.admission import Admission
from rlframe.rollout.vllm.decode.scheduler import Repeated, shorten
from tests.unit.rollout.vllm.test_scheduler import folder, request, responses, scheduling

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
__all__ = ["folder"]


def admitted(
    folder: Path, lengths: list[int], *, step_cost: float, prompts: list[int] | None = None, repeats: bool = False
) -> dict[int, int]:
    """Number of requests that each step admits, by the number of the step, where there are any. Six run at a time, and
    one step is under way."""
    made = scheduling(folder, blocks=200, second_runner=True)
    admits = Admission(made, step_cost=step_cost)
    admits.install()
    if repeats:
        assert shorten(made.kv_cache_manager, lookahead=0)
        Repeated(made, admits).install()
    sizes = prompts or [3] * len(lengths)
    requests = [
        request(str(index), [*range(8 + index, 8 + index + size)], max_tokens=length)
        for index, (size, length) in enumerate(zip(sizes, lengths, strict=True))
    ]
    decisions = responses(made, requests, steps=1)
    assert [len(each.output_token_ids) for each in requests] == lengths
    return {step: len(each.scheduled_new_reqs) for step, each in enumerate(decisions) if each.scheduled_new_reqs}


LENGTHS = [10, 12, 14, 40, 40, 40, 40, 40, 40, 40]
"""Step 0 admits six. One of them ends in step 9, the next in 11, the third in 13, the others in 39."""


def test_vllm_admits_each_request_as_soon_as_it_fits(folder: Path) -> None:
    assert admitted(folder, LENGTHS, step_cost=0) == {0: 6, 10: 1, 12: 1, 14: 1, 40: 1}


@pytest.mark.parametrize("repeats", [False, True])
def test_requests_wait_until_their_empty_places_have_cost_as_much_as_a_step_with_prompts(
    folder: Path, repeats: bool
) -> None:
    # Behind steps 9 and 10 one place is empty, behind 11 two: 1 + 1 + 2 tokens, as many as four sequences sample in a
    # step. Behind step 13 there is one again, and in step 18 it has cost five.
    expected = {0: 6, 12: 2, 18: 1, 40: 1}
    assert admitted(folder, LENGTHS, step_cost=1, repeats=repeats) == expected
    # Behind steps 13 to 15 three places are empty: 1 + 1 + 2 + 2 + 3 tokens are no less than 2.5 * 3.
    assert admitted(folder, LENGTHS, step_cost=2.5, repeats=repeats) == {0: 6, 14: 3, 40: 1}


def test_steps_repeat_while_requests_wait(folder: Path) -> None:
    made: Any = scheduling(folder, blocks=200, second_runner=True)
    decided, decide = [], made.schedule
    made.schedule = lambda *rest, **more: decided.append(1) or decide(*rest, **more)
    assert shorten(made.kv_cache_manager, lookahead=0)
    Repeated(made, Admission(made, step_cost=1)).install()
    requests = [request(str(index), [8 + index, 9, 10], max_tokens=60) for index in range(8)]
    # Two wait while the first six sample 60 tokens each.
    assert len(responses(made, requests, steps=1)) == 120
    assert len(decided) < 30


def test_the_last_ones_are_admitted_at_once(folder: Path) -> None:
    # Two wait: one is held back while one place is empty, and both are admitted when both fit.
    assert admitted(folder, LENGTHS[:8], step_cost=100) == {0: 6, 12: 2}
    assert admitted(folder, LENGTHS[:7], step_cost=100) == {0: 6, 10: 1}


def test_requests_that_wait_for_the_tokens_of_a_step_are_not_held_back(folder: Path) -> None:
    # A step has 64 tokens: step 2 computes only a part of the second prompt, and the others follow it at once.
    assert admitted(folder, [15] * 6, step_cost=100, prompts=[100, 100, 3, 3, 3, 3]) == {0: 1, 1: 1, 3: 4}


def test_requests_that_come_while_places_are_free_are_admitted_in_the_next_step(folder: Path) -> None:
    made: Any = scheduling(folder, blocks=200, second_runner=True)
    Admission(made, step_cost=100).install()
    for number in range(7):
        # Nothing waits in the second step of each turn.
        made.add_request(request(str(number), [8 + number, 9, 10]))
        output = made.schedule()
        assert [each.req_id for each in output.scheduled_new_reqs] == ([str(number)] if number < 6 else [])
        made.schedule()
    assert len(made.waiting) == 1


def test_vllm_decides_again_after_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_HELD", 5)
    # Step 0 has filled all places, so that five steps are held. 6 finds none, and 12 finds two.
    assert admitted(folder, LENGTHS, step_cost=100) == {0: 6, 12: 2, 18: 1, 40: 1}


def test_requests_are_held_back_while_no_memory_is_free(folder: Path) -> None:
    def served(step_cost: float) -> tuple[int, int]:
        made: Any = scheduling(folder, blocks=14, second_runner=True)
        Admission(made, step_cost=step_cost).install()
        requests = [request(str(index), [8 + index] * 16, max_tokens=9 + index) for index in range(20)]
        decisions = responses(made, requests, steps=1)
        assert [len(each.output_token_ids) for each in requests] == [9 + index for index in range(20)]
        return len(decisions), sum(bool(each.scheduled_new_reqs) for each in decisions)

    (steps, beginnings), (held_steps, held_beginnings) = served(0), served(1)
    assert held_beginnings < beginnings and held_steps < 1.5 * steps
