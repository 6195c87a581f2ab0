"""Tokens and logprobs of one pass through Triton's interpreter, which tests/multiprocess/test_interpreted.py runs."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from rlframe.rollout.vllm.sampling import one_pass
from rlframe.rollout.vllm.sampling import sampler as tempered
from rlframe.rollout.vllm.sampling.gumbel import exponential
from rlframe.rollout.vllm.sampling.one_pass import OnePass, Stops, draw, install

LANES, BLOCKS = 16, 2
"""Small ones: the interpreter takes as long for each."""
VOCABULARY = 4 * LANES * BLOCKS + 3 * LANES + 5
"""Two programs, of which the second has less than a block, and of that less than all quarters."""
SLOTS, LENGTHS = torch.tensor([2, 0, 3, 1]), torch.tensor([4, 4, 9, 4])
"""Of four rows."""
SEEDS = torch.tensor([7, -3, 2**62 + 11, 7])
TEMPERATURES = torch.tensor([1.0, 0.0, 0.7, 1.0])
"""Of four slots. The second is greedy."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "LANES", LANES)
    monkeypatch.setattr(one_pass, "BLOCKS", BLOCKS)
    # A row alone is read block by block.
    monkeypatch.setattr(one_pass, "FEW", 3)


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))


@triton.jit
def write_noise(out, seed, place, LANES: tl.constexpr, EXPONENTIAL: tl.constexpr):
    """[4 * LANES] the exponential numbers of a seed and a place by call of Philox, a quarter after the other."""
    counter = tl.arange(0, LANES).to(tl.uint32)
    none = counter * 0
    bits = tl.philox(seed, counter, none + place, none, none)
    for quarter in tl.static_range(4):
        tl.store(out + quarter * LANES + tl.arange(0, LANES), EXPONENTIAL(bits[quarter]))


def noise(seed: int, place: int) -> torch.Tensor:
    """[V] exponential numbers by token: a block has a quarter of its tokens from each of the four numbers."""
    out = torch.empty(4, 4 * LANES)
    write_noise[(1,)](out, seed, place, LANES=4 * LANES, EXPONENTIAL=exponential)
    return torch.cat([block.flatten() for block in out.split(LANES, dim=1)])[:VOCABULARY]


def drawn(logits: torch.Tensor, rows: list[int], **options: Any) -> tuple[list[int], torch.Tensor]:
    tokens, logprobs = draw(
        logits, SLOTS[rows], LENGTHS[rows], seeds=SEEDS, temperatures=TEMPERATURES, **options
    )  # fmt: skip
    return tokens.tolist(), logprobs


