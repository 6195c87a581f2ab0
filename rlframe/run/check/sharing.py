"""Rules about train.share_prompts. See the package."""

from collections.abc import Iterator

from rlframe.algorithms.base import Algorithm
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.models.families.base import Architecture
from rlframe.utils.faults import Fault

KEY = "train.share_prompts"


def faults(
    train: TrainConfig, algorithm: Algorithm, architecture: Architecture | None, *, name: str, cuda: bool
) -> Iterator[Fault]:
    """Rejects shared prompts where no sequences share any, and where attention cannot read those of others.

    Args:
        name: of the algorithm.
        cuda: whether training runs on CUDA.
    """
    if not train.share_prompts:
        return
    if algorithm.online and algorithm.group_size == 1:
        yield Fault(
            KEY,
            "has no effect with algorithm.group_size=1: no two rollouts answer one prompt",
            got="true",
            hint="remove it",
        )
    elif not algorithm.online and algorithm.requirements.data != "preferences":
        yield Fault(
            KEY,
            f"has no effect with algorithm.name={name}, whose sequences share no prompt",
            got="true",
            hint="remove it",
        )
    if cuda and train.dtype is Dtype.FLOAT32:
        yield Fault(
            KEY,
            "is not supported with train.dtype=float32 on CUDA",
            got="true",
            why="no fused attention computes float32, and Transformer Engine's other one masks keys by the lengths of "
            "queries (2.20, get_full_mask)",
            hint="use train.dtype=bfloat16",
        )
    if (cp := Parallel.parse(train.parallel).cp) > 1:
        yield Fault(
            KEY,
            f"is not supported with context parallelism (c{cp}), which cuts each sequence into chunks of its own",
            got="true",
            hint="use tensor or pipeline parallelism in train.parallel: shared prompts leave fewer tokens to cut",
            stated=True,
        )
    if architecture:
        yield from architecture_faults(architecture, model="model.path")


def architecture_faults(architecture: Architecture, *, model: str) -> Iterator[Fault]:
    """Rejects models whose layers need more of a shared prompt than its keys and values.

    Args:
        model: setting that names the model.
    """
    if what := unsupported(architecture):
        yield Fault(
            KEY,
            f"is not supported for {architecture.model_type} of {model}, which has {what}",
            got="true",
            hint="use train.share_prompts=false: prompts are then computed for each rollout",
            stated=True,
        )


def unsupported(architecture: Architecture) -> str:
    """Returns what of the architecture cannot read a shared prompt yet; nothing if it can."""
    parts = {
        "gated delta nets, which pass a state from token to token": architecture.gated_delta_net,
        "latent attention": architecture.latent,
        "sliding windows": any(architecture.window_layers),
        "attention in chunks": any(architecture.chunk_layers),
        "attention sinks": architecture.sinks,
        "queries that are scaled by their position": architecture.query_scaling,
    }
    return next((what for what, present in parts.items() if present), "")
