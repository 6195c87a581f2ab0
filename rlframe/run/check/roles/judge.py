"""Rules about a judge in engines of the run. See the package."""

from collections.abc import Iterator
from dataclasses import fields

from rlframe.attempts.rendering.config import History
from rlframe.environments.base import answers
from rlframe.models import hub, tokenizer
from rlframe.run.check.context import missing, online
from rlframe.run.check.roles.teacher import ENGINES_WITH_EXTRA, plain_faults
from rlframe.run.config import RunConfig
from rlframe.utils.errors import CheckpointError, ConfigError
from rlframe.utils.faults import Fault

IDLE = {
    "temperature": "a judge answers greedily",
    "top_p": "a judge answers greedily",
    "top_k": "a judge answers greedily",
    "min_tokens": "a judge answers greedily",
    "oversample": "a judge is asked about every attempt",
    "oversample_rest": "a judge is asked about every attempt",
    "record": "only the policy's responses are recorded",
    "replay": "only the policy's responses are replayed",
    "cache_after_sync": "a judge's weights do not change",
    "logprobs": "the logprobs of a judge are not trained on",
}
"""Settings of engines that do nothing for a judge, and why."""


def faults(run: RunConfig) -> Iterator[Fault]:
    """Yields a fault for every reason why the judge cannot be used, or has settings without effect."""
    judge = run.judge
    if judge is None or not online(run):
        return
    engine = judge.engine
    if engine.name in ENGINES_WITH_EXTRA and missing(engine.name):
        why = f'pip install "rlframe[{engine.name}]"'
        yield Fault("judge.engine.name", f"needs the package {engine.name}", got=engine.name, why=why, stated=True)
    yield from plain_faults(engine, "judge.engine")
    defaults = {field.name: field.default for field in fields(engine)}
    for name, why in IDLE.items():
        if (value := getattr(engine, name)) != defaults[name]:
            yield Fault(f"judge.engine.{name}", "has no effect", got=value, why=why, hint="remove it")
    if answers(run.environment) and run.rendering.history is History.FORK:
        yield Fault(
            "judge.path",
            "cannot be used with rendering.history=fork",
            why="it is asked about one sequence, and an attempt may have several",
            hint="use the reward judge with an endpoint",
        )
    try:
        folder = hub.resolve(judge.model, key="judge.path")
        architecture = hub.load_family(folder, key="judge.path").architecture(hub.read_config(folder))
        template = tokenizer.load(folder).chat_template
    except ConfigError as error:
        yield from error.faults
        return
    except CheckpointError as error:
        yield Fault("judge.path", said=error)
        return
    yield from (fault.moved({"rollout": "judge.engine"}) for fault in engine.faults(architecture))
    if template is None:
        yield Fault("judge.path", "must name a model with a chat template", got=judge.path)
    limit = engine.sequence_tokens or architecture.max_positions
    if engine.max_tokens >= limit:
        yield Fault(
            "judge.engine.max_tokens",
            f"must be below the {limit} tokens of a question and its reply",
            got=engine.max_tokens,
        )
