"""What rlframe adds to the sampler of model runner V2, which needs a GPU: which requests of a batch get a record."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlframe.rollout.vllm.sampling.record import TokenRecord
from rlframe.rollout.vllm.sampling.sampler import RECORD, install

PROMPT, PREFILL = 3, 4


class Sampler:
    """As much of vLLM's sampler as is told apart: it samples token 10 + slot, and gives logprobs if asked to."""

    def __init__(self) -> None:
        temperature = SimpleNamespace(np=np.ones(4))
        self.sampling_states = SimpleNamespace(num_logprobs=np.full(4, -1), temperature=temperature)
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=np.full(4, PROMPT)))

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        self.sampling_states.num_logprobs[req_idx] = -1 if sampling_params.logprobs is None else 0

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        slots = input_batch.idx_mapping_np
        tokens, found = torch.from_numpy(slots)[:, None] + 10, None
        if self.sampling_states.num_logprobs[slots].max() >= 0:
            found = SimpleNamespace(logprobs=-tokens.float())
        return SimpleNamespace(sampled_token_ids=tokens, logprobs_tensors=found)


def sampler() -> Any:
    runner = SimpleNamespace(sampler=Sampler(), max_num_reqs=4)
    assert isinstance(install(runner), TokenRecord)
    return runner.sampler


def parameters(record: str = "", logprobs: int | None = None) -> Any:
    return SimpleNamespace(extra_args={RECORD: record} if record else None, logprobs=logprobs)


def step(sampler: Any, slots: list[int], lengths: list[int]) -> Any:
    """A step of requests by their slots, and how many of their tokens are computed after it."""
    batch = SimpleNamespace(
        idx_mapping_np=np.array(slots),
        seq_lens_cpu_upper_bound=torch.tensor([*lengths, 0]),
        prefill_len_np=np.where(np.array(slots) == 3, PREFILL, PROMPT),
    )
    return sampler(torch.zeros(len(slots), 20), batch)


def test_vllm_learns_nothing_of_logprobs_that_go_to_the_record():
    one = sampler()
    one.add_request(2, PROMPT, parameters("a"))
    one.add_request(0, PROMPT, parameters())
    assert step(one, [0, 2], [3, 3]).logprobs_tensors is None
    assert step(one, [2], [4]).logprobs_tensors is None
    assert [each.tolist() for each in one.record.take("a", 9)] == [[12, 12], [-12.0, -12.0]]


def test_a_request_that_wants_logprobs_of_vllm_has_both():
    one = sampler()
    one.add_request(1, PROMPT, parameters("a", logprobs=0))
    assert step(one, [1], [3]).logprobs_tensors.logprobs.tolist() == [[-11.0]]
    assert one.record.take("a", 9)[1].tolist() == [-11.0]


def test_a_slot_has_the_record_of_its_newest_request():
    one = sampler()
    one.add_request(1, PROMPT, parameters("a"))
    step(one, [1], [3])
    one.add_request(1, PROMPT, parameters("b"))
    step(one, [1], [3])
    one.add_request(1, PROMPT, parameters())
    step(one, [1], [3])
    assert [len(one.record.take(key, 9)[0]) for key in "ab"] == [1, 1]


def test_a_resumed_request_adds_nothing_before_its_tokens_are_computed_anew():
    one = sampler()
    one.add_request(0, PROMPT, parameters("a"))
    step(one, [0], [3])
    # It is preempted, and gets another slot. Its first token is computed anew, in two parts.
    one.add_request(3, PROMPT, parameters("a"))
    step(one, [3], [3])
    assert step(one, [3], [4]).logprobs_tensors is None
    assert one.record.take("a", 9)[0].tolist() == [10, 13]
