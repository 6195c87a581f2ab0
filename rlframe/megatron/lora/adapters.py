"""Low-rank adapters inside Megatron's linear modules.

**What is split.** A weight W [out, in] of the checkpoint gets A [r, in] and B [out, r]; y = x W' + s (x A') B', ' being
transposition. A rank of the tensor-parallel group holds some rows of W (column-parallel, Megatron's word) or some
columns (row-parallel), and of the pair the same: the rows of B or the columns of A. The other half is on all ranks
whole. Let t be the rank, T the tokens, and x_s, y_s the slices of tokens that sequence parallelism leaves a rank.
  rows:    u_s = x_s A',  u = all-gather(u_s) over tokens,  y_t += s u B_t'.  r numbers a token travel, not H. Backward
           the gather is a reduce-scatter, which sums du = sum_t dy_t B_t; dB_t is whole, and dA on a rank is that of
           its tokens: dA = sum over the group.
  columns: u_t = x_t A_t' is a part of a sum,  u_s = reduce-scatter(u_t) over tokens,  y_s += s u_s B'.  Backward the
           reduce-scatter is an all-gather, so dA_t is whole, and dB on a rank is that of its tokens: dB = sum over the
           group.
  neither (a module that every rank computes for its own tokens): dA and dB are both sums over the group.
Experts exchange nothing themselves: the dispatcher has gathered the tokens over the expert-tensor group, and sums the
ranks' outputs afterwards. With rows split, dA_t = (dy_t B_t)' x; with columns split, y_t = s (x_t A_t') B' is a part of
the sum, and dB_t = dy' (x_t A_t'). Both are parts: again the whole half's gradient is the sum over its group.
So there is one rule: **the half that is not split has its gradient summed over the tensor-parallel group of its
module** and is counted once in the gradient's norm. For dense modules Megatron does it (`sequence_parallel`), for
experts `sum_over_expert_ranks`.

**Fused weights.** What Megatron keeps in one weight (q, k and v; gate and up) has an A and a B for each matrix of the
checkpoint, because PEFT's files do. One product makes all u, one all of B's contribution, through a B with zeros where
a row belongs to another matrix.

The adapters are children of the linear modules and act through forward hooks, so that no name of the base changes.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rlframe.megatron.config.lora import LoraConfig, in_experts
from rlframe.megatron.config.mtp import in_head
from rlframe.megatron.vocab.frozen_head import multiplied_once
from rlframe.models.adapters import key
from rlframe.weight_sync.layout.boxes import Box, in_one_run
from rlframe.weight_sync.layout.memory import MemoryLayout, Parameter

EXPERT_SUM = "sum_over_expert_tensor_ranks"
"""Attribute of the parameters whose gradients `sum_over_expert_ranks` sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSlice:
    """The part of one matrix of the checkpoint, [out, in], that a Megatron weight holds."""

    tensor: str
    shape: tuple[int, int]
    row: int
    rows: int
    col: int
    cols: int
    weight_rows: Tensor
    """[rows] the row of the Megatron weight that holds each row."""

    @classmethod
    def of(cls, boxes: Sequence[Box], shape: tuple[int, int], width: int) -> "LoraSlice":
        """Returns the recorded boxes of one matrix joined: whole rows of a weight of `width` columns."""
        boxes = sorted(boxes, key=lambda box: box.row)
        first, rows = boxes[0], sum(box.rows for box in boxes)
        assert in_one_run(boxes), f"{first.tensor}: a rank's rows have a gap, which run.check.model refuses"
        weight_rows = []
        for box in boxes:
            assert box.cols == width and box.col == first.col and box.col_stride == 1 and box.offset % width == 0
            step = box.row_stride // width
            weight_rows.append(torch.arange(box.rows) * step + box.offset // width)
        return cls(
            tensor=first.tensor,
            shape=shape,
            row=first.row,
            rows=rows,
            col=first.col,
            cols=width,
            weight_rows=torch.cat(weight_rows),
        )


class Adapter(torch.nn.Module):
    """The adapter s B A of one Megatron weight. See the module's docstring."""

    source: Tensor

    def __init__(self, config: LoraConfig, weight: Tensor, parts: Sequence[LoraSlice], *, expert: bool):
        super().__init__()
        self.parts, self.scaling, self.dropout = tuple(parts), config.scaling, config.dropout
        kind = {"dtype": weight.dtype, "device": weight.device}
        self.a = torch.nn.ParameterList([torch.empty(config.rank, part.cols, **kind) for part in parts])
        self.b = torch.nn.ParameterList([torch.empty(part.rows, config.rank, **kind) for part in parts])
        # Row of the stacked B, or the row of zeros after them, for each row of the weight.
        stacked = torch.cat([part.weight_rows for part in parts])
        source = torch.full((weight.shape[0],), len(stacked))
        source[stacked] = torch.arange(len(stacked))
        self.register_buffer("source", source.to(weight.device), persistent=False)
        self.plain = len(parts) == 1 and torch.equal(source, torch.arange(len(source)))
        self.split_rows = parts[0].rows < parts[0].shape[0]
        self.split_cols = parts[0].cols < parts[0].shape[1]
        self.expert = expert
        self.move = self._movement()
        self._mark()

    def _movement(self) -> Callable[[Tensor], Tensor]:
        if self.expert or parallel_state.get_tensor_model_parallel_world_size() == 1:
            return torch.nn.Identity()
        if self.split_rows:
            return tensor_parallel.gather_from_sequence_parallel_region
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region if self.split_cols else torch.nn.Identity()

    def _mark(self) -> None:
        """Marks for Megatron how the gradients are summed, and which ranks' copies its norm counts."""
        for halves, split, axis in ((self.a, self.split_cols, 1), (self.b, self.split_rows, 0)):
            for half in halves:
                # Of an unmarked parameter the norm counts tensor rank 0 only. Parts of an expert are equal only on
                # other ranks of its expert-tensor group, which `shared` leaves out.
                half.tensor_model_parallel = split or self.expert
                half.partition_dim, half.partition_stride = axis, 1
                if self.expert and not split:
                    half.shared = parallel_state.get_expert_tensor_parallel_rank() > 0
                    setattr(half, EXPERT_SUM, True)
                elif not self.expert:
                    half.sequence_parallel = not split

    def down(self) -> Tensor:
        """Returns [parts * rank, in] the A of all parts."""
        return torch.cat(list(self.a)) if len(self.a) > 1 else self.a[0]

    def up(self) -> Tensor:
        """Returns [out of the weight, parts * rank] the B of all parts, in the rows of the weight, zeros elsewhere."""
        if self.plain:
            return self.b[0]
        return F.pad(torch.block_diag(*self.b), (0, 0, 0, 1))[self.source]

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns [..., out] the adapter's addition to the module's output."""
        inputs = F.dropout(inputs, self.dropout, self.training and self.dropout > 0)
        return F.linear(self.move(F.linear(inputs, self.down())) * self.scaling, self.up())

    def merged(self, weight: Tensor) -> Tensor:
        """Returns [out, in] weight + s B A, computed in float32."""
        return torch.addmm(weight.float(), self.up().float(), self.down().float(), alpha=self.scaling)


@dataclass(kw_only=True, slots=True)
class Lora:
    """The adapters of this rank, and the switch that turns them off."""

    config: LoraConfig
    adapters: dict[str, Adapter]
    """Adapters by the canonical name of their weight."""
    saved: dict[str, torch.nn.Parameter]
    """Parameters that are trained in full, by canonical name."""
    layout: MemoryLayout
    """Layout of the tensors of a PEFT file in `parameters`."""
    enabled: bool = True
    trained: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    """Trained tensors: A and B by PEFT's names, tensors trained in full by canonical names."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The trained tensors as they lie in memory now. Megatron moves parameters into buffers after they are
        created."""
        return {name: parameter.detach() for name, parameter in self.trained.items()}

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Turns the adapters off inside the block. The modules compute as without them, bit for bit."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def seed_dropout(self, *, seed: int, step: int) -> None:
        """Seeds dropout from the run's seed, the optimizer step and the rank, so that a resumed run draws the same
        numbers."""
        if not self.config.dropout:
            return
        text = f"{seed}:{step}:{torch.distributed.get_rank()}"
        value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
        torch.manual_seed(value)
        # Megatron has further generators, which it uses in regions of sequence parallelism.
        tensor_parallel.model_parallel_cuda_manual_seed(value, force_reset_rng=True)


def attach(
    config: LoraConfig, modules: Sequence[GPTModel], named: Mapping[str, torch.nn.Parameter], layout: MemoryLayout
) -> Lora:
    """Freezes the modules and attaches adapters to the weights that `config` names.

    Must be called once for all chunks of a rank, before Megatron's data-parallel wrapper, which creates gradient
    buffers for trained parameters, and before experts are marked.

    Args:
        named: the modules' parameters by canonical name.
        layout: layout of the checkpoint's tensors in the parameters.
    """
    by_parameter: dict[str, dict[str, list[Box]]] = {}
    for tensor, boxes in layout.boxes.items():
        for box in boxes:
            by_parameter.setdefault(box.parameter, {}).setdefault(tensor, []).append(box)
    lora = Lora(config=config, adapters={}, saved={}, layout=MemoryLayout({}, {}, {}))
    for name, parameter in named.items():
        parameter.requires_grad_(False)
        # The head for multi-token prediction stays as loaded: engines add adapters to the model's own layers only.
        tensors = {} if in_head(name) else by_parameter.get(name, {})
        home = _home(name, modules[0])
        if tensors and all(config.saves(tensor, home) for tensor in tensors):
            parameter.requires_grad_(True)
            _save_whole(lora, name, parameter, tensors, layout)
            continue
        chosen = [
            LoraSlice.of(boxes, layout.tensors[tensor], parameter.shape[1])
            for tensor, boxes in tensors.items()
            if config.adapts(tensor, home, dimensions=len(layout.tensors[tensor]))
        ]
        if chosen:
            lora.adapters[name] = Adapter(config, parameter, chosen, expert=in_experts(name))
            _register(lora, lora.adapters[name])
    # The chunks of an interleaved pipeline share one configuration.
    for shared in {id(module.config): module.config for module in modules}.values():
        shared.finalize_model_grads_func = partial(_finalize, shared.finalize_model_grads_func)
    for module in modules:
        _hook(lora, module, {id(named[name]): adapter for name, adapter in lora.adapters.items()})
    return lora


def _home(name: str, module: GPTModel) -> str:
    """Returns the name by which settings know a parameter. The last stage's copy of a tied embedding is the embedding,
    so that both are trained or neither is: Megatron sums their gradients."""
    tied = module.share_embeddings_and_output_weights and name.endswith("output_layer.weight")
    return "embedding.word_embeddings.weight" if tied else name


def _save_whole(
    lora: Lora, name: str, parameter: torch.nn.Parameter, tensors: Mapping[str, list[Box]], layout: MemoryLayout
) -> None:
    lora.saved[name] = lora.trained[name] = parameter
    lora.layout.parameters[name] = layout.parameters[name]
    for tensor, boxes in tensors.items():
        lora.layout.tensors[key(tensor)] = layout.tensors[tensor]
        known = lora.layout.boxes.get(key(tensor), ())
        lora.layout.boxes[key(tensor)] = (*known, *boxes)


def _register(lora: Lora, adapter: Adapter) -> None:
    rank = lora.config.rank
    for part, a, b in zip(adapter.parts, adapter.a, adapter.b, strict=True):
        halves = (
            (key(part.tensor, "lora_A"), a, (rank, part.shape[1]), (0, rank, part.col, part.cols)),
            (key(part.tensor, "lora_B"), b, (part.shape[0], rank), (part.row, part.rows, 0, rank)),
        )
        for name, half, whole, region in halves:
            lora.trained[name] = half
            lora.layout.tensors[name] = whole
            lora.layout.parameters[name] = Parameter(tuple(half.shape), half.dtype)
            lora.layout.boxes[name] = (Box(name, *region, name, 0, half.shape[1], 1),)


def _hook(lora: Lora, module: GPTModel, adapters: Mapping[int, Adapter]) -> None:
    """Makes each linear module with an adapter add its output. Grouped experts have one adapter per expert."""
    for linear in list(module.modules()):
        own = [adapters.get(id(parameter)) for name, parameter in linear._parameters.items() if "weight" in name]
        found = [adapter for adapter in own if adapter is not None]
        if not found:
            continue
        linear.lora = torch.nn.ModuleList(found)
        if hasattr(linear, "num_gemms"):
            experts = [adapters.get(id(getattr(linear, f"weight{index}"))) for index in range(linear.num_gemms)]
            linear.register_forward_hook(partial(_add_grouped, lora, experts))
            continue
        (adapter,) = found
        if hasattr(linear, "return_layernorm_output"):
            # Transformer Engine's fused norm and linear: the adapter's input is the norm's output. Not the gathered
            # one, of which every rank would compute the same u.
            linear.return_layernorm_output, linear.return_layernorm_output_gathered = True, False
        linear.register_forward_hook(partial(_add, lora, adapter))
    if module.pre_process:
        # Nothing before the first adapter is trained. Code that recomputes a layer's activations, or sends them to the
        # next stage, depends on whether its input requires a gradient.
        module.embedding.register_forward_hook(_want_gradient)
    if module.post_process:
        module.output_layer.register_forward_hook(_multiply_once)


def _multiply_once(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    logits, bias = output
    return multiplied_once(logits), bias


def _want_gradient(_: Any, __: Any, output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and output.is_leaf else output


def _add(lora: Lora, adapter: Adapter, _: Any, inputs: tuple[Any, ...], output: Any) -> tuple[Tensor, Any]:
    """Returns (output, bias) with the adapter's part, of a module that returns them. Other modules also return the
    normalised input, as (output, bias, normalised), or as ((output, normalised), bias) if Megatron's wrapper filled in
    the bias."""
    value, bias, *rest = output
    if isinstance(value, tuple):
        value, *rest = value
    if not lora.enabled:
        return value, bias
    return value + adapter(rest[0] if rest else inputs[0]), bias


def _add_grouped(
    lora: Lora, experts: Sequence[Adapter | None], _: Any, inputs: tuple[Any, ...], output: Any
) -> tuple[Tensor, Any]:
    """Returns (output, bias) of a grouped linear module, whose inputs are tokens in order of their expert, and the
    number of each."""
    value, bias = output
    if not lora.enabled:
        return value, bias
    tokens, counts = inputs[:2]
    added = [
        adapter(rows) if adapter is not None else rows.new_zeros(len(rows), value.shape[-1])
        for adapter, rows in zip(experts, tokens.split([int(count) for count in counts]), strict=True)
    ]
    return value + torch.cat(added), bias


def _finalize(finalize: Callable[..., None], model: list[torch.nn.Module], *arguments: Any, **groups: Any) -> None:
    """Runs `finalize` after the last backward pass, and then the sum that Megatron does not know of."""
    finalize(model, *arguments, **groups)
    sum_over_expert_ranks(model)


def sum_over_expert_ranks(modules: Sequence[torch.nn.Module]) -> None:
    """Sums over the expert-tensor group the gradients of the unsplit halves of experts' adapters."""
    group = parallel_state.get_expert_tensor_parallel_group()
    if group.size() == 1:
        return
    gradients = [
        parameter.main_grad
        for module in modules
        for parameter in module.parameters()
        if parameter.requires_grad and getattr(parameter, EXPERT_SUM, False)
    ]
    if gradients:
        flat = torch._utils._flatten_dense_tensors(gradients)
        torch.distributed.all_reduce(flat, group=group)
        for gradient, summed in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(summed)
