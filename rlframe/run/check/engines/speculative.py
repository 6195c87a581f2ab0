"""Rules about `rollout.speculative`. See the package."""

from collections.abc import Iterator

from rlframe.models import hub
from rlframe.models.config import ModelConfig
from rlframe.rollout.base.speculative import SpeculativeMethod
from rlframe.run.check.roles import vocabulary
from rlframe.run.config import RunConfig
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault

KEY = "rollout.speculative"
HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
"""Keys of config.json that say how many multi-token prediction heads a checkpoint has."""


def syncs_head(run: RunConfig) -> bool:
    """Returns whether engines draft with the policy's head for multi-token prediction, which weight sync brings."""
    speculative = run.rollout.speculative
    return speculative is not None and speculative.method is SpeculativeMethod.MTP and run.train.mtp.keeps


def faults(run: RunConfig, *, cuda: bool) -> Iterator[Fault]:
    """Checks that engines can draft, and that drafts fit the model.

    Args:
        cuda: whether engines run on CUDA.
    """
    speculative = run.rollout.speculative
    if speculative is None:
        return
    synced = not speculative.has_weights or syncs_head(run)
    yield from run.rollout.speculative_faults(cuda=cuda, shares_devices=run.cluster.colocate, synced=synced)
    if run.train.moe.router_replay:
        yield Fault(
            KEY,
            "must be null with train.moe.router_replay=true",
            got=f"method={speculative.method}",
            why="nobody has shown that engines return the routes of the tokens that they accept, and not of drafts",
        )
    if speculative.method is SpeculativeMethod.MTP:
        yield from _head_faults(run)
    if speculative.model is not None:
        yield from _model_faults(run, speculative.model)


def _head_faults(run: RunConfig) -> Iterator[Fault]:
    """Checks that the checkpoint has heads, with weights."""
    try:
        config = hub.read_config(hub.resolve(run.model))
    except (ConfigError, CheckpointError):
        return  # said by the rules about the model
    inner = config.get("text_config") or config
    if not any(inner.get(key) for key in HEADS):
        why = f"{run.model.path} has no heads for multi-token prediction: none of {', '.join(HEADS)} in config.json"
        yield Fault(f"{KEY}.method", "must be ngram or draft_model", got="mtp", why=why)
    elif run.model.random_init and not syncs_head(run):
        yield Fault(
            f"{KEY}.method",
            "must not be mtp with model.random_init=true and train.mtp.mode=drop",
            got="mtp",
            why="there is no checkpoint from which heads could be loaded",
            hint="or set train.mtp.mode=train",
        )


def _model_faults(run: RunConfig, path: str) -> Iterator[Fault]:
    """Checks that the draft model exists and has the policy's tokens."""
    key, draft = f"{KEY}.model", ModelConfig(path=path)
    if path in hub.embedded_names():
        yield Fault(key, "must name a model with weights", got=path, why="embedded models have none")
        return
    try:
        folder = hub.resolve(draft, key=key)
    except ConfigError as error:
        yield from error.faults
        return
    try:
        ours = hub.resolve(run.model)
    except (ConfigError, CheckpointError):
        return  # said by the rules about the model
    try:
        sizes = [(each.get("text_config") or each).get("vocab_size") for each in map(hub.read_config, (ours, folder))]
        yield from vocabulary.faults(run.model, ours, draft, folder, key=key)
    except CheckpointError as error:
        yield Fault(key, said=error)
        return
    if sizes[0] != sizes[1]:
        why = "engines compare tokens of both by their numbers"
        yield Fault(key, f"must have vocab_size={sizes[0]}, as {run.model.path} has", got=sizes[1], why=why)
