"""What the start of a run leaves out: workers are forked, or fresh interpreters where they cannot be, and the driver
imports no code of models."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from omegaconf import OmegaConf
from ray.exceptions import RaySystemError

from rlframe.cluster.config import ADDRESS, ClusterConfig
from rlframe.cluster.environment import FOR_WORKERS
from rlframe.cluster.placement import reserve
from rlframe.cluster.roles import Topology, policy
from rlframe.cluster.runtime import running
from rlframe.cluster.template import ahead, imported
from rlframe.cluster.worker import Worker
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.run import forks
from tests.until import until

MODULE = "xml.sax"
"""A module that a worker has only because the template imported it."""


class Subject(Worker):
    """Tells how its process began."""

    def began(self) -> tuple[dict[str, str | None], int, str, bool]:
        """Variables of every worker, torch's threads, the folder of the program, and whether MODULE was imported."""
        variables = {name: os.environ.get(name) for name in FOR_WORKERS}
        return variables, torch.get_num_threads(), sys.path[0], MODULE in sys.modules


def test_workers_are_forked_unless_they_need_an_environment_of_their_own_or_the_template_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with imported([MODULE]), running(ClusterConfig(), num_devices=2):
        (template,) = (each for each in psutil.Process().children() if "rlframe.cluster.template" in each.cmdline())
        placement = reserve(Topology((policy(2),)), gpu=False, timeout_s=60)

        def group(**variables: str) -> WorkerGroup[Subject]:
            slots = [replace(slot, environment=variables) for slot in placement.policy]
            return WorkerGroup(
                Subject, role="policy", slots=slots, log_folder=str(tmp_path), num_threads=2,
                start_timeout_s=60, call_timeout_s=30,
            )  # fmt: skip

        def parents(group: WorkerGroup[Subject]) -> list[bool]:
            return [psutil.Process(info.pid).ppid() == template.pid for info in group.infos]

        own = group(ITS_OWN="1")
        assert parents(own) == [False, False]
        answers = own.wait(own.ask_all(Subject.began), doing="asking")
        fresh = (FOR_WORKERS | {"OMP_NUM_THREADS": "2"}, 2, answers[0][2], False)
        assert answers == [fresh, fresh]
        own.stop()
        forked = group()
        assert parents(forked) == [True, True]
        # Ray 2.60 ends the process group of a worker that dies, which must not be that of the others.
        assert [os.getpgid(info.pid) for info in forked.infos] == [info.pid for info in forked.infos]
        answers = forked.wait(forked.ask_all(Subject.began), doing="asking")
        assert answers == [(*fresh[:-1], True)] * 2, "otherwise as a fresh one"
        assert os.environ["OMP_NUM_THREADS"] == "7", "the driver's is its own"
        template.kill()
        until(lambda: template.status() == psutil.STATUS_ZOMBIE)
        forked.replace(1)
        assert forked.wait([forked.ask(1, Subject.began)], doing="asking", ranks=[1]) == [fresh]
        late = forked.ask(1, Subject.began)
    # As a thread does that outlives the run, such as a look at a machine that does not answer.
    with pytest.raises(RaySystemError):
        ray.wait([late], timeout=1)
    assert not ray.is_initialized()


def templates() -> list[int]:
    """Processes of templates of this program."""
    return [each.pid for each in psutil.Process().children() if "rlframe.cluster.template" in command(each)]


def command(process: psutil.Process) -> list[str]:
    """Returns the command of a child. Linux shows none for a moment after `Popen` has returned: files that a program
    does not take over are closed, which `Popen` waits for, before its arguments are in place."""
    until(lambda: process.status() == psutil.STATUS_ZOMBIE or process.cmdline())
    return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()


def test_a_template_that_began_ahead_is_the_one_unless_modules_come_from_elsewhere_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ahead([MODULE]):
        (first,) = templates()
        # As Ray does where it is imported.
        monkeypatch.syspath_prepend("ray/thirdparty_files")
        with imported([MODULE]):
            assert templates() == [first]
        assert not templates()
    for modules, folder in (([MODULE, "xml"], "ray/thirdparty_files"), ([MODULE], "elsewhere")):
        with ahead([MODULE]):
            (first,) = templates()
            monkeypatch.syspath_prepend(folder)
            with imported(modules):
                (second,) = templates()
                assert second != first
            assert not templates()
    with pytest.raises(ZeroDivisionError), ahead([MODULE]):
        raise ZeroDivisionError
    assert not templates(), "a refused run leaves none"


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, True),
        ({"rollout": {"name": "vllm"}}, False),
        ({"cluster": {"device": "cuda"}}, False),
        ({"cluster": {"address": "auto"}}, False),
        ({"cluster": {"address": "local"}}, True),
        ({"cluster": {"runtime_env": {"env_vars": {"A": "1"}}}}, False),
        ({"rollout": {"name": "${nowhere}"}}, False),
    ],
    ids=str,
)
def test_a_template_begins_ahead_of_checks_where_a_run_will_have_one(
    changes: dict[str, dict[str, Any]], begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    usual = {"rollout": {"name": "transformers"}, "cluster": {"device": "cpu"}}
    values = OmegaConf.create({name: usual[name] | changes.get(name, {}) for name in usual})
    with forks.begun(partial(OmegaConf.select, values, throw_on_resolution_failure=False)):
        assert len(templates()) == begins
    assert not templates()


def test_the_tokenizer_of_an_embedded_model_does_not_need_the_code_of_models() -> None:
    program = (
        "import sys; from rlframe.models import hub, tokenizer; tokenizer.load(hub.EMBEDDED / 'qwen3_moe_tiny'); "
        "print(sorted({'transformers.modeling_utils', 'transformers.generation.utils'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_a_template_ends_with_its_standard_input_and_says_nothing(tmp_path: Path) -> None:
    # As when the program that has started it is killed.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "template"))
        listener.listen()
        ended = subprocess.run(
            [sys.executable, "-m", "rlframe.cluster.template", str(listener.fileno()), MODULE],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
