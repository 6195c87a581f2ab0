"""Ranks that load a quantised checkpoint hold what ranks hold that load the same in bfloat16, bit for bit; and what
ranks send to engines in FP8 is the quantisation of whole weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import OptimizerConfig, TrainConfig
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config
from rlframe.models.quantized.blocks import EngineFormat, stored
from rlframe.rollout.served.quantized import quantized_weights
from rlframe.weight_sync.layout.memory import export_tensor
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


def sends_on_rank(rank: int, init_method: str, layout: str, folder: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """What a rank of a trainer sends to engines in FP8 after its weights have changed."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    device = platform.resolve(Device.CPU)
    platform.install(device)
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    setup = TrainerSetup(
        rank=rank, init_method=init_method, device=device, model=ModelConfig(path=folder),
        train=TrainConfig(parallel=layout, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-3)),
        seed=0, temperature=1.0, total_optimizer_steps=10, timeout_s=60, with_reference=False,
    )  # fmt: skip
    trainer = Trainer(setup)
    source = trainer.source(EngineFormat.FP8_BLOCK.channel)
    trainer.negate()
    trainer.prove()
    sent = trainer.quantized[EngineFormat.FP8_BLOCK]
    # As bytes: float8 does not pass between processes.
    return source.layout, {name: value.detach().clone().view(torch.uint8) for name, value in sent.parameters.items()}


@pytest.mark.parametrize("layout", ["d1t2|ffn:d1t1e2", "d1p2", "d1t2|ffn:d1t2"])
def test_ranks_send_the_quantisation_of_what_they_hold(layout: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 256}
    make("qwen3_moe", tmp_path, **wide)
    family = load_family(tmp_path)
    shapes = stored(family.tensors(family.architecture(read_config(tmp_path))))
    negated = ((name, -value) for name, value in load_file(tmp_path / "model.safetensors").items())
    expected = dict(quantized_weights(negated, EngineFormat.FP8_BLOCK, dtype=torch.bfloat16, device="cpu"))
    ranks = run_distributed(sends_on_rank, 2, layout, str(tmp_path))
    assert expected.keys() == shapes.keys()
    for name, shape in shapes.items():
        holders = [(recorded, sent) for recorded, sent in ranks if name in recorded.boxes]
        whole = torch.zeros(shape, dtype=holders[0][0].dtype(name))
        for recorded, sent in holders:
            held = {key: sent[key].view(each.dtype) for key, each in recorded.parameters.items()}
            export_tensor(recorded, held, name, whole)
        assert torch.equal(whole.view(torch.uint8), expected[name].to(whole.dtype).view(torch.uint8)), name
