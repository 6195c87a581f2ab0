"""Where one rank has all experts, tokens are sorted by expert once. The gradient matrix has the numbers."""

import pathlib

import pytest

from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.cluster.config import Device
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.messages.microbatch import split
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.models.config import ModelConfig
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.shared_passes import Case
from tests.tiny_models import make


def second_sorts(rank: int, init_method: str, folder: str, parallel: str) -> int:
    """Returns how many times a rank sorts what came from other ranks, in a pass over one micro-batch."""
    from rlframe.megatron.cpu import platform

    where = platform.resolve(Device.CPU)
    platform.install(where)
    from megatron.core.transformer.moe import token_dispatcher

    from rlframe.megatron.worker.trainer import Trainer

    calls, own = [], token_dispatcher.sort_chunks_by_idxs

    def counted(*arguments: object, **options: object) -> object:
        calls.append(None)
        return own(*arguments, **options)

    token_dispatcher.sort_chunks_by_idxs = counted
    train = TrainConfig(dtype=Dtype.FLOAT32, parallel=parallel)
    trainer = Trainer(
        TrainerSetup(
            rank=rank, init_method=init_method, device=where, model=ModelConfig(path=folder), train=train, seed=0,
            temperature=1.0, total_optimizer_steps=1, timeout_s=120, with_reference=False,
        )
    )  # fmt: skip
    whole, ranks = Case((9, 9), (5, 7)).batch(), 2 if "d2" in parallel else 1
    weights = Grpo(GrpoConfig(group_size=2)).token_weights(whole)
    shares, _ = split(whole, weights, num_ranks=ranks, max_tokens=100, share_prompts=False)
    trainer.logprobs(shares[rank].microbatches(), reference=False)
    return len(calls)


@pytest.mark.thorough
@pytest.mark.parametrize(("parallel", "sorts"), [("d1", False), ("d2|ffn:d1t1e2", True)])
def test_tokens_of_one_rank_are_sorted_once(parallel: str, sorts: bool, tmp_path: pathlib.Path) -> None:
    layers = make("qwen3_moe", tmp_path).config.num_hidden_layers
    counts = run_distributed(second_sorts, 2 if sorts else 1, str(tmp_path), parallel)
    assert counts == ([2 * layers] * 2 if sorts else [0])
