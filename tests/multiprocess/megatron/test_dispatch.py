"""Where one rank has all experts, tokens are sorted by expert once. Other ranks get a token once. The gradient matrix
has the numbers."""

import pathlib
from types import SimpleNamespace

import pytest
import torch

from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.cluster.config import Device
from rlframe.megatron.config.options import MoeConfig
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.messages.microbatch import split
from rlframe.megatron.messages.setup import TrainerSetup
from rlframe.models.config import ModelConfig
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.shared_passes import Case
from tests.tiny_models import make


def second_sorts(rank: int, init_method: str, folder: str, parallel: str, sending: str) -> int:
    """Returns how many times a rank sorts what came from other ranks, in a pass over one micro-batch.

    Args:
        sending: "once" if a token is sent once to each rank, else "each".
    """
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
    train = TrainConfig(dtype=Dtype.FLOAT32, parallel=parallel, moe=MoeConfig(send_once=sending == "once"))
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
@pytest.mark.parametrize(
    ("parallel", "sending", "sorts"), [("d1", "each", 0), ("d2|ffn:d1t1e2", "each", 2), ("d2|ffn:d1t1e2", "once", 0)]
)
def test_tokens_are_sorted_once(parallel: str, sending: str, sorts: int, tmp_path: pathlib.Path) -> None:
    layers, ranks = make("qwen3_moe", tmp_path).config.num_hidden_layers, 2 if "d2" in parallel else 1
    counts = run_distributed(second_sorts, ranks, str(tmp_path), parallel, sending)
    assert counts == [sorts * layers] * ranks


def exchanged(rank: int, init_method: str, routes: tuple[tuple[tuple[int, ...], ...], ...]) -> dict[str, torch.Tensor]:
    """Returns what a dispatcher that sends tokens once gives for this rank's tokens, and gradients of it. Four experts
    on two ranks multiply by 1, 2, 3 and 4.

    Args:
        routes: of each rank, the experts of each token.
    """
    from rlframe.megatron.cpu import platform

    platform.install(platform.resolve(Device.CPU))
    from megatron.core.process_groups_config import ProcessGroupCollection

    from rlframe.megatron.model.layers.experts.once import OncePerRank

    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    groups = ProcessGroupCollection(
        ep=torch.distributed.group.WORLD, expt_tp=alone, tp_ep=torch.distributed.group.WORLD
    )
    config = SimpleNamespace(moe_permute_fusion=False, moe_router_topk=2)
    dispatcher = OncePerRank(SimpleNamespace(config=config, num_local_experts=2), groups)
    tokens, chosen, probs = given(rank, routes[rank])
    sent = dispatcher.dispatch_preprocess(tokens, chosen, probs)
    arrived, counts, weights = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
    factors = (torch.arange(2) + 2 * rank + 1).repeat_interleave(counts)
    summed = dispatcher.combine_preprocess(arrived * (factors * weights)[:, None])
    out = dispatcher.combine_postprocess(dispatcher.token_combine(summed))
    assert dispatcher.places is None and dispatcher.places_here is None, "nothing of a pass stays in a layer"
    (out * above(rank, tokens)).sum().backward()
    assert tokens.grad is not None
    assert probs.grad is not None
    return {"out": out.detach(), "tokens": tokens.grad, "probs": probs.grad, "rows": torch.tensor(dispatcher.sent)}


def given(rank: int, routes: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tokens [T, 1, 3], the experts [T, 4] that each has chosen, and their weights. Those of the first token
    are 0, and of rank 0's last not a number."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randn(len(routes), 1, 3, generator=generator).requires_grad_()
    chosen = torch.zeros(len(routes), 4, dtype=torch.bool)
    for token, experts in enumerate(routes):
        chosen[token, list(experts)] = True
    probs = torch.rand(len(routes), 4, generator=generator) * chosen
    probs[0] = 0.0
    if rank == 0:
        probs[-1] = torch.where(chosen[-1], torch.nan, 0.0)
    return tokens, chosen, probs.requires_grad_()


def above(rank: int, tokens: torch.Tensor) -> torch.Tensor:
    """Returns a gradient of what comes out."""
    return torch.randn(tokens.shape, generator=torch.Generator().manual_seed(10 + rank))


@pytest.mark.parametrize(
    ("routes", "rows"),
    [
        pytest.param((((0, 1), (1, 2), (3, 0), (2, 3)), ((0, 2), (1, 3))), [[3, 3], [2, 2]], id="both"),
        # Rank 0 has no token at all.
        pytest.param((((2, 3), (3, 2)), ((2, 3),)), [[0, 2], [0, 1]], id="one", marks=pytest.mark.thorough),
    ],
)
def test_a_token_is_sent_once_to_each_rank_of_its_experts(
    routes: tuple[tuple[tuple[int, ...], ...], ...], rows: list[list[int]]
) -> None:
    found = run_distributed(exchanged, 2, routes)
    assert [each["rows"].tolist() for each in found] == rows
    for rank, each in enumerate(found):
        tokens, chosen, probs = given(rank, routes[rank])
        factors = torch.tensor([1.0, 2.0, 3.0, 4.0]) * chosen
        out = tokens * (probs * factors).sum(1)[:, None, None]
        (out * above(rank, tokens)).sum().backward()
        torch.testing.assert_close(each["out"], out.detach(), equal_nan=True)
        torch.testing.assert_close(each["tokens"], tokens.grad, equal_nan=True)
        torch.testing.assert_close(each["probs"], probs.grad)
