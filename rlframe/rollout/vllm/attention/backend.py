"""vLLM's FlashAttention, whose decode steps read the tokens that sequences share once.

The prefix cache already holds a prompt once for all its responses, but FlashAttention reads it for each of them: of 256
responses of 500 tokens to prompts of 170 a third of all keys and values, of a prompt of 4,096 nearly all. vLLM's own
remedy, cascade attention, needs one prefix of all sequences of a step. This file can go when vLLM's decode steps share
the prefixes of some.
"""

from typing import Any

import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rlframe.rollout.vllm.attention.kernels import attend, keep
from rlframe.rollout.vllm.attention.plan import Plan

PLAN = "rlframe_plan"
"""Attribute of a step's metadata that holds its `Plan`, if the step decodes one token of each sequence."""
MOST_KEPT = 512
"""Rows from which on vLLM's kernel writes keys and values."""
SIZES = (64, 128, 256)
"""Dimensions of heads that the kernels take."""


class SharedPromptBuilder(FlashAttentionMetadataBuilder):
    """Makes the metadata of a step, with a plan if it decodes."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._plan = self._new_plan() if self._is_plain() else None

    def _is_plain(self) -> bool:
        """Returns whether the group's layers attend to all tokens, whose keys and values are as computed, and no CUDA
        graph is for steps that decode and steps that do not: it holds the kernels of one of them."""
        spec = self.kv_cache_spec
        windows = (getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size"))
        return (
            type(spec) is FullAttentionSpec
            and not any(windows)
            and spec.dtype in (torch.bfloat16, torch.float16)
            and self.headdim in SIZES
            and self.dcp_world_size == 1
            and getattr(self, "rswa_window", None) is None
            and not envs.VLLM_BATCH_INVARIANT
            and self.vllm_config.speculative_config is None
            and self.compilation_config.cudagraph_mode.mixed_mode() is not CUDAGraphMode.FULL
        )

    def _new_plan(self) -> Plan:
        return Plan.of(
            max_rows=max(self.vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0),
            page=self.block_size,
            heads=self.num_heads_kv,
            query_heads=self.num_heads_q,
            width=self.headdim,
            processors=torch.cuda.get_device_properties(self.device).multi_processor_count,
            device=self.device,
        )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """See AttentionMetadataBuilder."""
        plan, common = self._plan, common_attn_metadata
        plans = plan is not None and common.max_query_len == 1 and common.causal is True
        if plan is None or not plans or getattr(common, "mm_req_doc_ranges", None) is not None:
            return super().build(common_prefix_len, common, fast_build)
        # Without the schedule of FlashAttention, which would not be used.
        metadata = super().build(0, common, fast_build=True)
        plan.fill(common.block_table_tensor, common.seq_lens)
        setattr(metadata, PLAN, plan)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: Any, slot_mapping: Any) -> Any:
        """See AttentionMetadataBuilder: the same step with the pages of other layers."""
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        if getattr(metadata, PLAN, None) is not None:
            assert self._plan is not None, "vLLM shares metadata between groups of one kind only"
            self._plan.fill(blk_table, metadata.seq_lens)
            setattr(updated, PLAN, self._plan)
        return updated


def plan_of(builder: Any, metadata: dict[str, Any] | None = None) -> Plan | None:
    """Returns the plan of a builder. None if it has none.

    Args:
        metadata: by layer. The plan must be in that of each of the builder's layers, unless it is None.
    """
    plan = builder._plan if isinstance(builder, SharedPromptBuilder) else None
    if plan is None or metadata is None:
        return plan
    return plan if all(getattr(metadata[name], PLAN, None) is plan for name in builder.layer_names) else None


class SharedPromptImpl(FlashAttentionImpl):
    """Attends by the plan of a step, or as FlashAttention does if there is none."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._is_plain = (
            self.head_size in SIZES
            and self.alibi_slopes is None
            and self.sinks is None
            and tuple(self.sliding_window) == (-1, -1)
            and not self.logits_soft_cap
            and self.attn_type == AttentionType.DECODER
        )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See FlashAttentionImpl. Few rows are written by a kernel that begins before the one ahead has ended."""
        plain = self._is_plain and key.dtype == kv_cache.dtype and kv_cache.shape[-1] == 2 * self.head_size
        if not plain or len(slot_mapping) > MOST_KEPT:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        keep(key, value, keys, values, slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See FlashAttentionImpl."""
        plan: Plan | None = getattr(attn_metadata, PLAN, None)
        if plan is None or not self._is_plain or output_scale is not None or output_block_scale is not None:
            quantized = (output_scale, output_block_scale)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *quantized)
        assert kv_cache.shape[-1] == 2 * self.head_size, "vLLM 0.26 to 0.32 keep values beside keys"
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        count = attn_metadata.num_actual_tokens
        tables = attn_metadata.block_table
        attend(plan, query[:count], keys, values, tables, scale=self.scale, out=output[:count])
        return output


class SharedPromptBackend(FlashAttentionBackend):
    """FlashAttention with the classes above."""

    @staticmethod
    def get_impl_cls() -> Any:
        """See AttentionBackend."""
        return SharedPromptImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """See AttentionBackend."""
        return SharedPromptBuilder


def register() -> None:
    """Makes this process use SharedPromptBackend wherever vLLM chooses FlashAttention."""
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{SharedPromptBackend.__name__}")
    # vLLM remembers the class of a choice that it has made.
    _cached_get_attn_backend.cache_clear()
