"""Epochs of SGLang's prefix cache: requests of different epochs share nothing of it.

Running requests that keep their keys and values over a weight sync hold nodes of the cache, so it cannot be emptied.
What begins after the sync gets another `extra_key`, by which SGLang tells apart equal tokens.
"""

from typing import Any

EPOCH = "rlframe_epoch"
"""Attribute of a scheduler: its epoch, from 1. It is absent until requests have kept keys and values over a sync."""


def install(scheduler_class: Any) -> None:
    """Makes schedulers queue each request in their present epoch, also one that they take out of the batch when memory
    is short: its keys and values are gone, and present weights recompute them."""
    queue = scheduler_class._add_request_to_queue

    def add(scheduler: Any, request: Any, *rest: Any, **more: Any) -> Any:
        _enter(scheduler, request)
        return queue(scheduler, request, *rest, **more)

    scheduler_class._add_request_to_queue = add


def begin(scheduler: Any) -> None:
    """Begins an epoch. Requests in the queue, which hold no keys and values, enter it; those in the batch do not."""
    setattr(scheduler, EPOCH, getattr(scheduler, EPOCH, 0) + 1)
    for request in scheduler.waiting_queue:
        _enter(scheduler, request)


def _enter(scheduler: Any, request: Any) -> None:
    if epoch := getattr(scheduler, EPOCH, 0):
        request.extra_key = f"rlframe {epoch}"
