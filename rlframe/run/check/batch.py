"""Rules about the arithmetic of batches, tokens and optimizer steps."""

from collections.abc import Iterator

from rlframe.environments.base import answers
from rlframe.megatron.config.optimizer import Schedule
from rlframe.megatron.config.parallel import Parallel
from rlframe.run.check.context import algorithm_of, architecture_of, online, response_limits
from rlframe.run.config import RunConfig
from rlframe.utils.faults import Fault, Key

MINIBATCHES, PARALLEL = Key.of("train.num_minibatches"), Key.of("train.parallel")


def batch(run: RunConfig) -> Iterator[Fault]:
    """Checks that every optimizer step gets whole groups and every data-parallel rank at least one sequence."""
    dp = Parallel.parse(run.train.parallel).dp
    group_size, num_minibatches = (algorithm_of(run).group_size, run.train.num_minibatches) if online(run) else (1, 1)
    asked = getattr(run.algorithm, "group_size", group_size)
    if online(run) and asked != group_size:
        yield Fault(
            "algorithm.group_size",
            f"must be {group_size}, as many rollouts of a prompt as algorithm.name={run.algorithm.name} samples",
            got=asked,
            hint="or its __init__ sets self.group_size = config.group_size",
        )
    if run.prompts_per_step % num_minibatches:
        below = run.prompts_per_step // num_minibatches * num_minibatches
        fitting = [str(count) for count in (below, below + num_minibatches) if count]
        yield Fault(
            "prompts_per_step",
            ("must be a multiple of ", MINIBATCHES, f"={num_minibatches} so that groups stay whole"),
            got=f"{run.prompts_per_step} (with algorithm.group_size={group_size}: "
            f"{run.prompts_per_step * group_size} sequences a step)",
            hint=f"{' or '.join(fitting)} fits",
        )
    algorithm = algorithm_of(run)
    smallest = algorithm.requirements.smallest_step
    if run.prompts_per_step < smallest:
        yield Fault(
            "prompts_per_step",
            f"must be at least {smallest} with algorithm.name={run.algorithm.name}",
            got=run.prompts_per_step,
            why="it compares each item with others of the step",
        )
    sequences = run.prompts_per_step * group_size // num_minibatches
    if sequences < dp:
        prompts = -(-dp // group_size) * num_minibatches
        yield Fault(
            "prompts_per_step",
            (
                f"* group size {group_size} / ",
                MINIBATCHES,
                f"={num_minibatches} gives {sequences} sequences for each optimizer step, fewer than the {dp} "
                "data-parallel ranks of ",
                PARALLEL,
                f"={run.train.parallel}",
            ),
            got=run.prompts_per_step,
            hint=f"prompts_per_step={prompts} fits",
            stated=True,
        )


def tokens(run: RunConfig) -> Iterator[Fault]:
    """Checks that the longest rollout fits the model's positions, and one packed forward pass where one trains."""
    if not online(run):
        return
    architecture, _ = architecture_of(run)
    cp = Parallel.parse(run.train.parallel).cp
    limits: dict[Key | str, int] = {}
    if run.trains(online=True) or answers(run.environment):
        limits[Key.of("train.max_tokens_per_microbatch")] = run.train.sequence_tokens
    if architecture:
        limits["the model's positions"] = architecture.max_positions
    if run.rollout.sequence_tokens is not None:
        limits["the engine's longest sequence, rollout.max_model_len"] = run.rollout.sequence_tokens
    for key, tokens in response_limits(run).items():
        for limit, most in limits.items():
            if run.data.max_prompt_tokens + tokens > most:
                yield Fault(
                    "data.max_prompt_tokens",
                    (
                        f"+ {key}={tokens} must be at most ",
                        limit,
                        f" * {cp} context-parallel ranks" if cp > 1 and isinstance(limit, Key) else "",
                        f" ({most}), got {run.data.max_prompt_tokens + tokens} tokens",
                    ),
                    got=run.data.max_prompt_tokens,
                    hint="lower one of the two",
                    stated=True,
                )


def optimizer(run: RunConfig) -> Iterator[Fault]:
    """Checks that the decay ends after the warm-up."""
    optimizer = run.train.optimizer
    constant = optimizer.schedule is Schedule.CONSTANT
    if not constant and optimizer.decay_steps is not None and optimizer.decay_steps <= optimizer.warmup_steps:
        yield Fault(
            "train.optimizer.decay_steps",
            f"must be above warmup_steps={optimizer.warmup_steps}",
            got=optimizer.decay_steps,
        )
