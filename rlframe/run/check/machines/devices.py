"""Rules about devices, engines, transports and packages."""

import math
from collections.abc import Iterator

import torch

from rlframe.cluster.config import Device
from rlframe.rollout.base.config import CacheAfterSync
from rlframe.rollout.base.speculative import SpeculativeMethod
from rlframe.run.check import train as check_train
from rlframe.run.check.context import architecture_of, critic_of, device_of, missing, online
from rlframe.run.check.roles import critic as check_critic
from rlframe.run.check.roles import teacher as check_teacher
from rlframe.run.config import Mode, RunConfig
from rlframe.run.roles import topology
from rlframe.utils import registry
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.outside import is_outside
from rlframe.weight_sync.choice import RELOAD
from rlframe.weight_sync.transports.base import PACKAGE as TRANSPORTS
from rlframe.weight_sync.transports.base import RankInfo, find_transport


def devices(run: RunConfig) -> Iterator[Fault]:
    """Checks that this machine has enough CUDA devices. On CPU ranks share cores, and a joined cluster counts its own
    devices."""
    if run.cluster.joins or device_of(run) is Device.CPU:
        return
    if not torch.cuda.is_available():
        yield Fault(
            "cluster.device",
            "must be cpu or auto on a machine without a CUDA device",
            got="cuda",
            hint="set cluster.address to train on the devices of a Ray cluster",
        )
        return
    if run.trains(online=online(run)) and missing("transformer_engine"):
        yield Fault(
            "cluster.device",
            "needs the package transformer-engine to train on GPUs",
            got="cuda",
            hint="python -m rlframe.tools.doctor says how it is installed",
        )
    roles = topology(run, online=online(run), has_critic=critic_of(run) is not None)
    if (needed := roles.num_devices) > torch.cuda.device_count():
        yield Fault(
            "",
            f"{roles} need {needed} CUDA devices, this machine has {torch.cuda.device_count()}",
            hint="use smaller layouts or set cluster.address",
        )


def engine(run: RunConfig) -> Iterator[Fault]:
    """Checks that the engine can hold the model, and can do with its cache what it is told."""
    if online(run) and run.rollout.cache_after_sync is CacheAfterSync.KEEP and not run.rollout.keeps_cache:
        yield Fault(
            "rollout.cache_after_sync",
            f"must be recompute with rollout.name={run.rollout.name}, which cannot keep the keys and values of running "
            "requests over a sync",
            got=run.rollout.cache_after_sync,
        )
    architecture, _ = architecture_of(run)
    if architecture and online(run):
        yield from run.rollout.faults(architecture)
        if device_of(run) is Device.CPU:
            yield from run.rollout.cpu_faults(architecture, trained=run.train.dtype)


def temperatures(run: RunConfig) -> Iterator[Fault]:
    """Checks that the engine samples at the temperatures that are asked for, and at no other ones in their place."""
    if not online(run):
        return
    if run.mode is Mode.GENERATE:
        asked = {"generation.temperature": run.generation.temperature}
    else:
        sets = run.evaluation.sets.items()
        asked = {f"evaluation.sets.{name}.temperature": each.temperature for name, each in sets}
        asked["rollout.temperature"] = run.rollout.temperature
    least, most = run.rollout.temperatures
    for key, temperature in asked.items():
        if temperature and not least <= temperature <= most:
            bounds = f"at least {least:g}" if math.isinf(most) else f"between {least:g} and {most:g}"
            rule = f"must be {bounds} with rollout.name={run.rollout.name}"
            yield Fault(key, rule, got=temperature, why="the engine samples at another one otherwise, or not at all")


def transport(run: RunConfig) -> Iterator[Fault]:
    """Checks that the chosen transport can connect trainer and engines on such devices, assuming one host."""
    wish = run.weight_sync.transport
    if online(run) and wish == RELOAD and not run.rollout.has_loader:
        why = f"rollout.name={run.rollout.name} has no loader of its own"
        yield Fault(
            "weight_sync.transport", "must not be reload", got=wish, why=why, hint="auto chooses one that works"
        )
    if not online(run) or not (is_outside(wish) or wish in registry.names(TRANSPORTS)):
        return
    try:
        carrier = find_transport(wish)
    except ConfigError as error:
        yield from error.faults
        return
    if (device := device_of(run)) is Device.AUTO:
        return
    cuda = device is Device.CUDA
    trainer, engine = (RankInfo(host="here", device=f"GPU {pid}" if cuda else "cpu", pid=pid) for pid in (0, 1))
    if refusal := carrier.refusal(trainer, engine):
        yield Fault(
            "weight_sync.transport",
            f"does not work with cluster.device={run.cluster.device}{'' if run.cluster.joins else ' on this machine'}",
            got=wish,
            why=refusal,
            hint="auto chooses one that works",
            stated=True,
        )


def packages(run: RunConfig) -> Iterator[Fault]:
    """Checks that the packages the run needs are installed. The nodes of a joined cluster are asked for the engine."""
    engine = run.rollout.name
    needed = run.rollout.replay is None and engine in check_teacher.ENGINES_WITH_EXTRA
    if needed and not run.cluster.joins and missing(engine):
        yield Fault(
            "rollout.name",
            f"needs the package {engine}",
            got=engine,
            why=f'pip install "rlframe[{engine}]"',
            stated=True,
        )
    speculative = run.rollout.speculative
    drafts_here = needed and not run.cluster.joins and speculative and speculative.method is SpeculativeMethod.NGRAM
    if drafts_here and not missing(engine) and missing("numba"):
        yield Fault(
            "rollout.speculative.method",
            "needs the package numba, with which vLLM finds n-grams",
            got="ngram",
            hint="pip install numba",
        )
    loggers = {
        "logging.wandb_project": "wandb",
        "logging.mlflow_experiment": "mlflow",
        "logging.trackio_project": "trackio",
    }
    for key, package in loggers.items():
        if getattr(run.logging, key.removeprefix("logging.")) and missing(package):
            yield Fault(
                key, f"needs the package {package}", why=f'pip install "rlframe[{package}]", or set the key to null'
            )


def sleep(run: RunConfig) -> Iterator[Fault]:
    """Rejects sleep and offload settings if no other model shares the GPU."""
    critic = critic_of(run) is not None
    by_critic = critic and run.critic.colocate
    yield from check_train.sleep_faults(run.train, online=online(run), shared=run.cluster.colocate or by_critic)
    if critic and run.critic.train:
        yield from check_critic.sleep_faults(run)
