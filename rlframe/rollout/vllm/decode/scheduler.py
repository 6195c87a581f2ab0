"""vLLM's scheduler, which does less in steps that only decode.

In every step vLLM (0.26 to 0.32) decides on each sequence anew, and asks its cache manager for a slot for it: the
manager counts the blocks that are needed, frees those outside of windows, and looks for full blocks to remember. In
most steps nothing changes but the positions: with 256 sequences `schedule` takes 2.3 ms and more, and a GPU waits for
it if the model is small.

  * `shorten`: the manager answers at once that a token in the midst of a block needs no new one. Can go when vLLM's
    `KVCacheManager.allocate_slots` itself returns at once for a token in a block that the request has.
  * `Repeated`: a step that decodes the sequences of the step before is that step with other positions, and full blocks
    are looked for at their ends alone. Can go when `schedule` takes less than 1 ms for 256 sequences.
"""

from copy import copy
from dataclasses import replace
from typing import Any

from rlframe.rollout.vllm.decode.admission import Admission
from rlframe.rollout.vllm.decode.ahead import STEPS, step_cost

MARGIN = STEPS
"""Tokens after the beginning of a block in which vLLM is asked as before: full blocks are remembered some steps late,
when the tokens of the steps in flight are known."""
RUNNING = {"num_lookahead_tokens"}
"""Options with which vLLM asks for a request that is running already."""


def scheduler(*, vllm_config: Any, **arguments: Any) -> Any:
    """Returns vLLM's own scheduler for the configuration, with the short ways where they are right. vLLM calls it in
    the place of a class (its argument `scheduler_cls`)."""
    own = copy(vllm_config.scheduler_config)
    own.scheduler_cls = None
    made = own.get_scheduler_cls()(vllm_config=vllm_config, **arguments)
    admission = Admission(made, step_cost=step_cost(vllm_config))
    admission.install()
    if shorten(made.kv_cache_manager, lookahead=made.num_lookahead_tokens) and Repeated.knows(made):
        Repeated(made, admission).install()
    return made


def shorten(manager: Any, *, lookahead: int) -> bool:
    """Makes a KVCacheManager answer at once that a token in the midst of a block needs no new one. Returns whether it
    does.

    Args:
        lookahead: tokens beyond the next for which vLLM reserves slots. With any the manager is left as it is, as with
            layers of several kinds, or of another kind than attention to the whole sequence.
    """
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    kinds = manager.coordinator.single_type_managers
    if lookahead or len(kinds) != 1 or type(kinds[0]) is not FullAttentionManager:
        return False
    size, nothing, whole = kinds[0].block_size, manager.empty_kv_cache_blocks, manager.allocate_slots

    def allocate_slots(request: Any, num_new_tokens: int, *rest: Any, **options: Any) -> Any:
        # A running request is asked for with this option alone. Its block holds the token before, too.
        if num_new_tokens == 1 and not rest and options.keys() == RUNNING:
            place = request.num_computed_tokens % size
            if MARGIN < place < size - 1:
                return nothing
        return whole(request, num_new_tokens, *rest, **options)

    manager.allocate_slots = allocate_slots
    return True


