"""What the doctor says about machines, given their facts."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from rlframe.tools.doctor import main
from rlframe.tools.doctor.checks import CHECKS, findings
from rlframe.tools.doctor.facts import Device, Disk, Facts, Finding, Gpus, Hub, Limit, Ray, System
from rlframe.tools.doctor.gpus import pairs_without_access, parsed
from rlframe.tools.doctor.nodes import Node, differences
from rlframe.tools.doctor.program import together
from rlframe.tools.doctor.stack import CPU, ENGINES, GPU, PACKAGES, TRANSFORMER_ENGINE, allows, package, release

H200 = Device(name="NVIDIA H200", memory_gib=140.4, capability=(9, 0))
UNLIMITED = Limit(soft=None, hard=None)
PACKAGES_OF_GPUS = {
    "torch": "2.11.0+cu130",
    "megatron-core": "0.19.2",
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "transformer-engine": TRANSFORMER_ENGINE,
    "transformer-engine-torch": TRANSFORMER_ENGINE,
    "vllm": "0.26.0",
    "cudnn": "9.19.0.56",
    "rlframe": "0.1.0",
}
GOOD = Facts(
    packages=PACKAGES_OF_GPUS,
    gpus=Gpus(devices=(H200, H200), driver="580.95.05", torch_cuda="13.0", headers=("cudnn.h", "nccl.h")),
    system=System(
        host="a",
        python="3.12.3",
        memory_gib=1000.0,
        shm_gib=500.0,
        limits={"nofile": Limit(soft=1 << 20, hard=1 << 20), "memlock": UNLIMITED, "nproc": UNLIMITED},
        has_infiniband=True,
        ephemeral_ports=28232,
        is_clock_kept=True,
    ),
    disk=Disk(folder="/runs", free_gib=900.0, mib_per_s=1500.0),
    hub=Hub(cache="/cache", endpoint="https://hub.example"),
    ray=Ray(),
)
"""A machine with two GPUs on which nothing is to be mended."""


def without(name: str) -> Facts:
    return replace(GOOD, packages={key: value for key, value in PACKAGES_OF_GPUS.items() if key != name})


def with_packages(**packages: str) -> Facts:
    return replace(GOOD, packages=PACKAGES_OF_GPUS | {key.replace("_", "-"): value for key, value in packages.items()})


def on_cpu(**packages: str) -> Facts:
    own = {name: PACKAGES_OF_GPUS[name] for name in ("megatron-core", "ray", "transformers")}
    return replace(GOOD, packages=own | {"torch": "2.13.0+cpu"} | packages, gpus=Gpus())


def with_part(part: str, **values: Any) -> Facts:
    return replace(GOOD, **{part: replace(getattr(GOOD, part), **values)})


def limited(name: str, soft: int, hard: int | None) -> Facts:
    return with_part("system", limits=GOOD.system.limits | {name: Limit(soft=soft, hard=hard)})


def test_a_machine_that_is_well_has_nothing_to_mend() -> None:
    assert list(findings(GOOD)) == []
    assert list(findings(on_cpu(vllm="0.32.0", sglang="0.5.23"))) == []


CASES = [
    (without("ray"), True, "ray is missing", 'pip install "ray[default]>=2.50,<2.61"'),
    (
        with_packages(**{"megatron-core": "0.20.0"}),
        True,
        "megatron-core must be >=0.16.1,<0.20, found 0.20.0",
        'pip install "megatron-core>=0.16.1,<0.20"',
    ),
    (
        replace(GOOD, system=replace(GOOD.system, python="3.11.7")),
        True,
        "megatron-core must be >=0.16.1,<0.17, found 0.19.2",
        'pip install "megatron-core>=0.16.1,<0.17"',
    ),
    (
        with_packages(vllm="0.32.0"),
        True,
        "vllm 0.32.0 is built against torch 2.13, found 2.11.0+cu130",
        'pip install "vllm==0.26.0"',
    ),
    (
        on_cpu(vllm="0.33.0", torch="2.14.0+cpu"),
        False,
        "vllm 0.33.0 has not been run with rlframe on a CPU; 0.32.0 has, with torch 2.13",
        'pip install "vllm==0.32.0"',
    ),
    (
        with_packages(transformer_engine="2.21.0"),
        True,
        "transformer-engine must be >=2.9,<2.21, found 2.21.0",
        'pip install "transformer-engine[core_cu13,pytorch]>=2.9,<2.21"',
    ),
    (
        without("transformer-engine-torch"),
        True,
        "transformer-engine is installed without its part for torch",
        'pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.20.2"',
    ),
    (
        without("transformer-engine"),
        True,
        "transformer-engine is missing, without which ranks cannot train on GPUs",
        'pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]==2.20.2"',
    ),
    (
        with_packages(flash_attn="2.8.5"),
        False,
        "transformer-engine 2.20.2 uses flash-attn 2.1.1 to 2.8.4 and passes over 2.8.5",
        "pip uninstall --yes flash-attn",
    ),
    (
        with_packages(cudnn="9.10.2.21"),
        True,
        "transformer-engine needs cuDNN 9.12 or newer, found 9.10.2.21",
        'pip install "nvidia-cudnn-cu13>=9.12"',
    ),
    (
        replace(without("transformer-engine-torch"), gpus=replace(GOOD.gpus, headers=("nccl.h",))),
        False,
        "no cudnn.h is found",
        "pip install nvidia-cudnn-cu13",
    ),
    (
        with_part("gpus", driver="570.86.10"),
        True,
        "torch is built for CUDA 13.0, which needs driver 580 or newer, found 570.86.10",
        "sudo apt-get install --yes nvidia-driver-580-server && sudo reboot",
    ),
    (
        with_part("gpus", devices=(), driver="", error="Failed to initialize NVML: Driver/library version mismatch"),
        True,
        "the driver does not answer: Failed to initialize NVML",
        "sudo dmesg | grep -i nvrm",
    ),
    (
        replace(with_packages(torch="2.11.0+cpu"), gpus=replace(GOOD.gpus, torch_cuda="")),
        True,
        "torch 2.11.0+cpu is built for CPUs, and this machine has 2 GPUs",
        'pip install --force-reinstall "torch==2.11.0"',
    ),
    (
        with_part("gpus", devices=(H200, replace(H200, name="NVIDIA V100", capability=(7, 0)))),
        True,
        "GPU 1, NVIDIA V100, has compute capability 7.0; torch needs 7.5",
        "export CUDA_VISIBLE_DEVICES=0",
    ),
    (
        with_part("gpus", devices=(H200, replace(H200, name="NVIDIA H100"), H200)),
        False,
        "the GPUs are of several kinds, NVIDIA H100, NVIDIA H200: all wait for the slowest",
        "export CUDA_VISIBLE_DEVICES=0,2",
    ),
    (with_part("gpus", without_peer_access=("0-1",)), False, "GPUs 0-1 cannot read each other's memory", "sudo sed -i"),
    (
        with_part("system", shm_gib=0.0625),
        True,
        "/dev/shm has 0.0625 GiB, and Ray's objects want 200 GiB: NCCL and engines fail",
        "sudo mount -o remount,size=200G /dev/shm",
    ),
    (with_part("system", shm_gib=64.0), False, "/dev/shm has 64 GiB", "sudo mount -o remount,size=200G /dev/shm"),
    (limited("nofile", 1024, 1 << 20), True, "the limit nofile is 1024, and a node of GPUs needs", "ulimit -n 65536"),
    (limited("nofile", 20000, 20000), False, "the limit nofile is 20000", "echo '* - nofile 65536' | sudo tee"),
    (limited("nproc", 4096, None), False, "the limit nproc is 4096", "ulimit -u 16384"),
    (limited("memlock", 65536, 65536), True, "the limit memlock is 65536 bytes, and InfiniBand", "ulimit -l unlimited"),
    (with_part("system", ephemeral_ports=1000), False, "the kernel gives out 1000 ports", "sudo sysctl -w net.ipv4"),
    (with_part("system", is_clock_kept=False), False, "nothing keeps this machine's clock", "sudo timedatectl"),
    (with_part("disk", free_gib=20.0), False, "/runs has 20 GiB left", "du -xh -d 2 /runs"),
    (with_part("disk", free_gib=1.0), True, "/runs has 1 GiB left", "du -xh -d 2 /runs"),
    (
        with_part("disk", mib_per_s=100.0),
        False,
        "/runs is written with 100 MiB/s, so that 16 GB take 153 s",
        "python -m",
    ),
    (with_part("disk", error="Read-only file system"), True, "/runs cannot be written: Read-only", "python -m rlframe"),
    (with_part("hub", is_writable=False), True, "the cache of the hub, /cache, cannot be written", "export HF_HOME="),
    (with_part("hub", error="timed out"), False, "the hub at https://hub.example cannot", "export HF_HUB_OFFLINE=1"),
    (with_part("ray", auth_mode="token"), True, "RAY_AUTH_MODE is token, and there is no", "ray get-auth-token --gen"),
    (with_part("ray", address="h:6379"), False, "Ray at h:6379 is not asked for a token", "ray get-auth-token --gener"),
    (
        with_part("ray", is_running=True, auth_mode="token", has_token=True),
        False,
        "a Ray cluster runs on this machine, and runs start a Ray of their own",
        "export RAY_ADDRESS=auto",
    ),
]


@pytest.mark.parametrize(("facts", "is_problem", "what", "mend"), CASES, ids=[case[2][:40] for case in CASES])
def test_each_fault_of_a_machine_is_told_with_the_command_that_mends_it(
    facts: Facts, is_problem: bool, what: str, mend: str
) -> None:
    found = [one for one in findings(facts) if one.what.startswith(what)]
    assert len(found) == 1, [one.what for one in findings(facts)]
    assert found[0].is_problem is is_problem and found[0].mend.startswith(mend)


def test_every_check_has_a_machine_on_which_it_finds_something() -> None:
    assert all(any(list(check(facts)) for facts, *_ in CASES) for check in CHECKS)


@pytest.mark.parametrize(
    ("sglang", "needed"),
    # The last release of each torch and the first of the next.
    [("0.5.11", "2.11"), ("0.5.17", "2.11"), ("0.5.18", "2.13"), ("0.5.21.post1", "2.13"), ("0.5.22", "2.14")],
)
def test_an_sglang_built_against_another_torch_is_named(sglang: str, needed: str) -> None:
    # Its kernels are a package of their own, without which any torch is right.
    bare = on_cpu(sglang=sglang, torch="2.12.0")
    assert not [one for one in findings(bare) if "built against" in one.what]
    compiled = replace(bare, packages=bare.packages | {"sglang-kernel": "0.4.5"})
    said = [one.what for one in findings(compiled) if "built against" in one.what]
    assert said == [f"sglang {sglang} is built against torch {needed}, found 2.12.0"]
    fitting = replace(compiled, packages=compiled.packages | {"torch": f"{needed}.0+cu130"})
    assert not [one for one in findings(fitting) if "built against" in one.what]


def test_the_table_is_that_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    stated = {"": project["dependencies"], **project["optional-dependencies"]}
    for one in PACKAGES:
        if not one.spec:
            continue
        marker = f"; python_version {one.python[:-4]} '{one.python[-4:]}'" if one.python else ""
        wanted = Requirement(one.requirement + marker)
        assert wanted in [Requirement(text) for text in stated[one.extra]], one.name


def test_what_pyproject_allows_has_run_on_gpus() -> None:
    for name in ("vllm", "sglang"):
        on_gpu = [one for one in ENGINES if one.name == name and one.on == GPU]
        assert len(on_gpu) == 1 and allows(package(name).spec, on_gpu[0].ran)
        assert not any(allows(package(name).spec, one.ran) for one in ENGINES if one.name == name and one.on == CPU)
        assert all(one.first <= release(one.ran) < one.below for one in ENGINES if one.ran)
    assert allows(package("transformer-engine").spec, TRANSFORMER_ENGINE)


def test_the_answers_of_nvidia_smi_are_understood() -> None:
    text = "NVIDIA H200, 143771, 9.0, 580.95.05\nNVIDIA H200, 143771, 9.0, 580.95.05\n"
    assert parsed(text) == ((H200, H200), "580.95.05")
    # Of a partition of a GPU it says no memory.
    assert parsed("NVIDIA A100, [N/A], 8.0, 550.1\n")[0][0].memory_gib == 0.0
    assert parsed("") == ((), "")
    rows = [" GPU0\tX\tOK\tNS", " GPU1\tOK\tX\tCNS", " GPU2\tNS\tCNS\tX"]
    matrix = "\n".join(["\x1b[4m \tGPU0\tGPU1\tGPU2\x1b[0m", *rows, "", "Legend:", "  OK = Status Ok"])
    assert pairs_without_access(matrix) == ("0-2", "1-2")


def test_nodes_that_differ_are_named() -> None:
    other = replace(
        with_packages(ray="2.59.0"),
        environment={"NCCL_IB_DISABLE": "1"},
        system=replace(GOOD.system, python="3.11.7"),
        gpus=replace(GOOD.gpus, devices=(H200,), driver="570.1"),
        disk=replace(GOOD.disk, marks=()),
    )
    seen = replace(GOOD, disk=replace(GOOD.disk, marks=("mark",)))
    nodes = [
        Node(name="a", facts=seen, skew_s=0.9, uncertainty_s=0.01),
        Node(name="b", facts=other, skew_s=-3.0, uncertainty_s=0.5),
        Node(name="c", facts=seen, skew_s=2.0, uncertainty_s=1.5),
        Node(name="d", error="it ran out of memory"),
    ]
    found = list(differences(nodes, mark="mark"))
    assert [(one.node, one.what, one.is_problem) for one in found] == [
        ("d", "it does not answer: it ran out of memory", True),
        ("b", "ray is 2.59.0, and 2.60.0 on 2 of the others", True),
        ("b", "python is 3.11, and 3.12 on 2 of the others", True),
        ("b", "the driver is 570.1, and 580.95.05 on 2 of the others", True),
        ("b", "the set of GPUs is 1 NVIDIA H200, and 2 NVIDIA H200 on 2 of the others", False),
        ("b", "NCCL_IB_DISABLE is 1, and not set on 2 of the others", True),
        ("b", "its clock is 3.0 s behind, give or take 0.5 s", True),
        ("b", found[-1].what, False),
    ]
    assert found[-1].what.startswith("what is written to /runs elsewhere is not seen there")
    assert found[1].mend == 'pip install "ray[default]==2.60.0"  # there, before `ray start`'
    assert found[5].mend.startswith("unset NCCL_IB_DISABLE ")
    assert list(differences([nodes[0], replace(nodes[0], name="e")], mark="mark")) == []


def test_what_several_nodes_have_is_told_once() -> None:
    one = Finding(what="w", mend="m", node="a")
    assert together([one, replace(one, what="x"), replace(one, node="b")]) == [
        replace(one, node="a, b"),
        replace(one, what="x"),
    ]


def test_this_machine_is_told_as_text_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--folder", str(tmp_path / "runs"), "--no-network"])
    text = capsys.readouterr().out
    assert "hub  " in text and ": reached;" not in text, "nobody asked it"
    assert f"disk  {tmp_path}: " in text and " problems, " in text.splitlines()[-1]
    assert main(["--folder", str(tmp_path), "--no-network", "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    assert told["nodes"][0]["facts"]["disk"]["folder"] == str(tmp_path)
    assert status == int(any(one["is_problem"] for one in told["findings"]))
    assert list(tmp_path.iterdir()) == []
