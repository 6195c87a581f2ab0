"""Attention to shared prompts in a call of its own, by kernels that are written as they are defined; a GPU's are tested
in tests/gpu/test_shared_prompts_cuda.py."""

import copy
import pickle
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlframe.megatron.cpu import attention
from rlframe.megatron.cpu.attention import PackedAttention
from rlframe.megatron.packed import shared_prompts, split_attention, split_bounds
from rlframe.megatron.packed.fused_kernels import FusedKernels, is_plain
from rlframe.megatron.packed.inputs import PackedInputs
from rlframe.megatron.packed.shared_prompts import packing_on
from rlframe.megatron.packed.split_attention import SplitAttention, added
from rlframe.types.batch import Sequences
from tests.unit.megatron.packed.plain_kernels import PlainKernels, apart

LENGTHS, SHARED = [9, 7, 10, 3, 12, 11], [0, 6, 6, 0, 0, 10]
"""Three sequences with a prompt of 6 tokens, one by itself, and two with a prompt of 10."""
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def packed(lengths: list[int] = LENGTHS, shared: list[int] = SHARED, multiple: int = 8) -> PackedInputs:
    total = sum(lengths)
    batch = Sequences(
        token_ids=torch.arange(total),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        loss_mask=torch.ones(total, dtype=torch.bool),
        shared=torch.tensor(shared, dtype=torch.int64),
    )
    return PackedInputs.of(batch, multiple)


def sharing(lengths: list[int] = LENGTHS, shared: list[int] = SHARED, multiple: int = 8) -> Any:
    return packed(lengths, shared, multiple).packing.shared_prompts


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys are split too."""
    monkeypatch.setattr(split_bounds, "KEYS_PER_ROW", 0)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank shares a sequence, in a process that is no rank."""
    monkeypatch.setattr(attention, "sharing", lambda packing: None)


def tensors(rows: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Query, key and value, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(rows, heads, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    return [each.requires_grad_() for each in (query, key, value)], grad


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-6)], ids=str)
def test_output_and_gradients_are_those_of_each_sequence_computed_apart(dtype: torch.dtype, error: float) -> None:
    shared = sharing()
    rows = len(shared.positions)
    assert rows == 32 and shared.bounds.cu_seqlens_q[-2] == 30, "padding is one more sequence"
    found, expected = [], []
    for results in (found, expected):
        inputs, grad = tensors(rows, dtype)
        if results is found:
            output = SplitAttention.apply(*inputs, shared.split, PlainKernels(WIDTH**-0.5))
        else:
            output = apart(*inputs, shared)
        results += [output.detach(), *torch.autograd.grad(output, inputs, grad)]
    for mine, right in zip(found, expected, strict=True):
        assert not mine.isnan().any()
        assert (mine - right).norm() < error * right.norm()


def test_each_call_has_the_rows_of_its_sequences() -> None:
    # Rows 0..8, 9, 10..13 of the first group, 14..16, 17..28 and 29 of the second, and two of padding: 54 keys of 32.
    split = split_bounds.Split.of(torch.tensor([0, 9, 10, 14, 17, 29, 30, 32]).int(), torch.tensor(SHARED), 64)
    assert split is not None
    own, prompts = split.own, split.prompts
    assert own.queries.tolist() == own.first_keys.tolist() == [0, 9, 10, 14, 17, 29, 30, 32]
    assert own.causal and (own.most_queries, own.most_keys) == (12, 12)
    assert prompts.queries.tolist() == [0, 5, 6] and prompts.first_queries.tolist() == [9, 29, 32]
    assert prompts.keys.tolist() == [0, 6, 16] and prompts.first_keys.tolist() == [0, 17, 32]
    assert not prompts.causal and (prompts.most_queries, prompts.most_keys) == (5, 10)
    assert split.reads.nonzero().flatten().tolist() == [9, 10, 11, 12, 13, 29]
    assert split.is_read.nonzero().flatten().tolist() == [*range(6), *range(17, 27)]
    integers = [each for call in (own, prompts) for each in (call.queries, call.keys, call.first_queries)]
    assert all(each.dtype == torch.int32 for each in integers)


def test_prompts_are_split_off_where_they_are_most_of_what_attention_reads() -> None:
    # 1 + 4 rows of 10 + 10 keys a sequence more: 14 rows and 44 keys, then 20 rows and 32 keys.
    assert sharing([11, 11, 11, 11], [0, 10, 10, 10], 1).split is not None
    assert sharing([14, 9, 9], [0, 6, 6], 1).split is None
    # Padding is computed too: 14 of 32 rows.
    assert sharing([11, 11, 11, 11], [0, 10, 10, 10], 32).split is None


@pytest.mark.usefixtures("always")
def test_packs_that_two_calls_cannot_compute_are_not_split() -> None:
    assert sharing([11, 11, 11], [0, 10, 10]).split is not None
    assert sharing([11, 11, 11], [0, 10, 9]).split is None, "two prompts of one group"
    assert sharing([11, 11, 11], [0, 0, 0]).split is None, "no prompt"
    assert sharing([], []).split is None, "nothing but padding"


