"""The distributed optimizer: AdamW, or Muon beside it, with float32 main weights, sharded over data-parallel ranks."""

import math

import torch
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from rlframe.megatron.adam.step import AdamStep
from rlframe.megatron.checkpoint import moments
from rlframe.megatron.config.optimizer import OptimizerConfig, OptimizerName
from rlframe.megatron.config.schedule import learning_rate
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.model.model import Model
from rlframe.megatron.model.training_fields import optimizer_fields
from rlframe.megatron.muon.muon import Muon
from rlframe.megatron.skipping.outliers import Outliers
from rlframe.megatron.worker.expert_load import RoutingBiases
from rlframe.utils.errors import RlframeError


class Optimizer(ChainedOptimizer):
    """Megatron's optimizers of one rank, with Muon for matrices, and without the steps that are outliers."""

    biases: RoutingBiases
    """The routers' biases, which a step that is not taken must leave as they were before its gradients."""
    muon: Muon | None = None
    outliers: Outliers | None = None
    adam: AdamStep | None = None
    """Takes the steps behind the first. None if Megatron takes all."""
    measured = False
    """Whether the next step measures what it changes; see `Norms`."""
    skipped = False
    """Whether the last step was skipped."""

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """Clips gradients and updates. Returns whether it did, the gradient norm before clipping, and None."""
        if self.adam is None:
            return super().step()
        if not self.adam.is_ready:
            result = super().step()
            if result[0] and not self.skipped:
                self.adam.begin()
            return result
        self.norm = self.adam.gradient_norm()
        return self.step_with_ready_grads(), self.norm, None

    def resume(self) -> None:
        """Lets the next step have the bits that it would have had in the run that was saved. Must be called on all
        ranks when moments were read."""
        if self.adam:
            self.adam.begin()

    def get_grad_norm(self) -> float:
        """Returns the gradient norm before clipping, on which `step_with_ready_grads` decides."""
        self.norm = float(super().get_grad_norm())
        return self.norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Updates weights with clipped gradients. Returns whether that was possible."""
        finite = math.isfinite(self.norm)
        self.skipped = finite and self.outliers is not None and self.outliers.skips(self.norm)
        if self.skipped or not finite:
            self.biases.put_back()
            return finite
        if self.muon:
            self.muon.step(measured=self.measured)
        return super().step_with_ready_grads()


def build(model: Model, train: TrainConfig) -> Optimizer:
    """Returns the optimizer of this rank's share of the parameters. Must be called after the weights are loaded,
    because it copies them."""
    config = train.optimizer
    chain = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            params_dtype=model.config.params_dtype,
            bf16=model.config.params_dtype == torch.bfloat16,
            use_distributed_optimizer=True,
            **optimizer_fields(train),
        ),
        model.chunks,
    )
    optimizer = Optimizer(chain.chained_optimizers)
    optimizer.biases = RoutingBiases(model)
    if config.name == OptimizerName.MUON:
        for part in moments.parts(optimizer):
            moments.use_torch(part, betas=(config.beta1, config.beta2), eps=config.eps)
        optimizer.muon = Muon(model, optimizer, config.muon)
    if config.skips:
        optimizer.outliers = Outliers(config)
    device = next(iter(model.parameters.values())).device
    if train.fuses_optimizer and device.type == "cuda":
        optimizer.adam = AdamStep(optimizer.chained_optimizers, device=device, clip_grad=config.clip_grad)
    return optimizer


def step(
    optimizer: Optimizer, config: OptimizerConfig, *, step_index: int, total_steps: int, measured: bool = False
) -> dict[str, float]:
    """Clips gradients, updates, and distributes the new weights. Returns `train/lr` and `train/grad_norm`.

    Args:
        measured: whether `Norms.update` will follow.

    Raises:
        RlframeError: the gradient norm is not finite; the weights are unchanged.
    """
    lr = learning_rate(config, step_index, total_steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
        # Megatron-Core marks norms and biases with a factor of 0, but only its scheduler
        # (OptimizerParamScheduler.step), which rlframe does not use, applies the factor.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    optimizer.measured = measured
    updated, grad_norm, _ = optimizer.step()
    # Megatron keeps the gradient of the main weights, which is a float32 copy if gradients are not summed in float32.
    optimizer.zero_grad()
    if not updated or not torch.isfinite(torch.as_tensor(grad_norm)):
        raise RlframeError(
            f"optimizer step {step_index}: the gradient norm must be finite, got {grad_norm}; lower "
            "train.optimizer.lr, or look for infinite rewards or logprobs in samples.jsonl"
        )
    return {"train/lr": lr, "train/grad_norm": float(grad_norm)}
