"""Runs a function on several processes of this machine, each a rank, with gloo."""

import multiprocessing
import pathlib
import pickle
import tempfile
import traceback
from collections.abc import Callable
from typing import Any


def run_distributed(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """`function(rank, init_method, *args)` on every rank; the results by rank.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), died, or was not done in time.
    """
    context = multiprocessing.get_context("spawn")
    init_method = f"file://{tempfile.mkdtemp()}/rendezvous"
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(sender, function, rank, init_method, *args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return [_result(rank, pipe, timeout_s) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def save(trainer: Any, folder: pathlib.Path) -> None:
    """Write the training state of all ranks into `folder`; each calls it."""
    import torch.distributed as dist  # noqa: PLC0415 - the platform comes first

    trainer.stage(folder, copy=False)
    written = [None] * dist.get_world_size()
    dist.all_gather_object(written, trainer.write(verify=True))
    trainer.complete(written)
    dist.barrier()


def _rank(sender: Any, function: Callable[..., Any], rank: int, init_method: str, *args: Any) -> None:
    import torch  # noqa: PLC0415 - one thread per rank, before any tensor is made

    torch.set_num_threads(1)
    try:
        answer = (True, function(rank, init_method, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own would send tensors as files that end with this process.
    sender.send_bytes(pickle.dumps(answer))
    # Gloo's threads abort the process when it ends in the ordinary way with groups open.
    sender.close()


def _result(rank: int, pipe: Any, timeout_s: float) -> Any:
    assert pipe.poll(timeout_s), f"rank {rank} was not done within {timeout_s} s"
    try:
        succeeded, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} died") from None
    assert succeeded, f"rank {rank} raised:\n{value}"
    return value