@pytest.mark.usefixtures("always")
def test_all_of_a_split_moves_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shared_prompts, split_bounds):
        monkeypatch.setattr(module, "upload", lambda value, device: value.to(device))
    here = packed().packing
    split, there = here.shared_prompts.split, packing_on(here, torch.device("meta")).shared_prompts.split
    moved = {name: getattr(there, name) for name in ("reads", "is_read")}
    for call in ("own", "prompts"):
        for known in fields(split_bounds.Call):
            value = getattr(getattr(there, call), known.name)
            if isinstance(value, Tensor):
                moved[f"{call}.{known.name}"] = value
            else:
                assert value == getattr(getattr(split, call), known.name)
    assert len(moved) == 10 and all(each.is_meta for each in moved.values())
    assert there.own.queries is there.own.keys
    assert packing_on(packed([9, 9], [0, 0]).packing, torch.device("meta")).shared_prompts.split is None


def test_gradients_are_added_in_float32_and_rounded_once() -> None:
    values, others = torch.tensor([[1.0, 256.0], [1.0, 1.0]]), torch.tensor([[2.0**-8, 1.0], [torch.nan, 1.0]])
    rows = torch.tensor([True, False])
    sums = added(values.bfloat16(), others.bfloat16(), rows)
    assert sums.dtype == torch.bfloat16 and sums.tolist() == [[1.0, 256.0], [1.0, 1.0]]
    assert added(values, others, rows).tolist() == [[1.0 + 2.0**-8, 257.0], [1.0, 1.0]]


def model(kernels: PlainKernels | None) -> Any:
    """As much of a model as `prepare` looks at, on the CPU's core attention."""
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=KEY_HEADS
    )
    core = PackedAttention(config, 1, None)
    layer, decoder = torch.nn.Module(), torch.nn.Module()
    layer.self_attention = torch.nn.Module()
    layer.self_attention.core_attention = core
    decoder.layers = torch.nn.ModuleList([layer])
    shared_prompts.prepare(SimpleNamespace(decoder=decoder))
    split_attention.install(core, kernels)
    return core


def attended(core: Any, packing: Any) -> list[Tensor]:
    """Output and gradients of core attention as a layer calls it, with values that are a part of a larger tensor."""
    (query, key, value), grad = tensors(32, torch.float64)
    wide = torch.cat([value, value], -1).detach()[..., :WIDTH].requires_grad_()
    output = core(query, key, wide, None, attn_mask_type=None, attention_bias=None, packed_seq_params=packing)
    return [output.detach(), *torch.autograd.grad(output, (query, key, wide), grad.flatten(1))]


@pytest.mark.usefixtures("always", "alone")
def test_core_attention_gives_the_same_whether_it_splits_or_not() -> None:
    kernels, packing = PlainKernels(WIDTH**-0.5), packed().packing
    split, whole = attended(model(kernels), packing), attended(model(None), packing)
    assert [call.causal for call in kernels.calls] == [True, False]
    for mine, right in zip(split, whole, strict=True):
        # Gradients of gathered keys are added up in float32.
        torch.testing.assert_close(mine, right, atol=1e-6, rtol=1e-6)


@pytest.mark.usefixtures("always", "alone")
def test_other_packs_and_kernels_that_do_not_take_queries_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = PlainKernels(WIDTH**-0.5)
    core, whole, packing = model(kernels), model(None), packed().packing
    no_prompt, two_prompts = packed([9, 9, 14], [0, 0, 0]).packing, packed([11, 12, 12], [0, 10, 9], 32).packing
    for pack in (no_prompt, no_prompt.shared_prompts.bounds, two_prompts):
        assert all(map(torch.equal, attended(core, pack), attended(whole, pack)))
    monkeypatch.setattr(kernels, "takes", lambda query: False)
    assert all(map(torch.equal, attended(core, packing), attended(whole, packing)))
    assert not kernels.calls


def test_the_module_is_copied_and_pickled_as_before() -> None:
    core = model(PlainKernels(1.0))
    for twin in (copy.deepcopy(core), pickle.loads(pickle.dumps(core))):
        assert twin.forward.core is twin and type(twin) is PackedAttention
    assert not core.state_dict() and not list(core.children())


PLAIN = {
    "hidden_size_per_attention_head_k": 128,
    "hidden_size_per_attention_head_v": 128,
    "window_size": (-1, 0),
    "softmax_type": "vanilla",
    "attention_dropout": 0.0,
    "cp_group": None,
    "num_splits": None,
    "deterministic": False,
    "return_max_logit": False,
    "softcap": 0.0,
}
"""What Transformer Engine's module says of a plain attention."""
OTHERS = {
    "hidden_size_per_attention_head_k": 64,
    "window_size": (127, 0),
    "softmax_type": "learnable",
    "attention_dropout": 0.1,
    "cp_group": "ranks",
    "num_splits": 1,
    "deterministic": True,
    "return_max_logit": True,
    "softcap": 30.0,
}


def test_attention_that_is_more_than_a_softmax_over_all_keys_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    assert is_plain(SimpleNamespace(**PLAIN))
    for name, value in OTHERS.items():
        assert not is_plain(SimpleNamespace(**PLAIN | {name: value})), name
    wide = {"hidden_size_per_attention_head_k": 256, "hidden_size_per_attention_head_v": 256}
    assert not is_plain(SimpleNamespace(**PLAIN | wide))
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert not is_plain(SimpleNamespace(**PLAIN))


def test_without_transformer_engine_there_are_no_kernels() -> None:
    assert FusedKernels.of(torch.nn.Module()) is None
    assert not FusedKernels(1.0).takes(torch.zeros(1))
