"""Steps that decode the requests of the step before, prepared from that step, for model runner V2.

In every step vLLM (0.26) sorts the requests, uploads which slots they have and where their tokens begin, gathers their
page tables, and makes the metadata of attention. While requests run on, nothing of it changes but their lengths, and
the tables where a page begins. A step of 64 requests that waited for its host took 3.7 ms in place of 4.2 (H200,
2026-11-29, by hand). This file can go when `prepare_inputs`, `prepare_attn` and the metadata take less than 0.4 ms.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlframe.rollout.vllm.decode.ahead import asked

RELEASE = "0.26."
"""Releases of vLLM whose runner has these parts. Others were not read."""


def install(runner: Any) -> None:
    """Makes vLLM's `runner` prepare such steps from those before. Runners that have other parts in a step are left as
    they are."""
    if Steady.knows(runner):
        Steady(runner).install()


class Steady:
    """The step before, as far as the next one is made from it."""

    def __init__(self, runner: Any):
        """
        Args:
            runner: one that `knows` returns True for.
        """
        self._runner = runner
        self._prepare_inputs, self._prepare_attn = runner.prepare_inputs, runner.prepare_attn
        self._execute, self._make_metadata = runner.execute_model, runner.model_state.prepare_attn
        self._batch: Any = None
        """InputBatch of the step. None if the next one cannot be made from it."""
        self._shape: Any = None
        self._counts: dict[str, int] = {}
        self._pointers: Any = None
        """Addresses of the page tables. vLLM makes them anew when it wakes up."""
        self._metadata: Any = None
        """Metadata of attention of the step that vLLM prepared last, if every layer has a plan in it."""
        self._repeats = self._turns_page = False
        """Whether the present step is made from the one before, and whether a page begins in it."""

    @staticmethod
    def knows(runner: Any) -> bool:
        """Returns whether a step of the runner decodes one token of each request, on a GPU that has all of them, and
        the configuration does not leave steps to vLLM."""
        import vllm

        return (
            vllm.__version__.startswith(RELEASE)
            and asked(runner.vllm_config) > 0
            and hasattr(runner, "req_states")
            and runner.num_speculative_steps == 0
            and not (runner.use_dcp or runner.use_pp or runner.pcp_manager)
            and runner.model_config.rswa_window is None
        )

    def install(self) -> None:
        """Takes the place of the runner's methods."""
        runner = self._runner
        runner.prepare_inputs, runner.prepare_attn = self.prepare_inputs, self.prepare_attn
        runner.execute_model, runner.model_state.prepare_attn = self.execute_model, self.make_metadata

    def execute_model(self, *arguments: Any, **options: Any) -> Any:
        """See GPUModelRunner. Runs without requests write to the same buffers."""
        if options.get("dummy_run"):
            self._batch = None
        return self._execute(*arguments, **options)

    def prepare_inputs(self, output: Any, shape: Any) -> Any:
        """See GPUModelRunner.

        Args:
            output: vLLM's SchedulerOutput.
            shape: BatchExecutionDescriptor of the step.
        """
        self._repeats = self._is_next(output, shape)
        if self._repeats:
            self._turns_page = any(new is not None for new in output.scheduled_cached_reqs.new_block_ids)
            self._batch = self._moved(self._batch)
            return self._batch
        batch = self._prepare_inputs(output, shape)
        decodes = batch.num_tokens == batch.num_reqs and not batch.is_prefilling_np.any()
        self._batch, self._shape, self._counts = batch if decodes else None, shape, output.num_scheduled_tokens
        self._pointers, self._metadata = self._runner.block_tables.block_table_ptrs, None
        return batch

    def _is_next(self, output: Any, shape: Any) -> bool:
        return bool(
            self._batch is not None
            and shape == self._shape
            and self._pointers is self._runner.block_tables.block_table_ptrs
            and not output.scheduled_new_reqs
            and not output.finished_req_ids
            and not output.preempted_req_ids
            and not output.scheduled_spec_decode_tokens
            and not output.has_structured_output_requests
            and output.num_scheduled_tokens == self._counts
        )

    def _moved(self, last: Any) -> Any:
        """Returns the batch with the lengths of now, in the buffers of the runner too."""
        from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens

        buffers, states = self._runner.input_buffers, self._runner.req_states
        prepare_pos_seq_lens(
            last.idx_mapping,
            last.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        rows = combine_sampled_and_draft_tokens(
            buffers.input_ids,
            last.idx_mapping,
            states.last_sampled_tokens,
            last.query_start_loc,
            last.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            last.cu_num_logits,
            last.num_reqs,
            1,
        )
        computed = states.num_computed_tokens_np[last.idx_mapping_np]
        lengths = np.zeros(last.num_reqs_after_padding, dtype=np.int32)
        lengths[: last.num_reqs] = computed + 1
        return replace(
            last,
            num_computed_tokens_np=computed,
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
            logits_indices=rows,
        )

    def prepare_attn(self, batch: Any) -> Any:
        """See GPUModelRunner."""
        if not (self._repeats and batch is self._batch):
            return self._prepare_attn(batch)
        tables, count = self._runner.block_tables, batch.num_reqs_after_padding
        if self._turns_page:
            gathered = tables.gather_block_tables(batch.idx_mapping, num_reqs_padded=count)
        else:
            gathered = tuple(each[:count] for each in tables.input_block_tables)
        slots = tables.compute_slot_mappings(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            num_tokens_padded=batch.num_tokens_after_padding,
        )
        return gathered, slots

    def make_metadata(
        self, batch: Any, mode: Any, tables: Any, slots: Any, groups: Any, *rest: Any, **options: Any
    ) -> Any:
        """See DefaultModelState. A CUDA graph of the whole model reads nothing of it but the plans."""
        from vllm.config import CUDAGraphMode

        from rlframe.rollout.vllm.attention.backend import plan_of

        if batch is not self._batch:
            # A step with prompts, or a run without requests, which writes to the same buffers.
            self._batch = None
            return self._make_metadata(batch, mode, tables, slots, groups, *rest, **options)
        if self._repeats and self._metadata is not None:
            lengths = batch.seq_lens[: batch.num_reqs_after_padding]
            for table, group in zip(tables, groups, strict=True):
                for each in group:
                    plan = plan_of(each.get_metadata_builder(0))
                    assert plan is not None, "all have one"
                    plan.fill(table, lengths, regroup=False)
            return self._metadata
        made = self._make_metadata(batch, mode, tables, slots, groups, *rest, **options)
        builders = [each.get_metadata_builder(0) for group in groups for each in group]
        planned = mode is CUDAGraphMode.FULL and all(plan_of(each, made) for each in builders)
        self._metadata = made if planned else None
        return made
