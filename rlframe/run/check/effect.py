"""The table of settings that have an effect only in combination with others. See the package.

A setting that nothing reads is a mistake of the user. Rules about one setting and one circumstance are here, a row
each; `tests/campaigns/without_effect.py` finds settings that need one.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from rlframe.cluster.config import Device
from rlframe.environments.base import answers
from rlframe.loops.alerts.config import ONLINE
from rlframe.megatron.config.optimizer import Schedule
from rlframe.megatron.config.parallel import Parallel
from rlframe.models import hub
from rlframe.rollout.served.config import ServedConfig
from rlframe.run.check.context import algorithm_of, device_of, evaluates, online, samples
from rlframe.run.config import Mode, RunConfig
from rlframe.types.results import Output
from rlframe.utils.faults import Fault


@dataclass(frozen=True, slots=True)
class Need:
    """Condition under which settings have no effect, and so must keep their defaults."""

    keys: tuple[str, ...]
    """Dotted keys, or sections, which stand for all their settings."""
    idle: Callable[[RunConfig], bool]
    """Returns whether the settings have no effect."""
    circumstance: str
    """The circumstance that makes them idle. `{dotted.key}` stands for a value."""
    beside: tuple[str, ...] = ()
    """Sections that `idle` reads, besides those of the keys."""

    @property
    def sections(self) -> frozenset[str]:
        """Sections without which the row cannot be checked."""
        return frozenset(key.partition(".")[0] for key in self.keys + self.beside)

    def faults(self, run: RunConfig) -> Iterator[Fault]:
        """Yields a fault for each of the settings that differs from its default, if they are idle."""
        if not self.idle(run):
            return
        why = self.circumstance.format_map({field.name: getattr(run, field.name) for field in fields(run)})
        for key, value in changed(run):
            if any(key == mine or key.startswith(f"{mine}.") for mine in self.keys):
                yield Fault(key, f"has no effect with {why}", got=value, hint="remove it")


GENERATION = Need(("generation",), lambda run: run.mode is not Mode.GENERATE, "mode={mode}", ("mode",))
SELF_TEST = Need(("self_test",), lambda run: run.mode is not Mode.SELF_TEST, "mode={mode}", ("mode",))
NEEDS = (
    GENERATION,
    SELF_TEST,
    Need(
        (
            "train.num_minibatches",
            "train.epochs_per_batch",
            "evaluation.max_tokens",
            "evaluation.num_engines",
            "evaluation.sets",
            "reward",
            "judge",
            "rollout",
            "environment",
            "rendering",
            "weight_sync",
            "loop",
            "cluster.colocate",
            "logging.samples_per_step",
            *(f"alerts.{name}" for name in sorted(ONLINE)),
        ),
        lambda run: not online(run),
        "algorithm.name={algorithm.name}",
        ("algorithm",),
    ),
    Need(
        ("reward.timeout_s", "reward.workers", "reward.memory_gb"),
        lambda run: online(run) and not run.reward.parts,
        "no reward.parts, to whose functions it applies",
        ("algorithm",),
    ),
    Need(
        (
            "environment.max_turns",
            "environment.max_tokens",
            "environment.on_limit",
            "environment.on_failure",
            "environment.max_retries",
            "environment.workers",
            "environment.step_timeout_s",
            "environment.memory_gb",
            "rendering",
        ),
        lambda run: online(run) and not answers(run.environment),
        "environment.name={environment.name}, which ends every attempt after its first response",
        ("algorithm", "environment"),
    ),
    Need(
        ("algorithm.credit",),
        lambda run: online(run) and not answers(run.environment),
        "environment.name={environment.name}, which ends every attempt after its first response",
        ("environment",),
    ),
    Need(("weight_sync.probe_limit_nats",), lambda run: run.weight_sync.probe_every_steps == 0, "probe_every_steps=0"),
    Need(
        ("weight_sync.bucket_bytes",),
        lambda run: run.weight_sync.transport not in ("auto", "reload"),
        "transport={weight_sync.transport}",
    ),
    Need(
        ("weight_sync.chunk_bytes",),
        lambda run: run.weight_sync.transport in ("shm", "cuda_ipc"),
        "transport={weight_sync.transport}",
    ),
    Need(("profile",), lambda run: not run.profile.steps, "profile.steps=[]"),
    Need(("checkpoint.read_back",), lambda run: not run.checkpoint.verify, "verify=false"),
    Need(("checkpoint.best_mode",), lambda run: run.checkpoint.keep_best == 0, "keep_best=0"),
    Need(
        ("checkpoint.export_dtype", "checkpoint.export_shard_gb"),
        lambda run: not run.checkpoint.export and run.checkpoint.export_every_steps == 0,
        "export=false and export_every_steps=0",
    ),
    Need(
        ("train.context_parallel",),
        lambda run: Parallel.parse(run.train.parallel).cp == 1,
        "train.parallel={train.parallel}, where no two ranks share a sequence",
    ),
    Need(
        ("train.logits_chunk_tokens",),
        lambda run: algorithm_of(run).output is not Output.TOKENS,
        "algorithm.name={algorithm.name}, whose loss reads more than logprobs and entropies",
        ("algorithm",),
    ),
    Need(
        ("train.optimizer.min_lr", "train.optimizer.decay_steps"),
        lambda run: run.train.optimizer.schedule is Schedule.CONSTANT,
        "schedule=constant",
    ),
    Need(
        ("train.optimizer.decay_fraction",),
        lambda run: run.train.optimizer.schedule is not Schedule.WSD,
        "schedule={train.optimizer.schedule}, only with wsd",
    ),
    Need(
        ("rollout.gpu_memory_utilization", "rollout.sleep_level", "rollout.moe_backend"),
        lambda run: isinstance(run.rollout, ServedConfig) and device_of(run) is Device.CPU,
        "engines on a CPU",
        ("cluster",),
    ),
    Need(
        ("rollout.sleep_level",),
        lambda run: samples(run) and isinstance(run.rollout, ServedConfig) and not run.cluster.colocate,
        "cluster.colocate=false, which gives engines devices of their own",
        ("algorithm", "cluster"),
    ),
    Need(
        ("rollout.compile",),
        lambda run: isinstance(run.rollout, ServedConfig) and run.rollout.enforce_eager,
        "rollout.enforce_eager=true",
    ),
    Need(
        ("loop", "evaluation.num_engines"),
        lambda run: online(run) and run.rollout.replay is not None,
        "rollout.replay={rollout.replay}, which samples nothing",
        ("algorithm", "rollout"),
    ),
    Need(
        ("loop.pipeline_depth", "loop.in_flight_updates"),
        lambda run: samples(run) and run.loop.max_policy_lag == 0,
        "max_policy_lag=0",
        ("algorithm", "rollout"),
    ),
    Need(
        ("loop.pipeline_depth", "loop.in_flight_updates", "rollout.cache_after_sync"),
        lambda run: samples(run) and run.loop.max_policy_lag > 0 and run.cluster.colocate,
        "cluster.colocate=true: engines and policy take turns",
        ("algorithm", "cluster"),
    ),
    Need(
        ("evaluation.share", "evaluation.num_engines"),
        lambda run: online(run) and not evaluates(run),
        "data.evaluation_count=0, which holds nothing out",
        ("algorithm", "data", "evaluation"),
    ),
    Need(
        ("evaluation.share",),
        lambda run: not online(run) or (samples(run) and (run.loop.max_policy_lag == 0 or run.cluster.colocate)),
        "engines that do not sample while the policy trains (loop.max_policy_lag above 0, cluster.colocate=false), "
        "where training waits for evaluations",
        ("algorithm", "rollout", "loop", "cluster"),
    ),
    Need(
        ("evaluation.share",),
        lambda run: samples(run) and run.evaluation.num_engines > 0,
        "evaluation.num_engines={evaluation.num_engines}, which share no engine",
        ("algorithm", "rollout"),
    ),
    Need(
        ("weight_sync.hold",),
        lambda run: samples(run) and (run.loop.max_policy_lag == 0 or run.cluster.colocate),
        "engines that do not sample while the policy trains (loop.max_policy_lag above 0, cluster.colocate=false)",
        ("algorithm", "rollout", "loop", "cluster"),
    ),
    Need(
        ("weight_sync.hold",),
        lambda run: samples(run) and run.rollout.max_restarts == 0,
        "rollout.max_restarts=0: no engine comes back",
        ("algorithm", "rollout"),
    ),
    Need(
        ("rollout.oversample_rest",),
        lambda run: samples(run) and run.rollout.oversample == 1,
        "oversample=1",
        ("algorithm",),
    ),
    Need(
        ("rollout.cache_after_sync",),
        lambda run: samples(run) and run.loop.max_policy_lag == 0,
        "loop.max_policy_lag=0: no request runs during a sync",
        ("algorithm", "loop"),
    ),
    Need(
        ("rollout.cache_after_sync",),
        lambda run: samples(run) and run.loop.max_policy_lag > 0 and not run.loop.in_flight_updates,
        "loop.in_flight_updates=false: no request runs during a sync",
        ("algorithm", "loop"),
    ),
    Need(
        ("rollout.enforce_eager",),
        lambda run: run.rollout.name == "sglang" and device_of(run) is Device.CPU,
        "SGLang on a CPU",
        ("cluster",),
    ),
    Need(
        ("data.cache_folder", "data.cache_gb"),
        lambda run: online(run) and not run.data.reads_files,
        "built-in prompts, which are not stored",
        ("algorithm", "data"),
    ),
    Need(
        ("data.max_record_mb",),
        lambda run: not run.data.reads_files,
        "data that is built in",
        ("data",),
    ),
    Need(
        ("evaluation.max_tokens",),
        lambda run: online(run) and not evaluates(run),
        "data.evaluation_count=0, which holds nothing out",
        ("algorithm", "data", "evaluation"),
    ),
)
"""The table. Each row has settings, when they are idle, and the circumstance that makes them idle."""


def changed(config: Any, default: Any = None, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value of every setting that differs from its default. A setting without a default counts as
    changed."""
    for field in fields(config):
        value, dotted = getattr(config, field.name), f"{key}.{field.name}" if key else field.name
        own = field.default_factory() if field.default_factory is not MISSING else field.default
        expected = getattr(default, field.name, own)
        if is_dataclass(value):
            yield from changed(value, expected if is_dataclass(expected) else None, dotted)
        elif value != expected:
            yield dotted, sorted(value) if isinstance(value, dict) else value


def revisions(run: RunConfig) -> Iterator[Fault]:
    """Yields a fault for each revision of a model that does not come from the hub."""
    models = {
        "model": run.model,
        "critic.model": run.critic.model,
        "teacher": run.teacher,
        "judge": run.judge,
        "reward.model": run.reward.model,
    }
    for key, model in models.items():
        if model and model.revision is not None and not hub.is_id(model.path):
            yield Fault(
                f"{key}.revision",
                f"has no effect with {key}.path={model.path}, which is not a hub id",
                got=model.revision,
                hint="remove it",
            )
