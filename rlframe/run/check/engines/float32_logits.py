"""Rules about `model.float32_logits`. See the package."""

from collections.abc import Iterator

from rlframe.megatron.config.train import Dtype
from rlframe.rollout.base.config import EngineDtype, Logprobs
from rlframe.run.check.context import algorithm_of, online, samples
from rlframe.run.config import RunConfig
from rlframe.utils.faults import Fault

KEY = "model.float32_logits"


def faults(run: RunConfig) -> Iterator[Fault]:
    """Checks that there are logits that would be rounded, and that all engines of the policy can keep them."""
    if not run.model.float32_logits:
        return
    if algorithm_of(run).model_outputs is not None:
        rule = f"has no effect with algorithm.name={run.algorithm.name}, whose model has no logits"
        yield Fault(KEY, rule, got="true", hint="remove it")
    elif not (_trainer_rounds(run) or _engine_rounds(run)):
        yield Fault(KEY, "has no effect where all is computed in float32", got="true", hint="remove it")
    if samples(run):
        yield from run.rollout.float32_logits_faults()


def _trainer_rounds(run: RunConfig) -> bool:
    exact = online(run) and run.rollout.logprobs is Logprobs.EXACT
    return run.trains(online=online(run)) and run.train.dtype is Dtype.BFLOAT16 and not exact


def _engine_rounds(run: RunConfig) -> bool:
    return samples(run) and run.rollout.number_format(run.train.dtype) is EngineDtype.BFLOAT16
