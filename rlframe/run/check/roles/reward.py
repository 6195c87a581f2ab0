"""Rules about rewards. See the package."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from rlframe.attempts.rendering.config import History
from rlframe.data.text.conversations import Conversation
from rlframe.environments.base import answers, asks
from rlframe.megatron.config.parallel import Parallel
from rlframe.models import hub, inspection, shards
from rlframe.models.checkpoint import CheckpointReader
from rlframe.models.config import HEAD, ModelConfig
from rlframe.models.families.base import Architecture
from rlframe.rewards.base import is_users, part_faults
from rlframe.rewards.runner import try_start
from rlframe.run.check.context import algorithm_of, longest_rollout, online, response_limits
from rlframe.run.check.data import read_all
from rlframe.run.check.roles import vocabulary
from rlframe.run.check.train import gather_faults
from rlframe.run.config import RunConfig
from rlframe.utils import registry
from rlframe.utils.errors import CheckpointError, ConfigError, DataError, RewardError
from rlframe.utils.faults import Fault
from rlframe.utils.nearest import did_you_mean

MODEL = "reward.model.path"
REWARDS = "rlframe.rewards"


def faults(run: RunConfig) -> Iterator[Fault]:
    """Yields a fault for each reward that cannot be built. The user's functions are imported in a separate process,
    because they may exit, print or hang."""
    with run.cluster.runtime_env.here():
        found, needed = _tried(run)
    yield from found
    if any(needed.values()):
        yield from _field_faults(run, needed)


def _tried(run: RunConfig) -> tuple[list[Fault], dict[str, list[str]]]:
    """Returns the faults of the parts, and the fields of a record that each of the user's functions needs."""
    found: list[Fault] = []
    needed: dict[str, list[str]] = {}
    for name, part in run.reward.parts.items():
        wrong = list(part_faults(part, f"reward.parts.{name}"))
        found += wrong
        if wrong or not is_users(part):
            continue
        try:
            needed |= try_start(replace(run.reward, parts={name: part}))
        except RewardError as error:
            # What `pip` brings is only on the nodes, where its workers are started before the first step.
            if not run.cluster.runtime_env.pip:
                found.append(Fault(f"reward.parts.{name}.name", said=error))
    return found, needed


def _field_faults(run: RunConfig, needed: Mapping[str, Sequence[str]]) -> Iterator[Fault]:
    """Rejects functions with parameters that no record of the data fills."""
    if run.data.streaming or not online(run) or not run.trains(online=True):
        return
    try:
        readings = read_all(run.data, algorithm_of(run), seed=run.seed)
    except (ConfigError, DataError):
        # Reported by the topic of the data.
        return
    known = {field for one in readings if isinstance(one, Conversation) for field in one.record.fields}
    for name, fields in needed.items():
        for field in (each for each in fields if known and each not in known):
            yield Fault(
                f"reward.parts.{name}.name",
                "must be a function whose parameters after the answer are fields of the records, or have defaults",
                got=f"{field}, which no record of {run.data.what} has",
                hint=did_you_mean(field, sorted(known)) or f"they have {', '.join(sorted(known)):.200}",
            )


def needing_answers(run: RunConfig) -> list[str]:
    """Returns the names of the reward parts that need an answer, if the run uses rewards."""
    if not online(run):
        return []
    named = {name: part.name for name, part in run.reward.parts.items() if part.name in registry.names(REWARDS)}
    return [name for name, file in named.items() if registry.find(REWARDS, file, key="")[0].needs_answer]


def model_faults(run: RunConfig) -> Iterator[Fault]:
    """Rejects a reward model that cannot score the policy's rollouts."""
    if run.reward.model is None:
        return
    parallel = Parallel.parse(run.reward.model.parallel)
    model = ModelConfig(path=run.reward.model.path, revision=run.reward.model.revision)
    try:
        folder, policy = hub.resolve(model, key=MODEL), hub.resolve(run.model)
        architecture = hub.load_family(folder, key=MODEL).architecture(hub.read_config(folder))
        reader = CheckpointReader(folder)
        outputs = reader.shape(HEAD)[0] if HEAD in reader.names else 0
        broken = inspection.model_faults(folder, num_outputs=outputs)
    except ConfigError as error:
        yield from error.faults
        return
    except CheckpointError as error:
        yield Fault(MODEL, said=error)
        return
    yield from (Fault(MODEL, said=fault) for fault in broken)
    for fault in shards.faults(architecture, **asdict(parallel), **asdict(run.train.context_parallel)):
        yield fault.moved({"train.parallel": "reward.model.parallel"}).noted(f"(of the reward model {model.path})")
    if architecture.num_experts:
        yield from gather_faults(run.train.moe.dispatcher, parallel, key="reward.model.parallel")
    if outputs != 1:
        yield Fault(
            MODEL,
            f"must name a model with a head of one output ({HEAD})",
            got=f"{model.path} with {outputs}",
            hint="algorithm=reward_model trains such a model",
        )
    yield from _length_faults(run, architecture, model.path)
    try:
        yield from vocabulary.faults(run.model, policy, model, folder, key=MODEL)
    except CheckpointError as error:
        yield Fault(MODEL, said=error)


def _length_faults(run: RunConfig, architecture: Architecture, path: str) -> Iterator[Fault]:
    """Checks that the reward model can score every rollout, and an attempt by one sequence."""
    what, longest = longest_rollout(run)
    if not answers(run.environment):
        longest = max(longest, run.data.max_prompt_tokens + max(response_limits(run).values()))
    elif run.rendering.history is History.FORK:
        yield Fault(
            MODEL,
            "cannot be used with rendering.history=fork",
            why="it scores one sequence, and an attempt may have several",
        )
    elif asks(run.environment):
        yield Fault(
            MODEL,
            f"cannot be used with environment.name={run.environment.name}",
            why="it scores one sequence, and an attempt of an agent may have several",
        )
    if architecture.max_positions < longest:
        yield Fault(
            MODEL,
            f"must name a model of at least {longest} positions ({what})",
            got=f"{path} with {architecture.max_positions}",
        )