class Repeated:
    """Schedules the step before again, with the positions of now, for as long as its sequences run on and nothing else
    is to be decided. vLLM decides on all other steps, and its own method notes that a step has been scheduled."""

    def __init__(self, scheduler: Any, admission: Admission):
        """
        Args:
            scheduler: one that `knows` returns True for.
            admission: that of the scheduler.
        """
        self._scheduler, self._admission = scheduler, admission
        self._manager = scheduler.kv_cache_manager
        self._block_size = self._manager.coordinator.single_type_managers[0].block_size
        self._last: Any = None
        """Output of the last step."""
        self._running: list[Any] = []
        """Requests of that step."""
        self._times = 0
        """Number of times it may be repeated before one of them may reach its end."""

    def install(self) -> None:
        """Takes the place of the scheduler's method, and of the manager's that remembers full blocks."""
        size, remember = self._block_size, self._manager.cache_blocks

        def cache_blocks(request: Any, num_computed_tokens: int) -> None:
            # Called for each token that is known. Prompts are remembered when they get their slots.
            if not num_computed_tokens % size:
                remember(request, num_computed_tokens)

        self._scheduler.schedule, self._manager.cache_blocks = self.schedule, cache_blocks

    @staticmethod
    def knows(scheduler: Any) -> bool:
        """Returns whether nothing but requests, blocks and positions is part of the steps of this scheduler, which runs
        ahead of the tokens: each scheduled step leaves each sequence with one more to schedule."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        connectors = ("connector", "ec_connector", "aux_output_connector")
        return (
            type(scheduler) is AsyncScheduler
            and scheduler.parallel_config.pipeline_parallel_size == 1
            and scheduler.num_spec_tokens == 0
            and scheduler.num_sampled_tokens_per_step == 1
            and not scheduler.is_encoder_decoder
            and not any(getattr(scheduler, name, None) for name in connectors)
        )

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """See Scheduler."""
        held = self._admission.holds()
        output = self._again() if self._may_repeat(held=held) else None
        if output is None:
            output = self._admission.decide(*arguments, held=held, **options)
            self._running = list(self._scheduler.running)
            self._times = self._times_of(output)
        self._last = output
        return output

    def _may_repeat(self, *, held: bool) -> bool:
        """Returns whether nothing is to be decided.

        Args:
            held: whether requests that wait are not admitted in this step.
        """
        scheduler = self._scheduler
        return bool(
            self._times > 0
            and scheduler.running == self._running
            and (held or not scheduler.waiting)
            # Since 0.27 or later, these wait with the others.
            and not getattr(scheduler, "skipped_waiting", None)
            and not scheduler.finished_req_ids
            and not scheduler.reset_preempted_req_ids
            and scheduler.pause_state.name == "UNPAUSED"
        )

    def _times_of(self, output: Any) -> int:
        """Returns how many times a step may be repeated, which vLLM has just decided on."""
        decodes = (
            len(output.num_scheduled_tokens) == len(self._running) == output.total_num_scheduled_tokens > 0
            and not output.scheduled_new_reqs
            and not output.scheduled_cached_reqs.resumed_req_ids
            and not output.scheduled_spec_decode_tokens
            and not output.scheduled_encoder_inputs
            and not output.free_encoder_mm_hashes
            and not output.has_structured_output_requests
            and not output.kv_cache_block_copies
            and not output.new_block_ids_to_zero
            and not any(each.is_prefill_chunk for each in self._running)
        )
        if not decodes:
            return 0
        longest = self._scheduler.max_model_len - 1
        # Tokens of the steps in flight may arrive between two steps.
        ends = (
            min(each.num_prompt_tokens + each.max_tokens - 2 + each.num_output_placeholders - STEPS, longest)
            - each.num_computed_tokens
            for each in self._running
        )
        return max(0, min(ends))

    def _again(self) -> Any | None:
        """Returns the step, or None if there are too few free blocks to be sure of it."""
        scheduler, size, running = self._scheduler, self._block_size, self._running
        places = [each.num_computed_tokens for each in running]
        # The first token of a block. Full blocks are remembered when their tokens are known.
        asking = [index for index, place in enumerate(places) if not place % size]
        if self._manager.block_pool.get_num_free_blocks() < len(asking):
            return None
        self._times -= 1
        scheduler.current_step += 1
        self._manager.new_step_starts()
        blocks: list[Any] = [None] * len(running)
        for index in asking:
            new = self._manager.allocate_slots(running[index], 1, num_lookahead_tokens=0)
            assert new is not None, "one block is free for each"
            blocks[index] = new.get_block_ids(allow_none=True)
        common = self._last.num_common_prefix_blocks
        if any(common):
            # A sequence that runs alone has all its blocks in common with itself. Later releases count none.
            common = self._manager.get_num_common_prefix_blocks(running[0].request_id)
        output = replace(
            self._last,
            num_common_prefix_blocks=common,
            scheduled_cached_reqs=replace(
                self._last.scheduled_cached_reqs,
                all_token_ids={},
                new_block_ids=blocks,
                num_computed_tokens=places,
                num_output_tokens=[each.num_output_tokens + each.num_output_placeholders for each in running],
            ),
            num_scheduled_tokens=self._last.num_scheduled_tokens.copy(),
            finished_req_ids=scheduler.finished_req_ids,
            preempted_req_ids=scheduler.reset_preempted_req_ids,
            new_block_ids_to_zero=scheduler._get_new_block_ids_to_zero(),
        )
        scheduler._update_after_schedule(output)
        return output
