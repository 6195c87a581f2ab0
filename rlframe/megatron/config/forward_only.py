"""Derives the settings of a frozen model from those of the policy. Imports neither torch nor megatron."""

from dataclasses import replace

from rlframe.megatron.config.mtp import MtpConfig
from rlframe.megatron.config.optimizer import OptimizerConfig
from rlframe.megatron.config.options import CommunicationConfig, Fp8Config, MoeConfig, Recompute, RecomputeConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig


def forward_only(train: TrainConfig, layout: Parallel) -> TrainConfig:
    """Returns the settings of a frozen model in `layout`: the policy's number format, kernels, expert dispatcher, and a
    token budget that fits the policy's longest sequence.

    Settings for gradients (recomputation, adapters, the optimizer), for the policy's own experts and for its head for
    multi-token prediction are left out, as is FP8, which may not fit the model's sizes.
    """
    return replace(
        train,
        parallel=layout,
        max_tokens_per_microbatch=-(-train.sequence_tokens // layout.cp),
        recompute=Recompute.NONE,
        recompute_options=RecomputeConfig(),
        offload_activations=False,
        communication=CommunicationConfig(),
        moe=MoeConfig(dispatcher=train.moe.dispatcher, send_once=train.moe.send_once),
        fp8=Fp8Config(),
        mtp=MtpConfig(),
        optimizer=OptimizerConfig(),
        lora=None,
    )
