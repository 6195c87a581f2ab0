"""Load of experts: metrics of the routers' balance, the weights of the losses that improve it, and the routers'
biases."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rlframe.megatron.compat import auxiliary_loss_divisor
from rlframe.megatron.config.options import MoeConfig
from rlframe.megatron.messages.microbatch import Microbatch
from rlframe.megatron.model.model import Model, routing_biases
from rlframe.megatron.model.mtp import decoder_modules
from rlframe.megatron.model.training_fields import token_multiple
from rlframe.megatron.packed.inputs import num_computed
from rlframe.types.results import Mean, Metric


class ExpertLoad:
    """Counts the tokens of each expert of each MoE layer while gradients are computed."""

    def __init__(self, model: Model):
        architecture = model.architecture
        self.moe_layers = [index for index, sparse in enumerate(architecture.moe_layers) if sparse]
        device = next(iter(model.parameters.values())).device
        self.counts = torch.zeros(architecture.num_layers, architecture.num_experts, dtype=torch.int64, device=device)
        for module in (each for chunk in model.chunks for each in decoder_modules(chunk)):
            if isinstance(module, TopKRouter):
                module.register_forward_hook(self._count)

    def _count(self, router: Any, arguments: Any, output: tuple[Tensor, Tensor]) -> None:
        # A recomputed layer is run without gradients first: each token is counted in the run with gradients.
        if router.training and torch.is_grad_enabled():
            self.counts[router.layer_number - 1] += output[1].detach().sum(0)

    def take(self) -> dict[str, Metric]:
        """Returns `moe/...` of the counts since the last call, over all ranks. Must be called on all of them.

        For each layer: load_peak (tokens of the busiest expert divided by the mean) and idle_experts (the fraction
        without a token); over layers their means, and the worst peak. A layer's token is on exactly one rank, whether
        layers (PP), tokens (DP, CP, and TP with its sequence parallelism) or experts (EP) are split, so the sum over
        the world counts it once. Padding tokens of a micro-batch count too.
        """
        if not self.moe_layers:
            return {}
        dist.all_reduce(self.counts)
        loads = self.counts[self.moe_layers].double().cpu()
        self.counts.zero_()
        peaks = loads.amax(1) / loads.mean(1).clamp(min=1e-12)
        idle = (loads == 0).double().mean(1)
        values = {
            "moe/load_peak": peaks.mean(),
            "moe/load_peak_worst_layer": peaks.max(),
            "moe/idle_experts": idle.mean(),
        }
        for layer, peak, share in zip(self.moe_layers, peaks, idle, strict=True):
            values |= {f"moe/load_peak_layer_{layer:02d}": peak, f"moe/idle_experts_layer_{layer:02d}": share}
        return {key: Mean(float(value), 1.0) for key, value in values.items()}


class RoutingBiases:
    """The routers' biases before a step. Megatron moves them with the gradients (`finalize_gradients`), before it is
    decided whether the step is taken."""

    def __init__(self, model: Model):
        self._live = routing_biases(model)
        self.note()

    def note(self) -> None:
        """Copies the present biases."""
        self._before = [bias.clone() for bias in self._live]

    def put_back(self) -> None:
        """Restores the copied biases."""
        for bias, before in zip(self._live, self._before, strict=True):
            bias.copy_(before)


def balance(model: Model, moe: MoeConfig, microbatches: list[Microbatch]) -> None:
    """Sets the weights of the auxiliary losses for the next optimizer step. Must be called on all ranks, with the
    micro-batches of the schedule: `forward.filled`.

    The aim, besides the algorithm's loss, for each MoE layer: coefficient * sum over micro-batches m of (N_m / N)
    loss_m, with N_m the tokens of m, N those of all micro-batches of all data-parallel ranks, and
        balancing: loss_m = E / (k N_m^2) sum over experts i of tokens_i * sum over tokens of p_i
        (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6; p is the softmax of all scores, k experts a token);
        z-loss: loss_m = mean over tokens of (log sum exp scores)^2 (Zoph et al. 2022, arXiv 2202.08906, equation 5).
    What Megatron-Core does with its coefficient c and `calculate_per_token_loss`: the ranks that share m have equally
    many tokens each and shares of the loss that add up to c loss_m (z-loss: a part of c times the mean over their own,
    which add up to the same); `MoEAuxLossAutoScaler` gives each share a gradient of N_m / D, with the D of
    `auxiliary_loss_divisor`, and the schedule multiplies by the scale of the main loss, here 1. Summed over ranks and
    micro-batches, and divided by nothing (`finalize_gradients`), that is c / D * sum over m of N_m loss_m. So
    c = coefficient * D / N.

    Padding counts as tokens: with context parallelism up to 2 * cp - 1 a sequence, so that layouts with cp train a bit
    differently from those without. Megatron's mask for it does not serve: in 0.16.1 and 0.19.2 it cannot be combined
    with the mask of experts in a router with a bias (`_apply_expert_bias`), and in 0.16.1 each rank would weight its
    share of loss_m by its own number of tokens.
    """
    if not (moe.aux_loss_coefficient or moe.z_loss_coefficient):
        return
    config = model.config
    multiple = config.tensor_model_parallel_size * token_multiple(config)
    tokens = sum(
        num_computed(each.batch, multiple, config.context_parallel_size, dynamic=model.dynamic) for each in microbatches
    )
    total = torch.tensor(float(tokens), device=next(iter(model.parameters.values())).device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    factor = auxiliary_loss_divisor(config) / float(total)
    if moe.aux_loss_coefficient:
        config.moe_aux_loss_coeff = moe.aux_loss_coefficient * factor
    if moe.z_loss_coefficient:
        config.moe_z_loss_coeff = moe.z_loss_coefficient * factor
