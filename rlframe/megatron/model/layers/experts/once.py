"""Tokens that are sent once to each rank that has experts of theirs.

Megatron-Core's dispatcher `alltoall` (0.16 to 0.19) sends a token once for each of its experts, and sorts what came
from all ranks by expert, there and back. Of eight experts of a token on two ranks, four copies go to the other one.
Here one does, with the probabilities of its experts there. That rank sorts tokens by expert, once, and sends back the
sum of what they give. For 24 layers of Qwen3-30B-A3B on two GPUs copies and second sorts took 400 of 1,536 ms of
kernels. DeepEP (the dispatcher `flex`) does so too, with kernels of its own. This file can go when Megatron's
all-to-all does.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

NOT_CHOSEN = -1.0
"""Stands for the probability of an expert that a token has not chosen. One that is chosen may have 0."""


class OncePerRank(MoETokenDispatcher):
    """A dispatcher of Megatron's for R ranks with L experts each. One micro-batch has T tokens here and C come from all
    ranks, each to at least one expert.

    Megatron calls its methods in the order in which they stand here.
    """

    def __init__(self, own: Any, groups: Any) -> None:
        """Takes the place of another dispatcher.

        Args:
            own: the one that Megatron has made.
            groups: its process groups.
        """
        super().__init__(config=own.config, pg_collection=groups)
        self.num_local_experts: int = own.num_local_experts
        self.fused: bool = own.config.moe_permute_fusion
        self.rank: int = self.ep_group.rank()

    def dispatch_preprocess(
        self, hidden_states: Float[Tensor, "*T H"], routing_map: Bool[Tensor, "T E"], probs: Float[Tensor, "T E"]
    ) -> tuple[Float[Tensor, "S H"], Float[Tensor, "S L"]]:
        """Returns the S rows that are sent, those for the first rank first: tokens, and the probabilities of their
        experts on that rank.

        Args:
            hidden_states: [..., H] tokens.
            routing_map: [T, E] experts that each has chosen.
            probs: [T, E] their weights.
        """
        self.shape, experts = hidden_states.shape, self.num_local_experts
        tokens = hidden_states.view(-1, self.shape[-1])
        self.before = tokens.shape
        self.receivers = routing_map.view(-1, self.ep_size, experts).any(2)
        self.sent, self.received, self.counts = self.exchanged(routing_map)
        rows = sum(self.sent)
        sent, _, self.places, *_ = permute(tokens, self.receivers, num_out_tokens=rows, fused=self.fused)
        marked = probs.masked_fill(~routing_map, NOT_CHOSEN).view(-1, self.ep_size, experts)
        # Row r * T + t is token t for rank r, so that one column picks them in the order of the tokens above.
        by_rank = marked.transpose(0, 1).reshape(-1, experts)
        picked = self.receivers.T.reshape(-1, 1)
        weights, *_ = permute(by_rank, picked, num_out_tokens=rows, fused=self.fused)
        return sent, weights

    def exchanged(self, routing_map: Bool[Tensor, "T E"]) -> tuple[list[int], list[int], Int[Tensor, " L"]]:
        """Returns how many rows this rank sends to each rank, how many it receives from each, and [L] the tokens of
        each of its experts, on the CPU. Waits for the device."""
        own = torch.cat([self.receivers.sum(0), routing_map.sum(0)])
        every = gather_from_sequence_parallel_region(own, group=self.ep_group).view(self.ep_size, -1).cpu()
        rows, tokens = every[:, : self.ep_size], every[:, self.ep_size :]
        first = self.rank * self.num_local_experts
        here = tokens[:, first : first + self.num_local_experts].sum(0)
        return rows[self.rank].tolist(), rows[:, self.rank].tolist(), here

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens [C, H] that come from all ranks, and probabilities [C, L]."""
        tokens = all_to_all(self.ep_group, hidden_states, self.received, self.sent)
        return tokens, all_to_all(self.ep_group, probs, self.received, self.sent)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns tokens [P, H] by expert, how many [L] each has, and the probability [P] of each."""
        self.chosen, self.arrived = probs >= 0, hidden_states.shape
        tokens, weights, self.places_here, *_ = permute(
            hidden_states,
            self.chosen,
            probs=probs.clamp(min=0),
            num_out_tokens=int(self.counts.sum()),
            fused=self.fused,
        )
        return tokens, self.counts, weights

    def combine_preprocess(self, hidden_states: Float[Tensor, "P H"]) -> Float[Tensor, "C H"]:
        """Returns the sum [C, H] of what this rank's experts give for each token."""
        return unpermute(
            hidden_states, self.places_here, restore_shape=self.arrived, routing_map=self.chosen, fused=self.fused
        )

    def token_combine(self, hidden_states: Float[Tensor, "C H"]) -> Float[Tensor, "S H"]:
        """Returns the sums [S, H] of all ranks for this rank's tokens."""
        return all_to_all(self.ep_group, hidden_states, self.sent, self.received)

    def combine_postprocess(self, hidden_states: Float[Tensor, "S H"]) -> Float[Tensor, "*T H"]:
        """Returns the sum [..., H] of all experts for each token."""
        whole = unpermute(
            hidden_states, self.places, restore_shape=self.before, routing_map=self.receivers, fused=self.fused
        )
        return whole.view(self.shape)
