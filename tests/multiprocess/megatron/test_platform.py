"""Every replacement of `rlframe.megatron.cpu.platform` is needed: a training step and a checkpoint fail without it.

Fails for a replacement that a newer Megatron or torch no longer needs: delete that one.
"""

import os
import pathlib
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from rlframe.models.families.deepseek_v3 import FAMILY as DEEPSEEK
from tests.multiprocess.distributed import run_distributed, save

LAYOUT = "d1t2|ffn:d1t1e2"
"""Tensor, sequence and expert parallelism on two ranks."""
NEEDED_BESIDE_A_GPU = {"torch.cuda.stream"}
"""torch's own does nothing, unless this machine has a GPU that the CPU ranks leave alone."""
NEEDED_BY_UNEQUAL_PARTS = {"torch.distributed.all_gather"}
"""Two ranks cannot have both expert and expert tensor parallelism: a test of their own, and the gradient matrix."""
NEEDED_BY_STAGES = {"Tensor.cuda"}
"""By pipeline stages that share an embedding, which the scenario has not: tests/multiprocess/checkpoint has it."""
TIMEOUT_S = 60.0
LIMIT = timedelta(seconds=7)
SMALL_LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
"""config.json of a DeepSeek-V3."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What the scenario came to with everything in place ("all"), and without each replacement: "ok" or an error."""
    (result,) = run_distributed(in_nursery, 1, bare=True)
    return result


def test_the_scenario_works_with_everything_in_place(outcomes: dict[str, str]) -> None:
    assert outcomes["all"] == "ok"


def test_no_rank_on_a_cpu_imports_the_compiler(outcomes: dict[str, str]) -> None:
    assert outcomes["compiler"] == "not imported"


def test_each_replacement_is_needed(outcomes: dict[str, str]) -> None:
    assert len(outcomes) > 10
    unneeded = {name for name, outcome in outcomes.items() if outcome == "ok"} - {"all"}
    known = NEEDED_BY_UNEQUAL_PARTS | NEEDED_BY_STAGES
    assert unneeded - known == (set() if torch.cuda.is_available() else NEEDED_BESIDE_A_GPU)


def test_no_rank_on_a_cpu_imports_what_computes_on_cuda_only(tmp_path: pathlib.Path) -> None:
    """As on a machine with GPUs, where Megatron would take its optimizer from there."""
    (tmp_path / "transformer_engine.py").write_text("raise RuntimeError('imported on a CPU')")
    assert run_distributed(adam_beside_transformer_engine, 1, str(tmp_path), bare=True) == ["torch.optim.adamw"]


def adam_beside_transformer_engine(rank: int, init_method: str, folder: str) -> str:
    """The module of Megatron's Adam where `folder` has a Transformer Engine."""
    from rlframe.megatron.cpu import platform

    sys.path.insert(0, folder)
    platform.install(torch.device("cpu"))
    from megatron.core import optimizer

    return optimizer.Adam.__module__


def test_parts_of_unequal_size_are_gathered_which_gloo_refuses() -> None:
    for refusal, gathered in run_distributed(gather_unequal_parts, 2, bare=True):
        assert "invalid tensor size" in refusal
        # Rank r has r + 1 rows of r + 1.
        assert gathered == [[[1.0]], [[2.0], [2.0]]]


def gather_unequal_parts(rank: int, init_method: str) -> tuple[str, list[Any]]:
    """What gloo says to parts of unequal size, and what comes of them with the replacement."""
    from torch import distributed

    from rlframe.megatron.cpu import platform

    distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    own, parts = torch.full((rank + 1, 1), rank + 1.0), [torch.empty(1, 1), torch.empty(2, 1)]
    refusal = ""
    try:
        distributed.all_gather(parts, own)
    except RuntimeError as error:
        refusal = str(error)
    platform.gather_of_unequal_parts(distributed.all_gather)(parts, own)
    return refusal, [part.tolist() for part in parts]


def made_under_a_context(rank: int, init_method: str) -> list[str]:
    """The devices of tensors that a rank's factories make inside a `with` block of a device."""
    with torch.device("meta"):
        return [str(made.device) for made in (torch.tensor([1.0]), torch.zeros(2), torch.ones(2))]


