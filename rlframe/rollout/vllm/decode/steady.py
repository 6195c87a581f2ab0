"""Steps that decode the requests of the step before, prepared from that step, for model runner V2.

In every step vLLM (0.26) sorts the requests, uploads which slots they have and where their tokens begin, gathers their
page tables, and makes the metadata of attention. While requests run on, nothing of it changes but their lengths, and
the tables where a page begins. A step of 64 requests that waited for its host took 3.7 ms in place of 4.2 (H200,
2026-11-29, by hand). What is left of such steps around the model is captured where they are short (`graphs`). This file
can go when `prepare_inputs`, `prepare_attn`, the metadata and `sample` take less than 0.4 ms.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlframe.rollout.vllm.decode.ahead import asked
from rlframe.rollout.vllm.decode.graphs import Graphs

RELEASE = "0.26."
"""Releases of vLLM whose runner has these parts. Others were not read."""
MOST_CAPTURED = 16
"""Most requests of a step whose kernels are captured. Steps of more requests compute for longer than the host needs."""
LEAST_REPEATS = 8
"""Repeats after which kernels are captured: captures themselves take the host's time, which has not been measured."""


def install(runner: Any) -> None:
    """Makes vLLM's `runner` prepare such steps from those before. Runners that have other parts in a step are left as
    they are."""
    if Steady.knows(runner):
        Steady(runner, Graphs() if captures(runner) else None).install()


def captures(runner: Any) -> bool:
    """Returns whether what a runner launches around the model in a step can be captured: on one GPU, with rlframe's
    sampler."""
    config = runner.vllm_config
    alone = config.parallel_config.world_size == 1 and config.lora_config is None
    return alone and runner.device.type == "cuda" and hasattr(runner.sampler, "one_pass")


