"""The distributed optimizer: AdamW with float32 main weights, sharded over data-parallel ranks."""

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

from rlframe.megatron.config.schedule import learning_rate
from rlframe.megatron.config.train import OptimizerConfig, TrainConfig
from rlframe.megatron.model.model import Model
from rlframe.megatron.model.training_fields import optimizer_fields
from rlframe.utils.errors import RlframeError


def build(model: Model, train: TrainConfig) -> MegatronOptimizer:
    """Returns AdamW over this rank's share of the parameters. Must be called after the weights are loaded, because it
    copies them."""
    config = train.optimizer
    return get_megatron_optimizer(
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


def step(
    optimizer: MegatronOptimizer, config: OptimizerConfig, *, step_index: int, total_steps: int
) -> dict[str, float]:
    """Clips gradients, updates, and distributes the new weights. Returns `train/lr` and `train/grad_norm`.

    Raises:
        RlframeError: the gradient norm is not finite; the weights are unchanged.
    """
    lr = learning_rate(config, step_index, total_steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
        # Megatron-Core marks norms and biases with a factor of 0, but only its scheduler
        # (OptimizerParamScheduler.step), which rlframe does not use, applies the factor.
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    updated, grad_norm, _ = optimizer.step()
    if not updated or not torch.isfinite(torch.as_tensor(grad_norm)):
        raise RlframeError(
            f"optimizer step {step_index}: the gradient norm must be finite, got {grad_norm}; lower "
            "train.optimizer.lr, or look for infinite rewards or logprobs in samples.jsonl"
        )
    return {"train/lr": lr, "train/grad_norm": float(grad_norm)}
