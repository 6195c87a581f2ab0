"""Communication between data-parallel ranks that overlaps with computation."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.model.model import Model


def prepare(model: Model, train: TrainConfig) -> None:
    """Prepares the overlap. Must be called once, after the model is built.

    Gradients: only the last micro-batch's backward pass sends, so the schedule must be able to switch that off for the
    others. Parameters: Megatron's hooks gather them before each module runs. They are off outside of `gathering`, so
    that all other passes and readers (logprobs, the reference's turn, checkpoints, weight sync) find complete
    parameters and start nothing.
    """
    if train.communication.overlap_grad_reduce:
        # Megatron requires one for each chunk of an interleaved pipeline, else a single one.
        waits = [chunk.no_sync for chunk in model.chunks]
        model.config.no_sync_func = waits if len(waits) > 1 else waits[0]
    if train.communication.overlap_param_gather:
        for chunk in model.chunks:
            chunk.disable_forward_pre_hook(param_sync=False)


@contextmanager
def gathering(model: Model, *, when: bool) -> Iterator[None]:
    """Makes forward passes inside the block gather the changes of the last optimizer step, bucket by bucket."""
    if not when:
        yield
        return
    for chunk in model.chunks:
        chunk.enable_forward_pre_hook()
    yield
    # The forward pass has waited for every bucket.
    for chunk in model.chunks:
        chunk.disable_forward_pre_hook(param_sync=False)


def complete(model: Model, train: TrainConfig) -> None:
    """Completes the parameters on every rank, after an optimizer step that no forward pass follows."""
    if train.communication.overlap_param_gather:
        for chunk in model.chunks:
            chunk.start_param_sync(force_sync=True)
