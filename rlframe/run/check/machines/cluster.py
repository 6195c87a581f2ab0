"""Rules about a joined Ray cluster and about Ray's jobs."""

from collections.abc import Iterator
from pathlib import Path

from rlframe.cluster.joined import job
from rlframe.cluster.joined.needs import Needs
from rlframe.megatron.worker import environment
from rlframe.run.check.context import algorithm_of, online, samples
from rlframe.run.check.roles import teacher as check_teacher
from rlframe.run.config import RunConfig
from rlframe.utils.faults import Fault

JOB_FOLDERS = "working_dir_files"
"""Name of the folder of the working folders of Ray's jobs, which Ray deletes when it likes."""


def address(run: RunConfig) -> Iterator[Fault]:
    """Checks that the address is one at which a driver joins a cluster."""
    where = run.cluster.joins or ""
    key = "cluster.address" if run.cluster.address else "RAY_ADDRESS"
    if where.startswith("ray://"):
        yield Fault(
            key,
            "must be auto or host:port",
            got=where,
            why="with Ray's client this process would not be part of the cluster",
            hint="run the same command on a node of the cluster, or submit it with `ray job submit`",
        )
    elif where.startswith(("http://", "https://")):
        yield Fault(
            key,
            "must be auto or host:port",
            got=where,
            why="that is where `ray job submit` sends jobs",
            hint="submit the same command with `ray job submit`, or unset it",
        )


def job_folder(run: RunConfig) -> Iterator[Fault]:
    """Refuses an output in the working folder of a Ray job: Ray deletes it, and another job does not find it."""
    folder = Path(run.output).absolute()
    if JOB_FOLDERS in folder.parts:
        yield Fault(
            "output",
            "must not be in the working folder of a Ray job",
            got=run.output,
            why=f"{folder} is a copy that Ray deletes, and a changed file gives the next job another one, which finds "
            "no checkpoint",
            hint="give the job an absolute folder that every node shares: "
            "`ray job submit ... -- python -m rlframe.main ... output=/shared/runs/NAME`",
        )


def variables(run: RunConfig) -> Iterator[Fault]:
    """Refuses environment variables of workers that options of training set."""
    for name in run.cluster.runtime_env.env_vars.keys() & environment.variables(run.train).keys():
        yield Fault(
            f"cluster.runtime_env.env_vars.{name}",
            "is set by rlframe for each rank",
            why="it follows from the options of `train`",
            hint="remove it",
        )


def job_environment(run: RunConfig) -> Iterator[Fault]:
    """Refuses what the runtime environment of the Ray job sets too."""
    for name in job.conflicts(run.cluster.runtime_env.for_ray()):
        yield Fault(
            f"cluster.runtime_env.{name}",
            "is set by the runtime environment of this Ray job too",
            hint="set it in one place: here, or with `ray job submit --runtime-env-json`",
        )


def needs(run: RunConfig, folder: Path) -> Needs:
    """Returns what the nodes of a joined cluster must have."""
    models = {"model.path": run.model}
    if run.trains(online=online(run)) and algorithm_of(run).requirements.critic:
        models["critic.model.path"] = run.critic_model
    if run.judge:
        models["judge.path"] = run.judge.model
    if run.teacher and run.trains(online=online(run)):
        models["teacher.path"] = run.teacher.model
    local = {key: Path(model.path).expanduser() for key, model in models.items()}
    engine = run.rollout.name
    return Needs(
        output=folder,
        files={key: str((path / "config.json").absolute()) for key, path in local.items() if path.is_dir()},
        packages={"rollout.name": engine} if samples(run) and engine in check_teacher.ENGINES_WITH_EXTRA else {},
    )
