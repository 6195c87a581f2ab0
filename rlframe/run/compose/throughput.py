"""Composes what measures the throughput of a run's roles."""

from collections.abc import Callable
from dataclasses import replace

from rlframe.algorithms.base import Algorithm
from rlframe.loops.reporting.throughput import ROLLOUT, Shape, Throughput
from rlframe.megatron.config.mtp import MtpConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.run.compose.parts import Parts
from rlframe.run.preflight.devices import cuda_device
from rlframe.run.preflight.seconds import training_operations


def throughput(parts: Parts, algorithm: Algorithm, *, critic: Algorithm | None = None) -> Throughput:
    """Returns what measures the throughput of the policy, its engines and its critic."""
    config = parts.config
    shapes = {"policy": trained(config.model, config.train, algorithm)}
    if critic:
        shapes["critic"] = trained(config.critic_model, config.critic_train, critic)
    if parts.requirements.online and config.rollout.replay is None:
        engines = config.rollout.num_engines - config.evaluation.num_engines
        # Engines that evaluate may share the last of these devices.
        devices = -(-engines // config.rollout.engines_per_device) * config.rollout.devices_per_engine
        shapes[ROLLOUT] = replace(shapes["policy"], devices=devices, epochs=1)
    return Throughput(
        shapes=shapes,
        peak=peak(parts),
        samples_ahead=config.loop.max_policy_lag > 0 and not config.cluster.colocate,
    )


def trained(model: ModelConfig, train: TrainConfig, algorithm: Algorithm) -> Shape:
    """Returns the shape of a model in training."""
    # A critic has no head for multi-token prediction, whatever the settings that it has from the policy.
    with_mtp = train.mtp.trains and algorithm.model_outputs is None
    return Shape(
        devices=Parallel.parse(train.parallel).world,
        operations=forward_operations(model, algorithm.model_outputs),
        training=forward_operations(model, algorithm.model_outputs, train.mtp) if with_mtp else None,
        epochs=train.epochs_per_batch,
    )


def forward_operations(
    model: ModelConfig, num_outputs: int | None, mtp: MtpConfig | None = None
) -> Callable[[float, float], float]:
    """Returns a function of a token's operations in a forward pass; see `Shape.operations`.

    Args:
        mtp: the head for multi-token prediction, if the pass trains it.
    """
    folder = resolve(model)
    architecture = load_family(folder).architecture(read_config(folder)).with_outputs(num_outputs)
    return lambda length, share: training_operations(architecture, mean_length=length, mtp=mtp, predicted=share) / 3


def peak(parts: Parts) -> float | None:
    """Returns the operations a second of a device: those of the setting, or of the data sheet of this machine's
    device. None on a CPU, and for a device that is not known."""
    if parts.config.cluster.device_tflops is not None:
        return parts.config.cluster.device_tflops * 1e12
    device = cuda_device() if parts.device.type == "cuda" else None
    return device.speeds.flops if device and device.speeds else None
