"""`ray job submit` of the main job: what it leaves, how it ends, and what `ray job stop` does."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.program import ROOT, metrics
from tests.multiprocess.ray_cluster import NO_TOKEN, free_ports, head, wait_until_open

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="ray[default] is not installed"),
]
RAY = str(Path(sys.executable).with_name("ray"))
RLFRAME = ["python", "-m", "rlframe.main", "--config-name", "sft_qwen3_moe_tiny"]
SETTINGS = {"steps": 3, "model.random_init": "true", "logging.progress": "false", "logging.tensorboard": "false"}
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def jobs() -> Iterator[str]:
    """Where a Ray cluster takes jobs."""
    (port,) = free_ports(1)
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    options = ["--include-dashboard=true", f"--dashboard-port={port}", "--dashboard-host=127.0.0.1"]
    with head(cpus=2, options=options, environment=environment):
        wait_until_open(port)
        yield f"http://127.0.0.1:{port}"


def ray(*arguments: str, jobs: str) -> subprocess.CompletedProcess[str]:
    """What a `ray job` command said."""
    environment = os.environ | NO_TOKEN | {"RAY_ADDRESS": jobs}
    return subprocess.run(
        [RAY, "job", *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip


def command(folder: Path | str, **settings: object) -> list[str]:
    """The command of a job whose output is `folder`."""
    return [*RLFRAME, f"output={folder}", *(f"{key}={value}" for key, value in (SETTINGS | settings).items())]


def test_a_relative_output_in_the_jobs_folder_is_refused_with_the_reason(jobs: str, tmp_path: Path) -> None:
    ended = ray("submit", "--working-dir", str(tmp_path), "--", *command("outputs/run"), jobs=jobs)
    assert ended.returncode == 1, ended.stdout
    assert "output must not be in the working folder of a Ray job, got outputs/run: /tmp/ray/" in ended.stdout
    assert "output=/shared/runs/NAME" in ended.stdout and "exit code 2" in ended.stdout


def test_a_job_leaves_its_files_in_the_output_and_its_log_with_ray(jobs: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    lines = [json.dumps({"prompt": f"{number}?", "response": "yes"}) for number in range(40)]
    (work / "data.jsonl").write_text("\n".join(lines))
    given = command(tmp_path / "run", **{"data.path": "data.jsonl", "data.evaluation_count": 4})
    ended = ray("submit", "--submission-id", "whole", "--working-dir", str(work), "--", *given, jobs=jobs)
    assert ended.returncode == 0, ended.stdout
    assert len(metrics(tmp_path / "run")) >= 3 and (tmp_path / "run/model/model.safetensors").is_file()
    assert "3 steps done" in ray("logs", "whole", jobs=jobs).stdout
    assert "`ray job stop` kills this run 3 s after its SIGTERM" in ended.stdout
    assert '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}' in ended.stdout


def test_a_sweep_is_one_job_whose_runs_lie_in_its_output(jobs: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    given = [*command(tmp_path / "runs", steps=1), "-m", "seed=1,2"]
    ended = ray("submit", "--working-dir", str(work), "--", *given, jobs=jobs)
    assert ended.returncode == 0, ended.stdout
    for number in (0, 1):
        assert (tmp_path / f"runs/{number}/model/model.safetensors").is_file()
    assert re.search(rf"seed=2 .*{tmp_path}/runs/1", ended.stdout), ended.stdout


def test_a_stopped_job_saves_if_it_is_given_the_time(jobs: str, tmp_path: Path) -> None:
    environment = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}})
    given = command(tmp_path / "run", steps=100000)
    ray("submit", "--no-wait", "--submission-id", "long", "--runtime-env-json", environment, "--", *given, jobs=jobs)
    deadline = time.monotonic() + PATIENCE_S
    while not any("train/loss" in line for line in metrics(tmp_path / "run")):
        assert time.monotonic() < deadline, ray("logs", "long", jobs=jobs).stdout
        time.sleep(0.2)
    ray("stop", "long", jobs=jobs)
    said = ray("logs", "long", jobs=jobs).stdout
    saved = re.search(r"stopped by SIGTERM: saved after step (\d+) of 100000; the same command resumes", said)
    assert saved, said
    assert "kills this run" not in said
    assert (tmp_path / f"run/checkpoints/step-{int(saved[1]):08d}").is_dir()
