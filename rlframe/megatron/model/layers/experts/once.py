"""Tokens that are sent once to each rank that has experts of theirs.

Megatron-Core's dispatcher `alltoall` (0.16 to 0.19) sends a token once for each of its experts, and sorts what came
from all ranks by expert, there and back. Of eight experts of a token on two ranks, four copies go to the other one.
Here one does, with the weights of its experts there. That rank sorts tokens by expert, once, and sends back the sum of
what they give, rounded to the tokens' number format. For 24 layers of Qwen3-30B-A3B on two GPUs copies and second sorts
took 400 of 1,536 ms of kernels. DeepEP (the dispatcher `flex`) does so too, with kernels of its own. This file can go
when Megatron's all-to-all does.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from rlframe.megatron.model.layers.experts import order

NOT_CHOSEN = -1.0
"""Stands for the weight of an expert that a token has not chosen. One that is chosen may have 0."""


class OncePerRank(MoETokenDispatcher):
    """A dispatcher of Megatron's for R ranks with L experts each. A micro-batch has T tokens here. S rows go to ranks,
    C come from ranks, and P are computed here, one for each of their experts.

    Megatron calls its methods in the order in which they stand here. What they leave for one another is of the pass of
    one layer.
    """

    def __init__(self, own: Any, groups: Any) -> None:
        """Takes the place of another dispatcher.

        Args:
            own: the one that Megatron has made.
            groups: its process groups.
        """
        super().__init__(config=own.config, pg_collection=groups)
        self.num_local_experts: int = own.num_local_experts
        self.most: int = min(own.config.moe_router_topk, self.ep_size)
        """Ranks that one token can go to."""
        self.order: Any = implementation(own.config.moe_permute_fusion)
        self.places: Any = None
        self.places_here: Any = None

    def dispatch_preprocess(
        self, hidden_states: Float[Tensor, "*T H"], routing_map: Bool[Tensor, "T E"], probs: Float[Tensor, "T E"]
    ) -> tuple[Float[Tensor, "S H"], Float[Tensor, "S L"]]:
        """Returns the rows that are sent, those for the first rank first: tokens, and weights of the rank's experts.

        Args:
            hidden_states: [..., H] tokens.
            routing_map: [T, E] experts that each has chosen.
            probs: [T, E] their weights.
        """
        self.shape, experts = hidden_states.shape, self.num_local_experts
        tokens = hidden_states.view(-1, self.shape[-1])
        receivers = routing_map.view(-1, self.ep_size, experts).any(2)
        arriving = Numbers(receivers, routing_map, self.ep_group)
        self.places, room = order.places(receivers), len(tokens) * self.most
        rows, _ = self.order.spread(tokens, None, self.places, room)
        marked = torch.where(routing_map, probs, NOT_CHOSEN).view(-1, experts)
        weights, _ = self.order.spread(marked, None, self.places.view(-1, 1), room)
        # Not before: the device copies while the host waits for the numbers.
        self.sent, self.received, self.counts = arriving.wait(self.num_local_experts)
        return rows, weights

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens [C, H] that come from all ranks, and weights [C, L]."""
        numbers = (self.ep_group, self.sent, self.received)
        return Exchanged.apply(hidden_states, *numbers), Exchanged.apply(probs, *numbers)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens [P, H] by expert, how many [L] each has, and the weight [P] of each."""
        # A weight that is not a number is one that was chosen, and shows in the output.
        self.places_here = order.places(probs.detach() != NOT_CHOSEN)
        rows, weights = self.order.spread(hidden_states, probs, self.places_here, int(self.counts.sum()))
        return rows, self.counts, weights

    def combine_preprocess(self, hidden_states: Float[Tensor, "P H"]) -> Float[Tensor, "C H"]:
        """Returns the sum [C, H] of what this rank's experts give for each token."""
        places, self.places_here = self.places_here, None
        return self.order.gathered(hidden_states, places)

    def token_combine(self, hidden_states: Float[Tensor, "C H"]) -> Float[Tensor, "S H"]:
        """Returns the sums [S, H] of all ranks for this rank's tokens."""
        return Exchanged.apply(hidden_states, self.ep_group, self.received, self.sent)

    def combine_postprocess(self, hidden_states: Float[Tensor, "S H"]) -> Float[Tensor, "*T H"]:
        """Returns the sum [..., H] of all experts for each token."""
        # Nothing of the pass stays, which would take memory in each layer.
        places, self.places = self.places, None
        return self.order.gathered(hidden_states, places).view(self.shape)


class Numbers:
    """Numbers of rows that ranks send one another, on their way to the host."""

    def __init__(self, receivers: Bool[Tensor, "T R"], routing_map: Bool[Tensor, "T E"], group: Any) -> None:
        own = torch.cat([receivers.sum(0), routing_map.sum(0)])
        every = gather_from_sequence_parallel_region(own, group=group)
        self.rank, self.ranks = group.rank(), group.size()
        self.every = every.view(self.ranks, -1).to("cpu", non_blocking=True)
        self.event = torch.cuda.current_stream().record_event() if own.is_cuda else None

    def wait(self, experts: int) -> tuple[list[int], list[int], Int[Tensor, " L"]]:
        """Returns how many rows this rank sends to each rank, how many it receives from each, and [L] the tokens of
        each of its experts."""
        if self.event:
            self.event.synchronize()
        rows, tokens = self.every[:, : self.ranks], self.every[:, self.ranks :]
        here = tokens[:, self.rank * experts : (self.rank + 1) * experts].sum(0)
        return rows[self.rank].tolist(), rows[:, self.rank].tolist(), here


class Exchanged(torch.autograd.Function):
    """All-to-all of the first rows of a buffer, those for each rank behind one another."""

    @staticmethod
    def forward(ctx: Any, rows: Float[Tensor, "N F"], group: Any, sent: list[int], received: list[int]) -> Tensor:
        """Returns the rows that come from each rank."""
        ctx.group, ctx.sent, ctx.received, ctx.room = group, sent, received, len(rows)
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows[: sum(sent)], received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None, None]:
        """Returns the gradients of the rows. Of those that were not sent it has no value, and nobody reads it."""
        gradient = above.new_empty(ctx.room, above.shape[1])
        dist.all_to_all_single(gradient[: sum(ctx.sent)], above.contiguous(), ctx.sent, ctx.received, group=ctx.group)
        return gradient, None, None, None


def implementation(by_kernels: bool) -> Any:
    """Returns the module whose `spread` and `gathered` are to be used."""
    if not by_kernels:
        return order
    from rlframe.megatron.model.layers.experts import order_kernels  # noqa: PLC0415 - needs Triton

    return order_kernels
