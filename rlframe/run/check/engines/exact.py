"""Rules about `rollout.logprobs=exact`. See the package."""

from collections.abc import Iterator

from rlframe.megatron.config.options import Recompute
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype
from rlframe.rollout.base.config import Logprobs
from rlframe.run.config import RunConfig
from rlframe.utils.faults import Fault

KEY = "rollout.logprobs"


def faults(run: RunConfig, *, cuda: bool) -> Iterator[Fault]:
    """Checks that both sides can compute in float32 from the same parameters.

    Args:
        cuda: whether both sides run on CUDA.
    """
    if run.rollout.logprobs is not Logprobs.EXACT:
        return
    yield from run.rollout.exact_faults(cuda=cuda)
    if not run.trains(online=True):
        return
    if run.train.dtype is Dtype.FLOAT32:
        why = "both sides compute in float32 already"
        yield Fault(KEY, "has no effect with train.dtype=float32", got="exact", why=why, hint="remove it")
    if run.train.recompute is not Recompute.NONE:
        why = "what is computed again would be computed from the parameters in their own number format"
        yield Fault("train.recompute", f"must be none with {KEY}=exact", got=run.train.recompute, why=why)
    if run.train.lora:
        why = "engines get the merged weights, which are rounded to train.dtype"
        yield Fault("train.lora", f"must be null with {KEY}=exact", got="a rank", why=why)
    if run.train.communication.overlap_param_gather:
        why = "a forward pass copies all parameters to float32 before it begins"
        key = "train.communication.overlap_param_gather"
        yield Fault(key, f"must be false with {KEY}=exact", got="true", why=why)
    if Parallel.parse(run.train.parallel).pp > 1:
        why = "pipeline stages exchange activations in train.dtype"
        yield Fault("train.parallel", f"must have no pipeline stages with {KEY}=exact", got=run.train.parallel, why=why)
