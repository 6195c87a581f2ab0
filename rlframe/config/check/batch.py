"""Rules for the arithmetic of batches, tokens and optimizer steps."""

from collections.abc import Iterator

from rlframe.config.check.context import algorithm_of, architecture_of, online
from rlframe.loops.run import RunConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Schedule


def batch(run: RunConfig) -> Iterator[str]:
    """Every optimizer step gets whole groups and every data-parallel rank at least one sequence."""
    dp = Parallel.parse(run.train.parallel).dp
    group_size, minibatches = (algorithm_of(run).group_size, run.train.minibatches) if online(run) else (1, 1)
    if run.prompts_per_step % minibatches:
        below = run.prompts_per_step // minibatches * minibatches
        fitting = [str(count) for count in (below, below + minibatches) if count]
        yield (
            f"prompts_per_step must be a multiple of train.minibatches={minibatches} so that groups stay whole, got "
            f"{run.prompts_per_step} (with algorithm.group_size={group_size}: {run.prompts_per_step * group_size} "
            f"sequences a step); {' or '.join(fitting)} fits"
        )
    algorithm = algorithm_of(run)
    smallest = algorithm.requirements.smallest_step
    if run.prompts_per_step < smallest:
        yield (
            f"prompts_per_step must be at least {smallest} with algorithm.name={run.algorithm.name}, "
            f"got {run.prompts_per_step}: each prompt is compared with the response of another of the step"
        )
    sequences = run.prompts_per_step * group_size // minibatches
    if sequences < dp:
        prompts = -(-dp // group_size) * minibatches
        yield (
            f"prompts_per_step={run.prompts_per_step} * group size {group_size} / train.minibatches={minibatches} "
            f"gives {sequences} sequences for each optimizer step, fewer than the {dp} data-parallel ranks of "
            f"train.parallel={run.train.parallel}; prompts_per_step={prompts} fits"
        )


def tokens(run: RunConfig) -> Iterator[str]:
    """The longest rollout fits one packed forward and the model's positions."""
    if not online(run):
        return
    architecture, _ = architecture_of(run)
    cp = Parallel.parse(run.train.parallel).cp
    of_ranks = f" * {cp} context-parallel ranks" if cp > 1 else ""
    limits = {f"train.max_tokens_per_microbatch{of_ranks}": run.train.sequence_tokens}
    if architecture:
        limits["the model's positions"] = architecture.max_positions
    if run.rollout.sequence_tokens is not None:
        limits["the engine's longest sequence, rollout.max_model_len"] = run.rollout.sequence_tokens
    responses = {"rollout.max_tokens": run.rollout.max_tokens}
    if run.evaluation.max_tokens is not None:
        responses["evaluation.max_tokens"] = run.evaluation.max_tokens
    for key, tokens in responses.items():
        for limit, most in limits.items():
            if run.data.max_prompt_tokens + tokens > most:
                yield (
                    f"data.max_prompt_tokens={run.data.max_prompt_tokens} + {key}={tokens} must be at most {limit} "
                    f"({most}), got {run.data.max_prompt_tokens + tokens} tokens; lower one of the two"
                )


def optimizer(run: RunConfig) -> Iterator[str]:
    """The decay ends after the warm-up."""
    optimizer = run.train.optimizer
    constant = optimizer.schedule is Schedule.CONSTANT
    if not constant and optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        yield (
            f"train.optimizer.decay_steps must be above warmup_steps={optimizer.warmup_steps}, got "
            f"{optimizer.decay_steps}"
        )
