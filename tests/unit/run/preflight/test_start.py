"""Engines start while models are built where the devices have memory for both at once."""

from pathlib import Path

import torch

from rlframe.run.compose.online import starts_at_once
from rlframe.run.load import load
from rlframe.run.preflight.plan import Plan
from rlframe.run.preflight.start import fits_beside_builds
from tests.unit.run.preflight.models import CUDA, QWEN3_4B, folder, planned


def test_moments_need_memory_at_a_start_that_loads_them(tmp_path: Path) -> None:
    def planned_with(cache: str) -> Plan:
        settings = ("train.offload_optimizer=true", "train.recompute=full", cache)
        found = planned(tmp_path / "a", QWEN3_4B, *settings, device="h100")
        assert found.fits, "once engines and policy take turns"
        return found

    # 10 bytes a parameter are built, and 2 are the engine's: 48.3 of 84.9 GB, with 3.7 for an engine's kernels and
    # graphs and less than 3 for the rest of the ranks. Moments take 8 bytes a parameter, 32.2 GB.
    found = planned_with("rollout.kv_cache_gb=28")
    assert fits_beside_builds(found, resumes=False) and not fits_beside_builds(found, resumes=True)
    assert not fits_beside_builds(planned_with("rollout.kv_cache_gb=37"), resumes=False)


def test_engines_wait_where_they_measure_or_where_the_memory_is_not_known(tmp_path: Path) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    model = f"model.path={folder(tmp_path / 'a', QWEN3_4B)}"

    def at_once(device: torch.device, *settings: str) -> bool:
        return starts_at_once(load("grpo_qwen3_moe", [*CUDA, model, *settings]), device, resumes=False)

    assert at_once(cpu)
    assert at_once(gpu, "cluster.colocate=false")
    assert not at_once(gpu)
    # A cluster that is joined has devices of its own, of which this machine knows nothing.
    assert not at_once(gpu, "rollout.kv_cache_gb=1", "cluster.address=auto")
