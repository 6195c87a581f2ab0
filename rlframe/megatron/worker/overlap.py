"""Communication between data-parallel ranks that runs beside the computation."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.model.model import Model


def prepare(model: Model, train: TrainConfig) -> None:
    """Call once, after the model is made.

    Gradients: only the last micro-batch's backward sends, so the schedule must be able to switch that off for the
    others. Parameters: Megatron's hooks gather them before each module runs; off until `gathering`, so that whoever
    else runs the model or reads its parameters (logprobs, the reference's turn, checkpoints, weight sync) finds them
    complete and starts nothing.
    """
    if train.communication.overlap_grad_reduce:
        # Of an interleaved pipeline Megatron wants one for each chunk, else a bare one.
        waits = [chunk.no_sync for chunk in model.chunks]
        model.config.no_sync_func = waits if len(waits) > 1 else waits[0]
    if train.communication.overlap_param_gather:
        for chunk in model.chunks:
            chunk.disable_forward_pre_hook(param_sync=False)


@contextmanager
def gathering(model: Model, *, when: bool) -> Iterator[None]:
    """Forward passes inside the block gather what the last optimizer step has changed, bucket by bucket."""
    if not when:
        yield
        return
    for chunk in model.chunks:
        chunk.enable_forward_pre_hook()
    yield
    # Every bucket has been waited for by the forward that is behind us.
    for chunk in model.chunks:
        chunk.disable_forward_pre_hook(param_sync=False)


def complete(model: Model, train: TrainConfig) -> None:
    """All parameters are the new ones on every rank, after an optimizer step that no forward follows."""
    if train.communication.overlap_param_gather:
        for chunk in model.chunks:
            chunk.start_param_sync(force_sync=True)
