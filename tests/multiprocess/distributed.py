"""Runs a function on several processes of this machine, each a rank, with gloo.

Ranks are forked from a template: a process that has imported what ranks need, has no thread, and does nothing else. So
each is new and shares nothing with another test, without the seconds that its imports take.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import pickle
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240.0, bare: bool = False
) -> list[Any]:
    """`function(rank, init_method, *args)` on every rank; the results by rank.

    Args:
        bare: in processes that have imported nothing, for tests of what must be so before an import.

    Raises:
        AssertionError: a rank raised (its traceback is in the message), died, or was not done in time.
    """
    # On a machine with GPUs a rank chooses its own before it imports Megatron.
    bare = bare or torch.cuda.is_available()
    context = multiprocessing.get_context("spawn") if bare else template()
    init_method = f"file://{tempfile.mkdtemp()}/rendezvous"
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        given = (sender, dict(os.environ), function, rank, init_method, *args)
        process = context.Process(target=_rank, args=given, daemon=True)
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


def template() -> multiprocessing.context.ForkServerContext:
    """Starts the template unless it runs already; returns the way to fork from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.multiprocess.template"])
    with pytest.MonkeyPatch.context() as patch:
        # Python 3.11 does not tell the template of our sys.path.
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        multiprocessing.forkserver.ensure_running()
    return context


def save(trainer: Any, folder: pathlib.Path) -> None:
    """Write the training state of all ranks into `folder`; each calls it."""
    import torch.distributed as dist  # noqa: PLC0415 - the platform comes first

    trainer.stage(folder, copy=False)
    written = [None] * dist.get_world_size()
    dist.all_gather_object(written, trainer.write())
    trainer.complete(written)
    dist.barrier()


def _rank(
    sender: Any, environment: dict[str, str], function: Callable[..., Any], rank: int, init_method: str, *args: Any
) -> None:
    # The template has that of the test that started it.
    os.environ.clear()
    os.environ.update(environment)
    # One thread per rank, before any tensor is made.
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
