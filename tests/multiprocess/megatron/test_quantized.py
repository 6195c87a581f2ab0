"""Ranks that load a quantised checkpoint hold what ranks hold that load the same in bfloat16, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import OptimizerConfig, TrainConfig
from rlframe.models.config import ModelConfig
from tests.multiprocess.distributed import run_distributed
from tests.quantized_models import quantize
from tests.tiny_models import make

pytestmark = pytest.mark.thorough
SOURCES = {"fp8": "qwen3_moe", "mxfp4": "gpt_oss", "int4": "deepseek_v3"}
LAYOUTS = ["d2e2", "d1t2"]


def on_rank(rank: int, init_method: str, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The parameters of one rank for each layout and model folder."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    found = []
    for index, (layout, folder) in enumerate(cases):
        setup = TrainerSetup(
            rank=rank, init_method=f"{init_method}{index}", device=device, model=ModelConfig(path=folder),
            train=TrainConfig(parallel=layout, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3)),
            seed=0, temperature=1.0, total_optimizer_steps=10, timeout_s=60, with_reference=False,
        )  # fmt: skip
        trainer = Trainer(setup)
        found.append({name: value.detach().clone() for name, value in trainer.model.parameters.items()})
        parallel.shutdown()
    return found


def test_parameters_of_every_rank_are_those_of_the_plain_folder(tmp_path: Path) -> None:
    cases = []
    for form, name in SOURCES.items():
        folders = [str(tmp_path / form / what) for what in ("plain", "quantized")]
        make(name, tmp_path / form / "source", **({"moe_intermediate_size": 64} if form == "int4" else {}))
        quantize(tmp_path / form / "source", form, plain=Path(folders[0]), quantized=Path(folders[1]))
        cases += [(layout, folder) for layout in LAYOUTS for folder in folders]
    assert {Parallel.parse(layout).world for layout in LAYOUTS} == {2}
    for rank in run_distributed(on_rank, 2, cases):
        for plain, quantized in zip(rank[0::2], rank[1::2], strict=True):
            assert plain.keys() == quantized.keys()
            assert all(torch.equal(plain[name], quantized[name]) for name in plain)
            assert any(bool(value.any()) for value in plain.values())
