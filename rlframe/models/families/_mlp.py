"""The gated MLP, and experts of which each token takes some.

Megatron's layouts, checked by shape and by logits: the first matrix is this rank's gate rows over its up rows, the
second is cut by columns, the router is whole everywhere, and a rank has a run of whole experts.
"""

from typing import NamedTuple

from rlframe.models.families._layer_specs import LayerSpec, Scope, Shapes, columns, rows, under
from rlframe.models.families.base import Architecture, Shard


class Projections(NamedTuple):
    """What a checkpoint calls the three matrices of an MLP."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def tensors(self, hidden: int, width: int) -> Shapes:
        """Their shapes for an MLP of `width`."""
        return {
            f"{self.gate}.weight": (width, hidden),
            f"{self.up}.weight": (width, hidden),
            f"{self.down}.weight": (hidden, width),
        }

    def load(self, parameters: Scope, checkpoint: Scope, rank: int, size: int) -> None:
        """Gate rows over up rows, both cut for `rank` of `size`, and the columns of the matrix back."""
        gate, up = parameters["linear_fc1.weight"].chunk(2)
        gate.copy_(rows(checkpoint[f"{self.gate}.weight"], rank, size))
        up.copy_(rows(checkpoint[f"{self.up}.weight"], rank, size))
        parameters["linear_fc2.weight"].copy_(columns(checkpoint[f"{self.down}.weight"], rank, size))


def fused(hidden: int, width: int) -> Shapes:
    """Megatron's two matrices of an MLP of which a rank has `width`."""
    return {"linear_fc1.weight": (2 * width, hidden), "linear_fc2.weight": (hidden, width)}


class Mlp(LayerSpec):
    """The MLP of a dense layer."""

    def tensors(self, a: Architecture) -> Shapes:
        return under("mlp.", Projections().tensors(a.hidden_size, a.ffn_hidden_size))

    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        return under("mlp.", fused(a.hidden_size, a.ffn_hidden_size // shard.tp_size))

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        Projections().load(parameters.within("mlp."), checkpoint.within("mlp."), shard.tp_rank, shard.tp_size)


class Experts(LayerSpec):
    """Router and experts, named one by one on disk, and the expert that all tokens share.

    Args:
        module: what the checkpoint calls the whole.
        projections: what it calls the matrices of an expert.
    """

    def __init__(self, module: str = "mlp.", projections: Projections | None = None):
        self.module, self.projections = module, projections or Projections()

    def tensors(self, a: Architecture) -> Shapes:
        shapes: Shapes = {"gate.weight": (a.num_experts, a.hidden_size)}
        if a.sigmoid_router:
            shapes["gate.e_score_correction_bias"] = (a.num_experts,)
        one = self.projections.tensors(a.hidden_size, a.expert_ffn_hidden_size)
        for expert in range(a.num_experts):
            shapes |= under(f"experts.{expert}.", one)
        if a.shared_ffn_hidden_size:
            shapes |= under("shared_experts.", self.projections.tensors(a.hidden_size, a.shared_ffn_hidden_size))
        return under(self.module, shapes)

    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        shapes: Shapes = {"router.weight": (a.num_experts, a.hidden_size)}
        if a.sigmoid_router:
            shapes["router.expert_bias"] = (a.num_experts,)
        one = fused(a.hidden_size, a.expert_ffn_hidden_size // shard.etp_size)
        for expert in range(a.num_experts // shard.ep_size):
            shapes |= under(f"experts.local_experts.{expert}.", one)
        if a.shared_ffn_hidden_size:
            shapes |= under("shared_experts.", fused(a.hidden_size, a.shared_ffn_hidden_size // shard.tp_size))
        return under("mlp.", shapes)

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        ours, theirs = parameters.within("mlp."), checkpoint.within(self.module)
        ours["router.weight"].copy_(theirs["gate.weight"])
        if a.sigmoid_router:
            ours["router.expert_bias"].copy_(theirs["gate.e_score_correction_bias"])
        local = a.num_experts // shard.ep_size
        for expert in range(local):
            target = ours.within(f"experts.local_experts.{expert}.")
            source = theirs.within(f"experts.{shard.ep_rank * local + expert}.")
            self.projections.load(target, source, shard.etp_rank, shard.etp_size)
        if a.shared_ffn_hidden_size:
            target, source = ours.within("shared_experts."), theirs.within("shared_experts.")
            self.projections.load(target, source, shard.tp_rank, shard.tp_size)
