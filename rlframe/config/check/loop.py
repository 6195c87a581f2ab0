"""Rules for what a loop does: learning, evaluation, checkpoints."""

from collections.abc import Iterator
from pathlib import Path

from rlframe.algorithms.kl_cov import KlCovConfig
from rlframe.algorithms.policy_gradient import ClippedConfig, PolicyGradientConfig
from rlframe.config.check.context import algorithm_of, online
from rlframe.loops.run import RunConfig
from rlframe.utils import registry

DISTRIBUTED_CHECKPOINT = (".metadata", "metadata.json")
"""Files that every Megatron distributed checkpoint has."""


def evaluation(run: RunConfig) -> Iterator[str]:
    """Evaluation has something to evaluate on."""
    if not run.data.holds_out and run.evaluation.every_steps:
        why = "data.evaluation_count=0"
        if run.data.evaluation_count:
            why = "data.streaming=true and no data.evaluation_path"
        yield (
            f"evaluation.every_steps has no effect with {why}, got {run.evaluation.every_steps}; hold out records or "
            "set it to 0"
        )


def learning(run: RunConfig) -> Iterator[str]:
    """An algorithm that learns from rewards has one, and the run has a use for the options of policy gradients."""
    if online(run) and algorithm_of(run).needs_rewards and not run.reward.names:
        yield (
            "reward.parts must name a reward, or reward.model.path a reward model: algorithm.name="
            f"{run.algorithm.name} learns from nothing else"
        )
    algorithm = run.algorithm
    if not isinstance(algorithm, PolicyGradientConfig):
        return
    if run.train.minibatches * run.train.epochs == 1:
        yield from _one_update(algorithm)
    dynamic = algorithm.dynamic_sampling
    if dynamic and dynamic.reward_part is not None and dynamic.reward_part not in run.reward.names:
        yield (
            f"algorithm.dynamic_sampling.reward_part must be one of reward.parts, {', '.join(run.reward.names)}, got "
            f"{dynamic.reward_part!r}"
        )


def environment(run: RunConfig) -> Iterator[str]:
    """The environment is there."""
    known = registry.names("rlframe.environments")
    if online(run) and run.rollout.environment not in known:
        yield f"rollout.environment must be one of {', '.join(known)}, got {run.rollout.environment!r}"


def _one_update(algorithm: PolicyGradientConfig) -> Iterator[str]:
    """Settings that look at the policy before the update, which with one update is the policy itself."""
    where, correction = "train.minibatches * train.epochs = 1", algorithm.correction
    clipped = isinstance(algorithm, ClippedConfig)
    bounds = {"dual_clip": algorithm.dual_clip, "ratio_cap": algorithm.ratio_cap} if clipped else {}
    for name, bound in bounds.items():
        if bound is not None and not correction.bypass:
            yield (
                f"algorithm.{name} has no effect with {where}, got {bound}: the ratio to the old policy is 1; remove it"
            )
    if correction.normalize_weights:
        yield (
            f"algorithm.correction.normalize_weights must be false with {where}, got true: the mean weight of the "
            "batch is that of the policy before the update, not computed apart; use more minibatches or epochs"
        )
    if isinstance(algorithm, KlCovConfig) and not correction.bypass:
        yield (
            f"algorithm.name=kl_cov has no effect with {where}: the gradient of its penalty is 0 at the old policy; "
            "use more minibatches or epochs, or algorithm.name=clip_cov"
        )


def offline(run: RunConfig) -> Iterator[str]:
    """The reference's logprobs are computed before training only where that saves a model in memory."""
    if not online(run) and run.train.lora and algorithm_of(run).precomputes_reference:
        yield (
            "algorithm.reference must be live with train.lora, got precomputed: the reference is the model without its "
            "adapters, which the ranks have anyway"
        )


def reference(run: RunConfig) -> Iterator[str]:
    """A reference that is to follow the policy is there, can follow and does."""
    algorithm = algorithm_of(run)
    every = algorithm.reference_update.every_steps
    if not every:
        return
    if not algorithm.needs_reference:
        yield (
            f"algorithm.reference_update.every_steps has no effect without a reference, got {every}; set "
            "algorithm.kl_coefficient above 0, or remove it"
        )
    if run.train.lora:
        yield (
            f"algorithm.reference_update.every_steps must be 0 with train.lora, got {every}: the reference is the "
            "model without its adapters, which is not trained; train all weights"
        )
    if every >= run.steps:
        yield (
            f"algorithm.reference_update.every_steps must be below steps={run.steps}, got {every}: the reference would "
            "never move, or after the last step"
        )


def distillation(run: RunConfig) -> Iterator[str]:
    """The data's responses are learned at the temperature of the trainer's logprobs."""
    required = algorithm_of(run).requirements
    if required.nll_coefficient and required.online and run.rollout.temperature != 1:
        yield (
            f"algorithm.nll_coefficient={required.nll_coefficient} needs rollout.temperature=1, got "
            f"{run.rollout.temperature}: logprobs are taken at that temperature, and the likelihood of the data is not"
        )


def checkpoint(run: RunConfig) -> Iterator[str]:
    """What the run is to start from is there."""
    if run.checkpoint.start_from is None:
        return
    folder = Path(run.checkpoint.start_from).expanduser()
    if missing := [name for name in DISTRIBUTED_CHECKPOINT if not (folder / name).is_file()]:
        yield (
            f"checkpoint.start_from must be the folder of a Megatron distributed checkpoint, got {folder}, which has "
            f"no {' and no '.join(missing)}; a Hugging Face model goes to model.path"
        )
