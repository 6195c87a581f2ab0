"""The templates of examples/launch, filled in as their own comments say, and the Dockerfiles."""

import json
import re
import shlex
import shutil
import subprocess
from itertools import takewhile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlframe.tools.doctor.stack import ENGINES, GPU, TRANSFORMER_ENGINE, allows, package, release
from tests.meta.checkout import ROOT

LAUNCH = ROOT / "examples/launch"
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
INSTRUCTIONS = {"FROM", "SHELL", "RUN", "ENV", "ARG", "WORKDIR", "COPY", "CMD"}


def said_by(command: list[str], *, text: str | None = None) -> str:
    """What a checker of scripts says. Skips where it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    ended = subprocess.run(command, input=text, capture_output=True, text=True)
    return f"{ended.stdout}{ended.stderr}".strip()


def head_comment(file: Path) -> str:
    """The comment at the head of a file, without its marks."""
    lines = takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def rendered() -> dict[str, Any]:
    """What the command in the head of kuberay.yaml gives to Kubernetes."""
    joined = head_comment(LAUNCH / "kuberay.yaml").replace("\\\n", " ")
    (command,) = re.findall(r"^\s*(sed .*) \| kubectl create -f -$", joined, re.MULTILINE)
    ended = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True, check=True)
    return yaml.safe_load(ended.stdout)


def test_the_rayjob_has_fields_that_kuberay_knows() -> None:
    job = rendered()
    jsonschema.validate(job, json.loads(Path(__file__).with_name("kuberay.json").read_text()))
    text = "\n".join(line for line in json.dumps(job, indent=0).splitlines())
    assert not re.search(r"\b(IMAGE|CLAIM|NODES|GPUS|COMMAND)\b", text), "a placeholder is left"
    assert job["spec"]["entrypoint"].startswith("python -m rlframe.main --config-name NAME output=/shared/runs/")
    assert int(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 300
    head, (workers,) = (job["spec"]["rayClusterSpec"][key] for key in ("headGroupSpec", "workerGroupSpecs"))
    assert head["rayStartParams"]["num-gpus"] == "0" and workers["replicas"] == 4
    for group in (head, workers):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert all(each["resources"]["requests"] == each["resources"]["limits"] for each in pod["containers"])


def test_the_shell_of_the_templates_is_sound() -> None:
    sky = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    for script in ((LAUNCH / "slurm.sh").read_text(), sky["setup"], sky["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    assert said_by(["shellcheck", str(LAUNCH / "slurm.sh")]) == ""
    # The virtual environment is made by `setup`.
    assert said_by(["shellcheck", "--shell=bash", "--exclude=SC1090,SC1091", "-"], text=sky["run"]) == ""


def test_the_skypilot_task_has_the_keys_of_its_schema() -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    # sky/utils/schemas.py of skypilot 0.14.1; multiprocess/runs/clusters/test_launchers.py asks the package itself.
    known = {"name", "resources", "num_nodes", "workdir", "envs", "secrets", "file_mounts", "setup", "run"}
    assert task.keys() <= known
    assert all(isinstance(value, str) for value in task["envs"].values())
    assert set(re.findall(r"\$(ARGUMENTS|NAME|PORT)", task["run"])) == task["envs"].keys()
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, with what follows them on one line."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    joined = text.replace("\\\n", " ")
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix[1:])
def test_the_images_have_engines_and_torch_that_go_together(file: Path) -> None:
    engine = file.suffix[1:]
    steps = instructions(file)
    assert steps[0][0] == "FROM" and ":" in steps[0][1] and {name for name, _ in steps} <= INSTRUCTIONS
    pins = dict(text.split("=", 1) for name, text in steps if name == "ARG")
    (ran,) = [one for one in ENGINES if one.name == engine and one.first <= release(pins["ENGINE"]) < one.below]
    assert pins["TORCH"].startswith(f"{ran.torch}.") and (ran.ran, ran.on) == (pins["ENGINE"], GPU)
    assert pins["TRANSFORMER_ENGINE"] == TRANSFORMER_ENGINE and allows(package("ray").spec, pins["RAY"])
    runs = " ".join(text for name, text in steps if name == "RUN")
    assert f'"{engine}==$ENGINE" "torch==$TORCH"' in runs and f".[{engine},cuda,agents]" in runs
    assert all(f"${name}" in runs for name in pins), "a pin that nothing installs"
    job = (LAUNCH / "kuberay.yaml").read_text()
    assert f'rayVersion: "{pins["RAY"]}"' in job, "the image of a RayJob has its Ray"


def test_the_images_differ_in_their_engine_only() -> None:
    vllm, sglang = (file.read_text() for file in sorted(DOCKERFILES, key=lambda file: file.name, reverse=True))
    for ours, theirs in (("vLLM", "SGLang"), ("vllm", "sglang"), ("ENGINE=0.26.0", "ENGINE=0.5.17")):
        vllm = vllm.replace(ours, theirs)
    assert vllm == sglang


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix[1:])
def test_the_images_pass_hadolint(file: Path) -> None:
    # Debian keeps one version of a package; the extras have their versions in pyproject.toml.
    ignored = ["--ignore=DL3008", "--ignore=DL3013", "--ignore=DL3059"]
    assert said_by(["hadolint", *ignored, str(file)]) == ""