def test_factories_make_tensors_on_the_device_of_a_with_block() -> None:
    # transformers loads models inside one, and rotary embeddings stayed uninitialised memory.
    assert run_distributed(made_under_a_context, 1) == [["meta"] * 3]


def test_all_groups_of_a_rank_share_one_thread_of_gloo_and_keep_their_limits() -> None:
    for threads, sums, limit in run_distributed(sum_in_groups, 2):
        assert threads == 1
        assert sums == [1.0, 1.0, 1.0]
        assert limit == LIMIT


def sum_in_groups(rank: int, init_method: str) -> tuple[int, list[float], timedelta]:
    """How many threads this rank has for its groups, the sum of the ranks in each group, and the limit of the last."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    groups = [None, distributed.new_group([0, 1]), distributed.new_group([0, 1], timeout=LIMIT)]
    sums = [torch.tensor(float(rank)) for _ in groups]
    for group, mine in zip(groups, sums, strict=True):
        distributed.all_reduce(mine, group=group)
    names = [file.read_text() for file in pathlib.Path("/proc/self/task").glob("*/comm")]
    backend: Any = groups[-1]._get_backend(torch.device("cpu"))
    return sum("gloo_tcp_loop" in name for name in names), [float(mine) for mine in sums], backend.options._timeout


def in_nursery(rank: int, init_method: str) -> dict[str, str]:
    """The outcomes. Imports Megatron once, in this process, and forks each pair of ranks from it."""
    from rlframe.megatron.cpu import platform

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
    from rlframe.megatron.worker import trainer  # noqa: F401 - the forked ranks then need not import it

    imported = "torch._inductor.compile_fx" in sys.modules
    from torch import _dynamo  # noqa: F401 - for the same reason: torch's optimizers ask for it at their first step

    outcomes = {"compiler": "imported" if imported else "not imported"}
    outcomes["all"] = in_two_ranks(lambda: None)
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
    """Two optimizer steps of a small mixture of experts with full recomputation, and a checkpoint between them; and a
    model with latent attention."""
    from rlframe.algorithms.sft import Sft, SftConfig
    from rlframe.megatron.config.options import MoeConfig
    from rlframe.megatron.config.train import Dtype, Recompute, TrainConfig
    from rlframe.megatron.messages.microbatch import split
    from rlframe.megatron.model import model
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup
    from rlframe.models.config import ModelConfig
    from rlframe.types.batch import Sequences

    warnings.filterwarnings("error", message=".*CUDA_DEVICE_MAX_CONNECTIONS")
    setup = TrainerSetup(
        rank=rank, init_method=f"file://{folder}/rendezvous", device=torch.device("cpu"),
        model=ModelConfig(path="qwen3_moe_tiny", random_init=True),
        # Tokens by Megatron's own dispatcher, which needs the more.
        train=TrainConfig(
            parallel=LAYOUT, dtype=Dtype.BFLOAT16, recompute=Recompute.FULL, moe=MoeConfig(send_once=False)
        ),
        seed=0, temperature=1.0, total_optimizer_steps=2, timeout_s=TIMEOUT_S, with_reference=False,
    )  # fmt: skip
    trainer = Trainer(setup)
    batch = Sequences(
        token_ids=torch.arange(12), lengths=torch.tensor([5, 7]), loss_mask=torch.tensor([False] + [True] * 11)
    )
    algorithm = Sft(SftConfig())
    (share,), _ = split(batch, algorithm.token_weights(batch), num_ranks=1, max_tokens=20)
    queued = len(torch.cuda._queued_calls)
    (before,) = trainer.train([share.microbatches()], algorithm, first_step=0)
    save(trainer, folder / "checkpoint")
    trainer.load(folder / "checkpoint", num_optimizer_steps=1)
    (after,) = trainer.train([share.microbatches()], algorithm, first_step=1)
    assert all(torch.isfinite(torch.tensor(step.metrics["train/grad_norm"].value)) for step in (before, after))
    assert len(torch.cuda._queued_calls) == queued, "calls pile up that wait for CUDA"
    model.build(DEEPSEEK, DEEPSEEK.architecture(SMALL_LATENT), setup.train, device=setup.device)
