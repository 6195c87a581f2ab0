"""The packed forward's parts against plain torch: norm, attention, inputs, outputs; and the exchange of weights.

They import Megatron, for which torch is patched; so they run in one process of their own. Each check is a test.
"""

import traceback
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.types.batch import Sequences
from tests.multiprocess.distributed import run_distributed
from tests.waits import Waits

LENGTHS = [5, 17, 2, 9, 30, 1, 12]
NUM_TOKENS = sum(LENGTHS)


def packing(lengths: list[int]) -> Any:
    """Megatron's description of packed sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = F.pad(torch.cumsum(torch.tensor(lengths), 0), (1, 0)).to(torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)


def attention_config(scale: float | None) -> Any:
    """Megatron's configuration of four heads of width 8."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, softmax_scale=scale)


def check_buckets_hold_sequences_of_like_length() -> None:
    from rlframe.megatron.cpu.attention import length_buckets

    assert length_buckets([1, 2, 3, 4, 7, 8, 0]) == [[0, 6], [1, 2], [3, 4], [5]]
    lengths = torch.randint(1, 5000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    buckets = length_buckets(lengths)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(200))
    for bucket in buckets:
        sizes = [lengths[index] for index in bucket]
        assert max(sizes) * len(sizes) <= 2 * sum(sizes)


def check_a_layout_says_where_each_token_sits() -> None:
    from rlframe.megatron.cpu.attention import PackedRows

    # Sequences of 2, 3, 0 and 1 tokens: one grid for the lengths 0 and 1, one for 2 and 3.
    short, long = PackedRows(torch.tensor([0, 2, 5, 5, 6])).grids
    assert short.is_query.tolist() == [[False], [True]] and short.query_rows[1].tolist() == [5]
    assert long.is_query.tolist() == [[True, True, False], [True, True, True]]
    assert long.query_rows.tolist() == long.key_rows.tolist() == [[0, 1, 1], [2, 3, 4]] and long.visible is None


def check_attention_equals_one_sequence_at_a_time() -> None:
    from rlframe.megatron.cpu.attention import PackedAttention

    generator = torch.Generator().manual_seed(1)
    heads = {"query": 4, "key": 2, "value": 2}
    upstream = torch.randn(NUM_TOKENS, 4 * 8, generator=generator)
    for scale in (None, 0.05):
        inputs = [torch.randn(NUM_TOKENS, count, 8, generator=generator) for count in heads.values()]
        attention = PackedAttention(attention_config(scale), 1, None)
        ours = [tensor.clone().requires_grad_() for tensor in inputs]
        actual = attention(*ours, None, packed_seq_params=packing(LENGTHS))
        actual.backward(upstream)

        plain = [tensor.clone().requires_grad_() for tensor in inputs]
        pieces = []
        for query, key, value in zip(*(tensor.split(LENGTHS) for tensor in plain), strict=True):
            # Spelled out: query head h reads key and value head h // 2, and nothing to its right.
            scores = torch.einsum("ihd,jhd->hij", query, key.repeat_interleave(2, 1)) * (scale or 8**-0.5)
            future = torch.ones(len(query), len(query)).triu(1).bool()
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            pieces.append(torch.einsum("hij,jhd->ihd", weights, value.repeat_interleave(2, 1)).flatten(1))
        expected = torch.cat(pieces)
        expected.backward(upstream)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
        for mine, theirs in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def check_attention_does_not_depend_on_the_company() -> None:
    from rlframe.megatron.cpu.attention import PackedAttention

    attention = PackedAttention(attention_config(None), 1, None)
    query, key, value = torch.randn(3, NUM_TOKENS, 2, 8, generator=torch.Generator().manual_seed(4))
    together = attention(query, key, value, None, packed_seq_params=packing(LENGTHS))
    start = sum(LENGTHS[:3])
    alone = [tensor[start : start + 9] for tensor in (query, key, value)]
    torch.testing.assert_close(
        attention(*alone, None, packed_seq_params=packing([9])), together[start : start + 9], atol=1e-6, rtol=1e-5
    )


