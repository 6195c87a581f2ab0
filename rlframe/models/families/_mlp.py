"""The gated MLP, and experts of which each token uses some.

Megatron's layouts, checked by shape and by logits: the first matrix is this rank's gate rows above its up rows, the
second is split by columns, the router is replicated, and a rank holds consecutive whole experts.
"""

from typing import NamedTuple

from rlframe.models.families._layer_specs import LayerSpec, Scope, Shapes, columns, rows, under
from rlframe.models.families.base import Architecture, Shard


class Projections(NamedTuple):
    """A checkpoint's names of the three matrices of an MLP."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def tensors(self, hidden: int, width: int) -> Shapes:
        """Returns the shapes of the three matrices for an MLP of `width`."""
        return {
            f"{self.gate}.weight": (width, hidden),
            f"{self.up}.weight": (width, hidden),
            f"{self.down}.weight": (hidden, width),
        }

    def load(self, parameters: Scope, checkpoint: Scope, rank: int, size: int) -> None:
        """Fills Megatron's two matrices: gate rows above up rows, and the columns of the down projection, each the part
        of `rank` of `size`."""
        gate, up = parameters["linear_fc1.weight"].chunk(2)
        gate.copy_(rows(checkpoint[f"{self.gate}.weight"], rank, size))
        up.copy_(rows(checkpoint[f"{self.up}.weight"], rank, size))
        parameters["linear_fc2.weight"].copy_(columns(checkpoint[f"{self.down}.weight"], rank, size))


def fused(hidden: int, width: int) -> Shapes:
    """Returns the shapes of Megatron's two matrices on a rank that holds `width` of an MLP."""
    return {"linear_fc1.weight": (2 * width, hidden), "linear_fc2.weight": (hidden, width)}


class Mlp(LayerSpec):
    """The MLP of a dense layer.

    Args:
        module: the checkpoint's name of the whole module.
    """

    def __init__(self, module: str = "mlp."):
        self.module = module

    def tensors(self, a: Architecture) -> Shapes:
        return under(self.module, Projections().tensors(a.hidden_size, a.ffn_hidden_size))

    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        return under("mlp.", fused(a.hidden_size, a.ffn_hidden_size // shard.tp_size))

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        Projections().load(parameters.within("mlp."), checkpoint.within(self.module), shard.tp_rank, shard.tp_size)


class Experts(LayerSpec):
    """Router and experts, stored one by one on disk, and the expert that all tokens share.

    Args:
        module: the checkpoint's name of the whole module.
        projections: the checkpoint's names of an expert's matrices.
        bias: the checkpoint's name, in the module, of the router's bias for the choice.
        shared: the checkpoint's name, in the module, of the expert that all tokens share.
    """

    def __init__(
        self,
        module: str = "mlp.",
        projections: Projections | None = None,
        *,
        bias: str = "gate.e_score_correction_bias",
        shared: str = "shared_experts",
    ):
        self.module, self.projections = module, projections or Projections()
        self.bias, self.shared = bias, shared

    def tensors(self, a: Architecture) -> Shapes:
        shapes: Shapes = {"gate.weight": (a.num_experts, a.hidden_size)}
        if a.sigmoid_router and a.router_bias:
            shapes[self.bias] = (a.num_experts,)
        one = self.projections.tensors(a.hidden_size, a.expert_ffn_hidden_size)
        for expert in range(a.num_experts):
            shapes |= under(f"experts.{expert}.", one)
        if a.shared_ffn_hidden_size:
            shapes |= under(f"{self.shared}.", self.projections.tensors(a.hidden_size, a.shared_ffn_hidden_size))
        if a.shared_expert_gate:
            shapes[f"{self.shared}_gate.weight"] = (1, a.hidden_size)
        return under(self.module, shapes)

    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        shapes: Shapes = {"router.weight": (a.num_experts, a.hidden_size)}
        if a.sigmoid_router and a.router_bias:
            shapes["router.expert_bias"] = (a.num_experts,)
        one = fused(a.hidden_size, a.expert_ffn_hidden_size // shard.etp_size)
        for expert in range(a.num_experts // shard.ep_size):
            shapes |= under(f"experts.local_experts.{expert}.", one)
        if a.shared_ffn_hidden_size:
            shapes |= under("shared_experts.", fused(a.hidden_size, a.shared_ffn_hidden_size // shard.tp_size))
        if a.shared_expert_gate:
            shapes["shared_experts.gate_weight"] = (1, a.hidden_size)
        return under("mlp.", shapes)

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        ours, theirs = parameters.within("mlp."), checkpoint.within(self.module)
        ours["router.weight"].copy_(theirs["gate.weight"])
        if a.sigmoid_router and a.router_bias:
            ours["router.expert_bias"].copy_(theirs[self.bias])
        local = a.num_experts // shard.ep_size
        for expert in range(local):
            target = ours.within(f"experts.local_experts.{expert}.")
            source = theirs.within(f"experts.{shard.ep_rank * local + expert}.")
            self.projections.load(target, source, shard.etp_rank, shard.etp_size)
        if a.shared_ffn_hidden_size:
            target, source = ours.within("shared_experts."), theirs.within(f"{self.shared}.")
            self.projections.load(target, source, shard.tp_rank, shard.tp_size)
        if a.shared_expert_gate:
            ours["shared_experts.gate_weight"].copy_(theirs[f"{self.shared}_gate.weight"])
