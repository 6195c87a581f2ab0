"""Every replacement of `rlframe.megatron.platform` is needed: a training step and a checkpoint fail without it.

Fails for a replacement that a newer Megatron or torch no longer needs: delete that one.
"""

import os
import pathlib
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.multiprocess.distributed import run_distributed

LAYOUT = "d1t2|ffn:d1t1e2"
"""Tensor, sequence and expert parallelism on two ranks."""
NEEDED_BESIDE_A_GPU = {"torch.cuda.stream"}
"""torch's own does nothing, unless this machine has a GPU that the CPU ranks leave alone."""
NEEDED_BY_STAGES = {"Tensor.cuda"}
"""By pipeline stages that share an embedding, which the scenario has not: tests/multiprocess/test_training_state.py."""
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What the scenario came to with everything in place ("all"), and without each replacement: "ok" or an error."""
    (result,) = run_distributed(in_nursery, 1)
    return result


def test_the_scenario_works_with_everything_in_place(outcomes: dict[str, str]) -> None:
    assert outcomes["all"] == "ok"


def test_each_replacement_is_needed(outcomes: dict[str, str]) -> None:
    assert len(outcomes) > 10
    unneeded = {name for name, outcome in outcomes.items() if outcome == "ok"} - {"all"}
    assert unneeded == NEEDED_BY_STAGES | (set() if torch.cuda.is_available() else NEEDED_BESIDE_A_GPU)


def in_nursery(rank: int, init_method: str) -> dict[str, str]:
    """The outcomes. Imports Megatron once, in this process, and forks each pair of ranks from it."""
    from rlframe.megatron import platform

    originals: dict[tuple[Any, str], Any] = {}

    def remember(replacements: Callable[[], list]) -> Callable[[], list]:
        def remembering() -> list:
            found = replacements()
            originals.update({(owner, name): vars(owner).get(name) for owner, name, _ in found})
            return found

        return remembering

    platform.in_torch, platform.in_megatron = remember(platform.in_torch), remember(platform.in_megatron)
    platform.install(torch.device("cpu"))
    originals.update(
        {(platform.NullStream, name): None for name in vars(platform.NullStream) if not name.startswith("__")}
    )
    from rlframe.megatron import trainer  # noqa: F401 - the forked ranks then need not import it

    outcomes = {"all": in_two_ranks(lambda: None)}
    outcomes["CUDA_DEVICE_MAX_CONNECTIONS"] = in_two_ranks(lambda: os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS"))
    for (owner, name), original in originals.items():
        outcomes[f"{owner.__name__}.{name}"] = in_two_ranks(lambda: undo(owner, name, original))  # noqa: B023
    return outcomes


def undo(owner: Any, name: str, original: Any) -> None:
    """Put back what `install` replaced."""
    if original is None:
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def in_two_ranks(prepare: Callable[[], Any]) -> str:
    """Runs `prepare` and then the scenario in two forked processes: "ok", or the first error's last line."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "checkpoint").mkdir()
        ranks = {os.fork() or on_rank(rank, folder, prepare) for rank in range(2)}
        deadline = time.monotonic() + TIMEOUT_S
        failed = False
        while ranks and not failed and time.monotonic() < deadline:
            for pid in list(ranks):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ranks.remove(pid)
                    failed |= status != 0
            time.sleep(0.01)
        for pid in ranks:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        errors = [file.read_text() for file in sorted(folder.glob("error-*"))]
        return errors[0] if errors else "ok" if not failed and not ranks else "died or hung"


def on_rank(rank: int, folder: pathlib.Path, prepare: Callable[[], Any]) -> int:
    """The forked process of a rank. Never returns."""
    try:
        prepare()
        scenario(rank, folder)
    except BaseException as error:
        (folder / f"error-{rank}").write_text("".join(traceback.format_exception_only(error)).strip())
        os._exit(1)
    os._exit(0)


def scenario(rank: int, folder: pathlib.Path) -> None:
    """Two optimizer steps of a small mixture of experts with full recomputation, and a checkpoint between them."""
    from rlframe.algorithms.sft import Sft, SftConfig
    from rlframe.megatron.config import Dtype, Recompute, TrainConfig
    from rlframe.megatron.microbatch import split
    from rlframe.megatron.trainer import Trainer, TrainerSetup
    from rlframe.models.config import ModelConfig
    from rlframe.types.batch import Sequences

    warnings.filterwarnings("error", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
    setup = TrainerSetup(
        rank=rank, init_method=f"file://{folder}/rendezvous", device=torch.device("cpu"),
        model=ModelConfig(path="qwen3_moe_tiny", random_init=True),
        train=TrainConfig(parallel=LAYOUT, dtype=Dtype.BFLOAT16, recompute=Recompute.FULL),
        seed=0, temperature=1.0, total_optimizer_steps=2, timeout_s=TIMEOUT_S, with_reference=False,
    )  # fmt: skip
    trainer = Trainer(setup)
    batch = Sequences(
        token_ids=torch.arange(12), lengths=torch.tensor([5, 7]), loss_mask=torch.tensor([False] + [True] * 11)
    )
    algorithm = Sft(SftConfig())
    (microbatches,), _ = split(batch, algorithm.token_weights(batch), num_ranks=1, max_tokens=20)
    queued = len(torch.cuda._queued_calls)
    (before,) = trainer.train([microbatches], algorithm, first_step=0)
    trainer.save(folder / "checkpoint")
    trainer.load(folder / "checkpoint", num_optimizer_steps=1)
    (after,) = trainer.train([microbatches], algorithm, first_step=1)
    assert all(torch.isfinite(torch.tensor(step["train/grad_norm"].value)) for step in (before, after))
    assert len(torch.cuda._queued_calls) == queued, "calls pile up that wait for CUDA"
