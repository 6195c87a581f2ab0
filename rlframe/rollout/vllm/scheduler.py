"""vLLM's scheduler, which asks for a block of the cache only when a sequence needs one.

In every step of decoding vLLM (0.26 to 0.32) asks its cache manager for a slot for each sequence: it counts the blocks
that are needed, frees those outside of windows, and looks for full blocks to remember. In most steps nothing changes.
With 256 sequences these answers are more than half of what `schedule` takes, for which a GPU waits if the model is
small. This module can go when vLLM's `KVCacheManager.allocate_slots` itself returns at once for a token in a block that
the request has.
"""

from copy import copy
from typing import Any

from rlframe.rollout.vllm.ahead import STEPS

MARGIN = STEPS
"""Tokens after the beginning of a block in which vLLM is asked as before: full blocks are remembered some steps late,
when the tokens of the steps in flight are known."""
RUNNING = {"num_lookahead_tokens"}
"""Options with which vLLM asks for a request that is running already."""


def scheduler(*, vllm_config: Any, **arguments: Any) -> Any:
    """Returns vLLM's own scheduler for the configuration, with the short way where it is right. vLLM calls it in the
    place of a class (its argument `scheduler_cls`)."""
    own = copy(vllm_config.scheduler_config)
    own.scheduler_cls = None
    made = own.get_scheduler_cls()(vllm_config=vllm_config, **arguments)
    shorten(made.kv_cache_manager, lookahead=made.num_lookahead_tokens)
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
