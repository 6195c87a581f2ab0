"""The templates of examples/launch in action, as far as one machine without their schedulers allows."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.multiprocess.program import DEADLINE_S, ROOT, metrics

pytestmark = pytest.mark.thorough
STAND_INS = {
    # Runs the task on this machine, which is the first and only node.
    "srun": '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n',
    "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then hostname; else echo "$@" >>"$STAND_INS/said"; fi\n',
}
SETTINGS = ["model.random_init=true", "logging.progress=false", "logging.tensorboard=false", "cluster.device=cpu"]


def start_job(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The body of the Slurm job on one node, with stand-ins for `srun` and `scontrol`."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    for name, text in STAND_INS.items():
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{stand_ins}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "STAND_INS": str(stand_ins),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": socket.gethostname(),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": "2",
        "HEAD_ADDRESS": "127.0.0.1",
        "REQUEUE": "1",
    }
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            ["bash", str(ROOT / "examples/launch/slurm.sh"), "--config-name", "sft_qwen3_moe_tiny",
             f"output={folder}/run", *SETTINGS, *arguments],
            env=environment, stdout=said, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip


def end(job: subprocess.Popen[str], started: list[psutil.Process]) -> None:
    """Ends what is left of a job."""
    for process in started:
        if process.is_running():
            process.kill()
    job.wait(timeout=20)


def test_the_slurm_job_runs_and_ends_with_the_code_of_the_run(tmp_path: Path) -> None:
    job = start_job(tmp_path, "steps=2")
    started: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 2 * DEADLINE_S
        while job.poll() is None and time.monotonic() < deadline:
            started = psutil.Process(job.pid).children(recursive=True) or started
            time.sleep(0.2)
        assert job.wait(timeout=20) == 0, (tmp_path / "said").read_text()
        assert psutil.wait_procs(started, timeout=30)[1] == [], "the job's Ray ends with it"
    finally:
        end(job, started)
    assert [line["step"] for line in metrics(tmp_path / "run") if "train/loss" in line] == [1, 2]


def test_a_slurm_job_whose_time_is_over_saves_and_is_queued_again(tmp_path: Path) -> None:
    job = start_job(tmp_path, "steps=100000")
    try:
        deadline = time.monotonic() + 2 * DEADLINE_S
        while not any("train/loss" in line for line in metrics(tmp_path / "run")):
            assert job.poll() is None and time.monotonic() < deadline, (tmp_path / "said").read_text()
            time.sleep(0.2)
        started = psutil.Process(job.pid).children(recursive=True)
        # As `--signal=B:TERM@600` does: to the batch shell alone.
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=2 * DEADLINE_S) == 143, (tmp_path / "said").read_text()
    finally:
        end(job, started)
    assert "stopped by SIGTERM: saved after step" in (tmp_path / "said").read_text()
    assert list((tmp_path / "run/checkpoints").glob("step-*"))
    assert (tmp_path / "bin/said").read_text() == f"requeue {os.getpid()}\n"


def test_the_skypilot_task_passes_its_own_schemas() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed", exc_type=ImportError)
    import jsonschema

    task = yaml.safe_load((ROOT / "examples/launch/skypilot.yaml").read_text())
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    jsonschema.validate(task["file_mounts"]["/shared"], schemas.get_storage_schema())
