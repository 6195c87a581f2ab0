"""Router replay: the policy's routers choose the experts that the engine chose when it sampled.

"Rollout routing replay", R3, of arXiv 2510.11370 (Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers) applies it, as rlframe does, to the policy's logprobs and its training. The choice is the engine's;
the weights of the chosen experts are softmax or sigmoid of the trainer's own logits, so that routers learn. The
reference chooses for itself, as in slime (`ROUTING_REPLAY_STAGE=fallthrough` when it computes the reference's
logprobs), and so does a critic.

Megatron-Core 0.16.1 has a `RouterReplay` of its own, with one list of routers for all models of the process, and with
queues that are also filled by passes from which nothing takes. Its routers call one method of it, which an object of
this file provides instead.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from rlframe.megatron.model.mtp import decoder_modules
from rlframe.megatron.packed.inputs import PackedInputs
from rlframe.models.families.base import Architecture
from rlframe.types.batch import Sequences
from rlframe.types.results import Mean, Metric


@dataclass(frozen=True, slots=True)
class OwnRoutes:
    """Experts that the routers of this rank must choose for a micro-batch."""

    experts: Tensor
    """[tokens, layers, k] experts of the tokens that a router of this rank sees."""
    known: Tensor
    """[tokens] False for the last token of each sequence, whose experts the engine does not report, and for padding.
    There the routers choose: no logprob and no other token depends on it, and auxiliary losses should see their
    choice."""

    @classmethod
    def of(cls, batch: Sequences, inputs: PackedInputs) -> "OwnRoutes | None":
        """Returns the experts of a micro-batch, or None if its batch has none."""
        if batch.routes is None:
            return None
        known = torch.ones_like(batch.token_ids, dtype=torch.bool)
        known.index_fill_(0, torch.cumsum(batch.lengths, 0) - 1, False)
        group = parallel_state.get_tensor_model_parallel_group()
        # Sequence parallelism: a router sees the rank's part of the tokens.
        parts = (inputs.own(values).chunk(group.size())[group.rank()] for values in (batch.routes, known))
        return cls(*parts)


class RouterReplay:
    """Replay in the routers of one model on this rank."""

    def __init__(self, modules: Sequence[nn.Module], architecture: Architecture, device: torch.device):
        """
        Args:
            modules: the chunks of the model that this rank has.
        """
        layers = [index for index, sparse in enumerate(architecture.moe_layers) if sparse]
        routers = [each for module in modules for each in decoder_modules(module) if isinstance(each, TopKRouter)]
        self.forwards = False
        """True while a micro-batch runs forward."""
        self.routes: OwnRoutes | None = None
        """Routes of the micro-batch that runs forward."""
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        """Numbers of replayed choices that the trainer would have made differently, and of all replayed choices."""
        self._replays = [_OneRouter(self, router, layers.index(router.layer_number - 1)) for router in routers]

    def begin(self) -> None:
        """Prepares for micro-batches, the first of which runs forward."""
        for each in self._replays:
            each.again.clear()

    @contextmanager
    def of(self, batch: Sequences, inputs: PackedInputs) -> Iterator[None]:
        """Marks inside the block that a micro-batch runs forward."""
        self.forwards, self.routes = True, OwnRoutes.of(batch, inputs)
        try:
            yield
        finally:
            self.forwards, self.routes = False, None

    def count(self, experts: Tensor, native: Tensor, known: Tensor) -> None:
        """Counts for `take` the rows [tokens, k] in which the two name different experts, in any order."""
        differ = (experts.sort(1).values != native.sort(1).values).any(1)
        self.counts += torch.stack([(differ & known).sum(), known.sum()])

    def take(self) -> dict[str, Metric]:
        """Returns `moe/routes_differ_fraction` since the last call, over all ranks. Must be called on all of them.

        It is the fraction of choices replayed in training, one for each token and layer, that the trainer would have
        made differently. A layer's token is on exactly one rank, see `ExpertLoad.take`.
        """
        dist.all_reduce(self.counts)
        differing, replayed = self.counts.tolist()
        self.counts.zero_()
        return {"moe/routes_differ_fraction": Mean(differing / replayed, 1.0)} if replayed else {}


class _OneRouter:
    """Replaces Megatron-Core's `RouterReplay` for one router, and returns the experts that it must choose."""

    def __init__(self, replay: RouterReplay, router: TopKRouter, place: int):
        self._replay, self._router, self._place = replay, router, place
        self.again: deque[OwnRoutes | None] = deque()
        """Routes of the micro-batches for which the backward pass recomputes this layer, in their order."""
        router.router_replay = self

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns [tokens, k] the scores of the chosen experts, and their indices."""
        values, native = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        routes = self._routes()
        if routes is None:
            return values, native
        experts = routes.experts[:, self._place].long()
        if self._router.training and torch.is_grad_enabled():
            # As in ExpertLoad: a recomputed layer counts when it is recomputed.
            self._replay.count(experts, native, routes.known)
        experts = experts.where(routes.known[:, None], native)
        return scores.gather(1, experts), experts

    def _routes(self) -> OwnRoutes | None:
        if not self._replay.forwards:
            # The backward pass recomputes the layer. In every schedule a chunk's micro-batches come back in the order
            # in which they went.
            return self.again.popleft()
        if self._router.training and not torch.is_grad_enabled():
            # A first run that keeps no activations.
            self.again.append(self._replay.routes)
        return self._replay.routes