def expected(logits: torch.Tensor, row: int) -> tuple[int, float]:
    """The token and the logprob of a row, by torch."""
    slot = int(SLOTS[row])
    temperature = float(TEMPERATURES[slot])
    divided = logits / (temperature or 1.0)
    noisy = divided - noise(int(SEEDS[slot]), int(LENGTHS[row])).log() if temperature else divided
    token = int(noisy.argmax())
    return token, float(divided.double().log_softmax(0)[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_and_logprobs_of_all_parts(logits: torch.Tensor, dtype: torch.dtype) -> None:
    logits = logits.to(dtype)
    tokens, logprobs = drawn(logits, [0, 1, 2, 3])
    wanted = [expected(row.float(), index) for index, row in enumerate(logits)]
    assert tokens == [token for token, _ in wanted]
    torch.testing.assert_close(logprobs, torch.tensor([logprob for _, logprob in wanted]), atol=2e-6, rtol=0)
    # Rows alone are as in company.
    assert drawn(logits[2:3], [2])[0] == tokens[2:3]


def test_logits_that_are_divided_already_give_the_same_tokens(logits: torch.Tensor) -> None:
    temperatures = TEMPERATURES[SLOTS][:, None]
    divided = logits / torch.where(temperatures == 0, 1.0, temperatures)
    assert drawn(divided, [0, 1, 2, 3], divides=False)[0] == drawn(logits, [0, 1, 2, 3])[0]


def test_stops_are_forbidden_until_a_row_is_long_enough_and_count_in_logprobs(logits: torch.Tensor) -> None:
    free, logprobs = drawn(logits, [0, 1, 2, 3])
    # Each slot may not sample what its row has sampled; rows 0 and 1 are too short for that, and row 3 has no stop.
    stops = torch.zeros(4, 2, dtype=torch.int32)
    stops[SLOTS] = torch.tensor([[token, token] for token in free], dtype=torch.int32)
    least, counts = torch.zeros(4, dtype=torch.int32), torch.full((4,), 2, dtype=torch.int32)
    least[SLOTS] = torch.tensor([5, 5, 9, 5], dtype=torch.int32)
    counts[SLOTS[3]] = 0
    tokens, restricted = drawn(logits, [0, 1, 2, 3], stops=Stops(least=least, counts=counts, tokens=stops))
    assert tokens[2:] == free[2:] and tokens[0] != free[0] and tokens[1] != free[1]
    torch.testing.assert_close(restricted[2:], logprobs[2:])
    for row in (0, 1):
        temperature = float(TEMPERATURES[SLOTS[row]]) or 1.0
        exact = float((logits[row] / temperature).double().log_softmax(0)[tokens[row]])
        assert float(restricted[row]) == pytest.approx(exact, abs=2e-6)


def test_greedy_rows_take_the_first_of_tokens_that_are_alike(logits: torch.Tensor) -> None:
    row = logits[3].clone()
    for places in ([9, 40], [40, 9 + 64], [77, 150]):
        alike = row.clone()
        alike[places] = 50.0
        assert drawn(alike[None], [3])[0] == [min(places)]


def test_tokens_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((4, VOCABULARY), -math.inf)
    logits[:, 149] = 0.0
    tokens, logprobs = drawn(logits, [0, 1, 2, 3])
    assert tokens == [149] * 4 and logprobs.tolist() == [0.0] * 4


def vllm_sampler() -> Any:
    """What is read of vLLM's sampler."""

    def both(values: torch.Tensor) -> Any:
        return SimpleNamespace(np=values.numpy(), gpu=values)

    states = SimpleNamespace(temperature=both(TEMPERATURES), seeds=both(SEEDS), vocab_size=VOCABULARY)
    bias = SimpleNamespace(
        use_logit_bias=np.array([True, False, False, False]),
        min_lens=both(torch.tensor([6, 0, 0, 0], dtype=torch.int32)),
        num_stop_token_ids=both(torch.tensor([1, 0, 0, 0], dtype=torch.int32)),
        stop_token_ids=both(torch.full((4, 3), 5, dtype=torch.int32)),
    )
    return SimpleNamespace(sampling_states=states, logit_bias_state=bias)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of vLLM's SamplerOutput, whose module needs a GPU."""
    output = SimpleNamespace(SamplerOutput=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.sample.output", output)


@pytest.mark.usefixtures("outputs")
def test_a_step_of_vllm(logits: torch.Tensor) -> None:
    one = OnePass(vllm_sampler(), dtype=torch.float32, device=torch.device("cpu"))
    logits[1, 5] = 90.0
    batch = SimpleNamespace(
        idx_mapping=SLOTS,
        idx_mapping_np=SLOTS.numpy(),
        # As many as a CUDA graph is for.
        seq_lens=torch.cat([LENGTHS, torch.zeros(4, dtype=torch.int64)]),
        seq_lens_cpu_upper_bound=torch.cat([LENGTHS, torch.zeros(4, dtype=torch.int64)]),
        prefill_len_np=np.array([4, 1, 10, 4]),
    )
    found, logprobs = one.choose(logits, batch, one.choice(batch))
    result = one.output(batch, found)
    # The third row's prompt is not at its end.
    assert result.num_sampled.tolist() == [1, 1, 0, 1] and result.num_rejected.tolist() == [0] * 4
    tokens = result.sampled_token_ids[:, 0].tolist()
    assert tokens[1] != 5, "slot 0 may not sample it before it has six tokens"
    assert [tokens[row] for row in (0, 3)] == [expected(logits[row], row)[0] for row in (0, 3)]
    assert float(logprobs[0]) == pytest.approx(expected(logits[0], 0)[1], abs=2e-6)
    batch.seq_lens_cpu_upper_bound = batch.seq_lens = torch.cat([LENGTHS + 2, torch.zeros(4, dtype=torch.int64)])
    assert one.choice(batch)[0] is None
    result = one.output(batch, one.choose(logits, batch, one.choice(batch))[0])
    assert result.sampled_token_ids[1].tolist() == [5] and result.num_sampled.tolist() == [1] * 4


class Sampler:
    """vLLM's sampler where it is not replaced: it draws by `sample`, and gives no logprobs."""

    def __init__(self) -> None:
        vars(self).update(vars(vllm_sampler()))
        # Seeds come with requests.
        self.sampling_states.seeds = SimpleNamespace(gpu=torch.zeros_like(SEEDS))
        self.sampling_states.num_logprobs = np.full(4, -1)
        self.sampling_states.apply_temperature = lambda *_: None
        # Every row samples its first token.
        prompts = np.zeros(4, dtype=np.int64)
        prompts[SLOTS] = LENGTHS
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=prompts))
        self.copies = 0

    def apply_staged_writes(self) -> None:
        """Counts how often all values are copied."""
        self.copies += 1

    def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
        """Takes the seed of a request, whose other values `vllm_sampler` has."""
        self.sampling_states.seeds.gpu[req_idx] = SEEDS[req_idx]

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        slots, places = input_batch.idx_mapping, input_batch.seq_lens[: len(logits)] - 1
        tokens, _ = self.sample(logits, slots, input_batch.idx_mapping_np, places)
        return SimpleNamespace(sampled_token_ids=tokens[:, None], logprobs_tensors=None)

    def apply_sampling_params(self, logits: torch.Tensor, slots: torch.Tensor, *_: Any) -> torch.Tensor:
        temperatures = TEMPERATURES[slots][:, None]
        return logits / torch.where(temperatures == 0, 1.0, temperatures)

    def sample(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the noise is rlframe's")


def parameters(record: str = "", **changes: Any) -> Any:
    """vLLM's SamplingParams of a plain request, but for `changes`."""
    usual: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    none = ("allowed_token_ids", "logit_bias", "bad_words", "logprobs", "logprob_token_ids")
    usual |= {"presence_penalty": 0.0, "frequency_penalty": 0.0} | dict.fromkeys(none)
    return SimpleNamespace(**usual | changes, extra_args={tempered.RECORD: record} if record else None)


@pytest.mark.usefixtures("outputs")
def test_a_request_has_its_tokens_and_record_in_any_company(logits: torch.Tensor) -> None:
    runner = SimpleNamespace(sampler=Sampler(), max_num_reqs=4, dtype=torch.float32, device=torch.device("cpu"))
    record = tempered.install(runner)
    install(runner)
    assert record is not None
    one: Any = runner.sampler
    for slot in range(4):
        one.add_request(slot, 3, parameters(record=f"request {slot}"))
    batch = SimpleNamespace(
        idx_mapping=SLOTS,
        idx_mapping_np=SLOTS.numpy(),
        seq_lens=LENGTHS,
        seq_lens_cpu_upper_bound=LENGTHS,
        prefill_len_np=np.full(4, 3),
    )
    for _ in range(3):
        one.apply_staged_writes()
    tokens = one(logits, batch).sampled_token_ids[:, 0].tolist()
    # With a request that asks for more the whole step is vLLM's, but for the noise.
    one.add_request(1, 3, parameters(top_p=0.9))
    for _ in range(3):
        one.apply_staged_writes()
    assert one.copies == 2
    assert one(logits, batch).sampled_token_ids[:, 0].tolist() == tokens
    for row, slot in ((0, 2), (2, 3)):
        found, logprobs = record.take(f"request {slot}", 9)
        token, logprob = expected(logits[row], row)
        assert found.tolist() == [token] == [tokens[row]]
        assert logprobs.tolist() == pytest.approx([logprob], abs=2e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"allowed_token_ids": [1]},
        {"logit_bias": {1: 2.0}},
        {"bad_words": ["a"]},
        {"logprobs": 0},
        {"logprob_token_ids": [1]},
    ],
)
def test_a_request_that_asks_for_more_is_not_plain(changes: dict[str, Any]) -> None:
    assert one_pass.is_plain(parameters()) and not one_pass.is_plain(parameters(**changes))
