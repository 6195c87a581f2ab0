"""From the policy's settings to those of a frozen model. Imports neither torch nor megatron."""

from dataclasses import replace

from rlframe.megatron.config.options import CommunicationConfig, Fp8Config, MoeConfig, Recompute, RecomputeConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import OptimizerConfig, TrainConfig


def forward_only(train: TrainConfig, layout: Parallel) -> TrainConfig:
    """The policy's settings as a frozen model cut by `layout` has use for them: the number format, kernels, how tokens
    reach experts, and a token budget that the policy's longest sequence fits.

    What is for gradients (recomputation, adapters, the optimizer) or for the policy's own experts is left out, and so
    is FP8, for which the model's sizes may not do.
    """
    return replace(
        train,
        parallel=layout,
        max_tokens_per_microbatch=-(-train.sequence_tokens // layout.cp),
        recompute=Recompute.NONE,
        recompute_options=RecomputeConfig(),
        communication=CommunicationConfig(),
        moe=MoeConfig(dispatcher=train.moe.dispatcher),
        fp8=Fp8Config(),
        optimizer=OptimizerConfig(),
        lora=None,
    )