class Steady:
    """The step before, as far as the next one is made from it."""

    def __init__(self, runner: Any, graphs: Graphs | None = None):
        """
        Args:
            runner: one that `knows` returns True for.
            graphs: None if nothing is captured.
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
        self._graphs, self._times = graphs, 0
        self._plans: list[Any] = []
        """Plans of attention, which are filled with the metadata."""
        self._begin: Callable[[], Any] | None = None
        """Launches what the present step does before the model, once that is captured, and returns the rows of logits
        and the slots."""
        self._slots: Any = None
        """Slots of the present step, if it was launched so."""
        self._ends: dict[tuple[bool, bool], Callable[[], Any]] = {}
        """Launch what a step does after the model, and return tokens and logprobs: with tokens that are forbidden, with
        temperatures that divide."""
        self._drawn: set[tuple[bool, bool]] = set()
        """Choices with which a step was sampled that could have been captured."""
        self._ended: Any = None
        """Launches that were captured for the requests before these."""
        self._is_updated = False
        """Whether the state of the requests has followed the present step already."""

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
        if self._graphs is not None:
            self._sample, self._update = runner.sample, runner.postprocess_sampled
            runner.sample, runner.postprocess_sampled = self.sample, self.postprocess_sampled

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
            self._times += 1
            if self._graphs is not None and self._begin is None and self._may_capture():
                self._begin = self._graphs.capture(self._place)
            rows, self._slots = (self._rows_of(self._batch), None) if self._begin is None else self._begin()
            self._batch = self._moved(self._batch, rows)
            return self._batch
        batch = self._prepare_inputs(output, shape)
        decodes = batch.num_tokens == batch.num_reqs and not batch.is_prefilling_np.any()
        self._batch, self._shape, self._counts = batch if decodes else None, shape, output.num_scheduled_tokens
        self._pointers, self._metadata = self._runner.block_tables.block_table_ptrs, None
        if self._begin is not None:
            # The device may be at one of the last steps still. Those after the next capture are launched later.
            self._ended = self._begin, self._ends
        self._times, self._begin, self._ends = 0, None, {}
        return batch

    def _may_capture(self) -> bool:
        return bool(
            self._metadata is not None and self._times >= LEAST_REPEATS and self._batch.num_reqs <= MOST_CAPTURED
        )

    def _place(self) -> tuple[Any, Any]:
        """Does all that a step that repeats does before the model, but for pages that begin. Returns the rows of logits
        and the slots."""
        batch = self._batch
        rows, slots = self._rows_of(batch), self._slots_of(batch)
        for plan in self._plans:
            plan.fill(None, batch.seq_lens[: batch.num_reqs_after_padding], regroup=False)
        return rows, slots

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

    def _rows_of(self, last: Any) -> Any:
        """Moves lengths, positions and tokens in the buffers of the runner, and returns the rows of logits."""
        from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens

        buffers, states = self._runner.input_buffers, self._runner.req_states
        prepare_pos_seq_lens(
            last.idx_mapping,
            last.query_start_loc,
            states.num_computed_tokens.gpu,
            buffers.positions,
            buffers.seq_lens,
        )
        return combine_sampled_and_draft_tokens(
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

    def _slots_of(self, batch: Any) -> Any:
        return self._runner.block_tables.compute_slot_mappings(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            num_tokens_padded=batch.num_tokens_after_padding,
        )

    def _moved(self, last: Any, rows: Any) -> Any:
        """Returns the batch with the lengths of now."""
        computed = self._runner.req_states.num_computed_tokens_np[last.idx_mapping_np]
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
        return gathered, self._slots_of(batch) if self._slots is None else self._slots

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
            if self._begin is None:
                lengths = batch.seq_lens[: batch.num_reqs_after_padding]
                for plan in self._plans:
                    plan.fill(None, lengths, regroup=False)
            return self._metadata
        made = self._make_metadata(batch, mode, tables, slots, groups, *rest, **options)
        builders = [each.get_metadata_builder(0) for group in groups for each in group]
        planned = mode is CUDAGraphMode.FULL and all(plan_of(each, made) for each in builders)
        self._metadata, self._plans = (made, [plan_of(each) for each in builders]) if planned else (None, [])
        return made

    def sample(self, hidden: Any, batch: Any, grammar: Any) -> Any:
        """See GPUModelRunner."""
        sampler = self._runner.sampler
        captured = self._begin is not None and self._repeats and batch is self._batch and grammar is None
        if not captured or not sampler.plain[batch.idx_mapping_np].all():
            return self._sample(hidden, batch, grammar)
        stops, divides = choice = sampler.one_pass.choice(batch)
        key = (stops is not None, divides)
        if key not in self._drawn:
            # Kernels that are launched for the first time are compiled, which a capture does not allow.
            self._drawn.add(key)
            return self._sample(hidden, batch, grammar)
        if key not in self._ends:
            assert self._graphs is not None, "they have captured the beginning"
            self._ends[key] = self._graphs.capture(lambda: self._draw(hidden, batch, choice))
        # The next step writes to the same tensors before the host has read these.
        result = sampler.recorded(batch, *(each.clone() for each in self._ends[key]()))
        self._is_updated = True
        return result, result.num_sampled, result.num_rejected

    def _draw(self, hidden: Any, batch: Any, choice: tuple[Any, bool]) -> tuple[Any, Any]:
        """Does all that a step does after the model. Returns tokens and logprobs."""
        one_pass = self._runner.sampler.one_pass
        logits = self._runner.model.compute_logits(hidden[batch.logits_indices])
        tokens, logprobs = one_pass.choose(logits, batch, choice)
        output = one_pass.output(batch, tokens)
        counts = output.num_sampled, output.num_rejected
        self._update(batch.idx_mapping, output.sampled_token_ids, *counts, batch.query_start_loc)
        return tokens, logprobs

    def postprocess_sampled(self, *arguments: Any, **options: Any) -> None:
        """See GPUModelRunner."""
        if not self._is_updated:
            self._update(*arguments, **options)
        self._is_updated = False