def check_inputs_of_layers_come_back_from_the_host_bit_for_bit() -> None:
    from torch.autograd.graph import saved_tensors_hooks
    from torch.utils.checkpoint import checkpoint

    from rlframe.megatron.memory.activations import HostCopies

    copies, layers = HostCopies(8), [torch.nn.Linear(8, 8) for _ in range(3)]
    start = torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(6)).requires_grad_()

    def computed() -> Tensor:
        states = start
        for layer in layers:
            # As Megatron's: an autograd function that saves its inputs.
            states = checkpoint(layer, states, use_reentrant=True)
        return states

    def gradient(states: Tensor) -> Tensor:
        start.grad = None
        states.square().sum().backward()
        return start.grad

    expected = gradient(computed())
    with saved_tensors_hooks(copies.put, copies.get):
        states = computed()
    assert torch.equal(gradient(states), expected)
    # The three inputs, and nothing else: neither parameters nor what all layers share.
    assert copies.count == 3
    shared = torch.zeros(5, 1, 1, 8)
    assert copies.put(shared) is shared and copies.count == 3


def check_rotary_positions_equal_megatrons_own() -> None:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    from rlframe.megatron.cpu.attention import rotary_thd

    generator = torch.Generator().manual_seed(5)
    half = torch.arange(max(LENGTHS)).float()[:, None] * 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    freqs = torch.cat([half, half], -1)[:, None, None]
    upstream = torch.randn(NUM_TOKENS, 3, 8, generator=generator)
    values = torch.randn(NUM_TOKENS, 3, 8, generator=generator)
    bounds = packing(LENGTHS).cu_seqlens_q
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    results = []
    for function, extra in ((rotary_thd, {}), (_apply_rotary_pos_emb_thd, {"cp_group": alone})):
        leaf = values.clone().requires_grad_()
        output = function(leaf, bounds, freqs, **extra)
        output.backward(upstream)
        results.append((output.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-6)


def check_the_norm_equals_torchs() -> None:
    from rlframe.megatron.cpu.attention import RmsNorm

    generator = torch.Generator().manual_seed(2)
    hidden, weight = 3 * torch.randn(6, 1, 16, generator=generator), torch.randn(16, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        norm = RmsNorm(
            SimpleNamespace(params_dtype=dtype, sequence_parallel=True, layernorm_zero_centered_gamma=False),
            16,
            eps=1e-3,
        )  # type: ignore[arg-type]
        assert norm.weight.sequence_parallel and norm.weight.dtype == dtype
        norm.weight.data.copy_(weight)
        # x / sqrt(mean(x^2) + eps) * weight; below float32 rounded before the weight, as transformers does.
        rounded = hidden.to(dtype)
        scaled = rounded.float() * torch.rsqrt(rounded.float().square().mean(-1, keepdim=True) + 1e-3)
        expected = scaled.to(dtype) * weight.to(dtype)
        actual = norm(rounded)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 0)


def sequences(lengths: list[int]) -> Sequences:
    """Random tokens of a vocabulary of 9."""
    total = sum(lengths)
    tokens = torch.randint(0, 9, (total,), generator=torch.Generator().manual_seed(6))
    return Sequences(token_ids=tokens, lengths=torch.tensor(lengths).long(), loss_mask=torch.ones(total).bool())


def check_inputs_are_padded_by_a_sequence_of_their_own() -> None:
    from rlframe.megatron.packed.inputs import PackedInputs

    batch = sequences([2, 3])
    inputs = PackedInputs.of(batch, 4)
    assert inputs.token_ids.tolist() == [[*batch.token_ids.tolist(), 0, 0, 0]]
    assert inputs.packing.cu_seqlens_q.tolist() == [0, 2, 5, 8] and inputs.packing.max_seqlen_q == 3
    exact = PackedInputs.of(batch, 5)
    assert exact.token_ids.shape == (1, 5) and exact.packing.cu_seqlens_q.tolist() == [0, 2, 5]
    nothing = PackedInputs.of(sequences([]), 2)
    assert nothing.token_ids.tolist() == [[0, 0]] and nothing.packing.cu_seqlens_q.tolist() == [0, 2]


def check_context_parallel_ranks_take_an_early_and_a_late_chunk() -> None:
    from rlframe.megatron.packed.context_parallel import positions_of_rank, rows_of_rank

    # Sequences of 8 and 4 tokens over 2 ranks: 4 chunks of 2 tokens, then of 1; rank 0 has the first and the last.
    bounds = torch.tensor([0, 8, 12])
    assert positions_of_rank(bounds, 2, 0).tolist() == [0, 1, 6, 7, 0, 3]
    assert positions_of_rank(bounds, 2, 1).tolist() == [2, 3, 4, 5, 1, 2]
    assert rows_of_rank(bounds, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert rows_of_rank(bounds, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert positions_of_rank(bounds, 1, 0).tolist() == [*range(8), *range(4)]
    every = torch.cat([rows_of_rank(torch.tensor([0, 24, 30]), 3, rank) for rank in range(3)])
    assert every.sort().values.tolist() == list(range(30))


def check_inputs_are_padded_and_cut_for_context_parallelism() -> None:
    from rlframe.megatron.packed.inputs import PackedInputs

    # 5 tokens become 8 and 3 become 4, multiples of 2 * cp; a rank's 6 are filled to 8 by a sequence of 4.
    batch = sequences([5, 3])
    parts = [PackedInputs.of(batch, 4, cp_size=2, cp_rank=rank) for rank in range(2)]
    for part in parts:
        assert part.packing.cu_seqlens_q.tolist() == part.packing.cu_seqlens_q_padded.tolist() == [0, 8, 12, 16]
        # Rank 0 has tokens 0, 1, 6, 7 of the first sequence, then 0 and 3 of the second; rank 1 has the others.
        assert part.packing.max_seqlen_q == 8 and part.rows.tolist() == [0, 1, 8, 9, 10, 4, 12, 13]
    ids = batch.token_ids.tolist()
    assert parts[0].token_ids.tolist() == [[ids[0], ids[1], 0, 0, ids[5], 0, 0, 0]]
    assert parts[1].token_ids.tolist() == [[ids[2], ids[3], ids[4], 0, ids[6], ids[7], 0, 0]]
    # The token that follows, also where it lies in another rank's chunk; the 5th is followed by the next sequence's.
    assert parts[0].following(batch.token_ids).tolist() == [ids[1], ids[2], 0, 0, ids[6], 0, 0, 0]
    assert parts[1].following(batch.token_ids).tolist() == [ids[3], ids[4], ids[5], 0, ids[7], 0, 0, 0]


def check_sequences_are_whole_on_context_parallel_ranks_where_that_is_even() -> None:
    from rlframe.megatron.packed.context_parallel import whole_on_ranks
    from rlframe.megatron.packed.inputs import PackedInputs, num_computed

    # Longest first: 6 to rank 0, 5 to rank 1, 3 to rank 1, 2 to rank 0. Of 9 tokens, 5 are more than 1.05 * 4.5.
    assert whole_on_ranks([2, 5, 3, 6], 2) == [[3, 0], [1, 2]]
    assert whole_on_ranks([4, 5], 2) is None and whole_on_ranks([5], 2) is None and whole_on_ranks([], 2) is None
    batch = sequences([2, 5, 3, 6])
    ids = batch.token_ids.split([2, 5, 3, 6])
    parts = [PackedInputs.of(batch, 3, cp_size=2, cp_rank=rank, dynamic=True) for rank in range(2)]
    # 8 tokens a rank are filled to 9.
    assert parts[0].token_ids.tolist() == [[*ids[3].tolist(), *ids[0].tolist(), 0]]
    assert parts[1].token_ids.tolist() == [[*ids[1].tolist(), *ids[2].tolist(), 0]]
    assert parts[0].packing.cu_seqlens_q.tolist() == [0, 6, 8, 9] and parts[0].packing.max_seqlen_q == 6
    assert parts[1].packing.cu_seqlens_q.tolist() == [0, 5, 8, 9] and parts[1].packing.cu_seqlens_q_padded is None
    assert parts[0].rows.tolist() == [6, 7, *range(9, 14), *range(14, 17), *range(6)]
    assert num_computed(batch, 3, 2, dynamic=True) == 18
    following = torch.cat([part.following(batch.token_ids) for part in parts])
    assert following[parts[0].rows[:-1]].tolist() == batch.token_ids[1:].tolist()
    # Whole or not is said of each micro-batch.
    shared = PackedInputs.of(sequences([5, 3]), 4, cp_size=2, cp_rank=0, dynamic=True)
    assert shared.packing.local_cp_size is None and num_computed(sequences([5, 3]), 4, 2, dynamic=True) == 16


def check_two_models_cut_a_micro_batch_into_chunks_of_their_own() -> None:
    from rlframe.megatron.model.layers.core_attention import chunks_of

    of_micro_batch = replace(packing([5, 7]), max_seqlen_q=7, max_seqlen_kv=7)
    # A student and its teacher, which reads the same micro-batch.
    for _ in range(2):
        assert chunks_of(of_micro_batch, 4).cu_seqlens_q.tolist() == [0, 4, 5, 9, 12]
        assert chunks_of(of_micro_batch, 6).cu_seqlens_q.tolist() == [0, 5, 11, 12]


def check_a_query_sees_keys_up_to_its_true_position() -> None:
    from rlframe.megatron.cpu.attention import PackedRows

    (grid,) = PackedRows(torch.tensor([0, 4]), 2, 0).grids
    # Rank 0 of 2 has positions 0 and 3 of 4.
    assert grid.query_rows.tolist() == [[0, 1]] and grid.key_rows.tolist() == [[0, 1, 2, 3]]
    assert grid.visible is not None
    assert grid.visible.int().tolist() == [[[[1, 0, 0, 0], [1, 1, 1, 1]]]]


def check_outputs_stand_at_the_token_they_are_about() -> None:
    from rlframe.megatron.model.forward import policy_output
    from rlframe.megatron.packed.inputs import PackedInputs

    batch = sequences(LENGTHS)
    inputs = PackedInputs.of(batch, NUM_TOKENS + 3)
    logits = torch.randn(1, NUM_TOKENS + 3, 9, generator=torch.Generator().manual_seed(7), requires_grad=True)
    output = policy_output(logits, batch, inputs, temperature=0.5, vocab_size=9)
    start = 0
    for length in LENGTHS:
        table = torch.log_softmax(logits[0, start : start + length].detach() / 0.5, -1)
        predicted = table[:-1].gather(1, batch.token_ids[start + 1 : start + length, None])[:, 0]
        torch.testing.assert_close(output.logprobs[start : start + length].detach(), F.pad(predicted, (1, 0)))
        entropy = -(table.exp() * table).sum(1)[:-1]
        torch.testing.assert_close(output.entropy[start : start + length].detach(), F.pad(entropy, (1, 0)))
        start += length
    assert start == output.logprobs.numel() == output.entropy.numel()
    (output.logprobs.sum() + output.entropy.sum()).backward()
    # The last logits of a sequence predict nothing, nor does the padding.
    silent = torch.ones(NUM_TOKENS + 3).bool()
    silent[:NUM_TOKENS] = False
    silent[torch.cumsum(batch.lengths, 0) - 1] = True
    assert logits.grad is not None
    assert not logits.grad[0, silent].any() and logits.grad[0, ~silent].any(dim=1).all()


def check_a_gpu_is_not_waited_for_between_logits_and_outputs() -> None:
    from rlframe.megatron.model.forward import policy_output
    from rlframe.megatron.model.router_replay import OwnRoutes
    from rlframe.megatron.packed.inputs import PackedInputs

    batch = sequences(LENGTHS)
    routed = replace(batch, routes=torch.zeros(NUM_TOKENS, 2, 1, dtype=torch.int64))
    inputs = PackedInputs.of(batch, NUM_TOKENS + 3)
    logits = torch.randn(1, NUM_TOKENS + 3, 9, generator=torch.Generator().manual_seed(7), requires_grad=True)
    with Waits() as waits:
        output = policy_output(logits, batch, inputs, temperature=0.5, vocab_size=9, renyi_entropy=True)
        (output.logprobs.sum() + output.entropy.sum()).backward()
        assert OwnRoutes.of(routed, inputs) is not None
    assert waits.found == []
    # What such a step did once, for each micro-batch.
    with Waits() as waits:
        torch.ones(3)[torch.tensor([1])] = 0.0
    assert waits.found == ["aten.index_put_.default"]


def check_an_empty_micro_batch_has_empty_outputs_that_differentiate() -> None:
    from rlframe.megatron.model.forward import policy_output
    from rlframe.megatron.packed.inputs import PackedInputs

    logits, nothing = torch.randn(1, 2, 9, requires_grad=True), sequences([])
    output = policy_output(logits, nothing, PackedInputs.of(nothing, 2), temperature=1.0, vocab_size=9)
    assert output.logprobs.shape == output.entropy.shape == (0,)
    output.logprobs.sum().backward()
    assert logits.grad is not None and not logits.grad.any()


def check_reference_weights_change_places_and_come_back() -> None:
    from rlframe.megatron.memory import reference
    from rlframe.megatron.model.model import parameter_buffers

    reference.CHUNK_ELEMENTS = 7
    generator = torch.Generator().manual_seed(8)

    def buffer(size: int, dtype: torch.dtype) -> SimpleNamespace:
        return SimpleNamespace(param_data=torch.randn(size, generator=generator).to(dtype))

    dense, expert = buffer(50, torch.bfloat16), buffer(14, torch.float32)
    model = SimpleNamespace(chunks=[SimpleNamespace(buffers=[dense], expert_parallel_buffers=[expert])])
    live: list[Tensor] = [dense.param_data, expert.param_data]
    start = [tensor.clone() for tensor in live]
    weights = reference.ReferenceWeights(parameter_buffers(model))  # type: ignore[arg-type]
    for step in range(2):
        for tensor in live:
            tensor.mul_(1.37).add_(step)
        live[0][3] = torch.nan
        trained = [tensor.clone() for tensor in live]
        with weights.active():
            assert all(torch.equal(tensor, first) for tensor, first in zip(live, start, strict=True))
        for tensor, mine in zip(live, trained, strict=True):
            torch.testing.assert_close(tensor, mine, atol=0, rtol=0, equal_nan=True)
        with pytest.raises(KeyError), weights.active():
            raise KeyError
        for tensor, mine in zip(live, trained, strict=True):
            torch.testing.assert_close(tensor, mine, atol=0, rtol=0, equal_nan=True)
        live[0][3] = 0


def check_a_following_reference_loses_no_small_change() -> None:
    from rlframe.megatron.memory import reference

    reference.CHUNK_ELEMENTS = 7
    live = torch.full((20,), 1.0, dtype=torch.bfloat16)
    weights = reference.ReferenceWeights([live], follows=True)
    # The next bfloat16 above 1 is 1 + 2^-7: a tenth of that is less than bfloat16 can hold, and seven of them round up.
    live.fill_(1 + 2**-7)
    seen = []
    for _ in range(7):
        weights.follow(0.1)
        with weights.active():
            seen.append(float(live[0]))
    # 1 - 0.9^6 = 0.47 of the way is not yet half, 1 - 0.9^7 = 0.52 is.
    assert seen == [1.0] * 6 + [1 + 2**-7]
    part = weights.exact_of(live[4:16].view(3, 4))
    assert part is not None and part.shape == (3, 4) and part.dtype is torch.float32
    torch.testing.assert_close(part, torch.full((3, 4), 1 + 2**-7 * (1 - 0.9**7)), atol=3e-7, rtol=0)
    assert weights.exact_of(torch.ones(3)) is None
    weights.follow(1.0)
    assert torch.equal(weights.exact[0], live.float())


def check_logits_of_tokens_in_the_loss_alone() -> None:
    from dataclasses import replace

    from rlframe.megatron.packed.inputs import PackedInputs

    batch = replace(sequences([4, 3]), loss_mask=torch.tensor([False, False, True, True, False, False, True]))
    inputs = PackedInputs.of(batch, 4).picking(batch.loss_mask)
    assert inputs.picked is not None and inputs.picked.tolist() == [1, 2, 5]
    assert torch.equal(inputs.targets(batch.token_ids), batch.token_ids[[2, 3, 6]])
    assert inputs.of_all(torch.tensor([5.0, 6.0, 7.0])).tolist() == [0, 5, 6, 0, 0, 7, 0, 0]
    # Two sequences share their first token, of which one counts what follows.
    shared = replace(batch, shared=torch.tensor([0, 2]), loss_mask=torch.tensor([0, 0, 0, 1, 0, 1, 0]).bool())
    inputs = PackedInputs.of(shared, 1).picking(shared.loss_mask)
    assert inputs.picked is not None and inputs.picked.tolist() == [0, 2]
    # One row for each of two ranks stays where the loss counts none, and joins where it counts three.
    nothing = PackedInputs.of(batch, 4).picking(torch.zeros(7, dtype=torch.bool), multiple=2)
    assert nothing.picked is not None and nothing.picked.tolist() == [0, 1]
    even = PackedInputs.of(batch, 4).picking(batch.loss_mask, multiple=2)
    assert even.picked is not None and even.picked.tolist() == [0, 1, 2, 5]
    # All rows are themselves.
    assert PackedInputs.of(batch, 4).picking(batch.loss_mask, multiple=8).picked is None
    # Of two ranks the second has all of them: tokens 1 and 2 of either sequence.
    first, second = (PackedInputs.of(batch, 1, cp_size=2, cp_rank=rank).picking(batch.loss_mask) for rank in range(2))
    assert first.picked is not None and first.picked.tolist() == [0]
    assert torch.equal(second.targets(batch.token_ids), batch.token_ids[[2, 3, 6]])


CHECKS = [
    check_logits_of_tokens_in_the_loss_alone,
    check_a_following_reference_loses_no_small_change,
    check_buckets_hold_sequences_of_like_length,
    check_a_layout_says_where_each_token_sits,
    check_attention_equals_one_sequence_at_a_time,
    check_attention_does_not_depend_on_the_company,
    check_inputs_of_layers_come_back_from_the_host_bit_for_bit,
    check_rotary_positions_equal_megatrons_own,
    check_the_norm_equals_torchs,
    check_inputs_are_padded_by_a_sequence_of_their_own,
    check_context_parallel_ranks_take_an_early_and_a_late_chunk,
    check_inputs_are_padded_and_cut_for_context_parallelism,
    check_a_query_sees_keys_up_to_its_true_position,
    check_two_models_cut_a_micro_batch_into_chunks_of_their_own,
    check_outputs_stand_at_the_token_they_are_about,
    check_a_gpu_is_not_waited_for_between_logits_and_outputs,
    check_an_empty_micro_batch_has_empty_outputs_that_differentiate,
    check_reference_weights_change_places_and_come_back,
]


def run_all(rank: int, init_method: str) -> dict[str, str]:
    """The traceback of each check by name, empty where it holds."""
    from rlframe.megatron.cpu import platform

    platform.install(torch.device("cpu"))
    from rlframe.megatron.config.parallel import Parallel
    from rlframe.megatron.worker import parallel

    parallel.initialize(
        Parallel(), rank=rank, device=torch.device("cpu"), init_method=init_method, seed=0, timeout_s=60
    )
    failures = {}
    for check in CHECKS:
        try:
            check()
            failures[check.__name__] = ""
        except BaseException:
            failures[check.__name__] = traceback.format_exc()
    parallel.shutdown()
    return failures


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """See run_all."""
    return run_distributed(run_all, 1)[0]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_that(check: Callable[[], None], failures: dict[str, str]) -> None:
    assert not failures[check.__name__], failures[check.__name__]
