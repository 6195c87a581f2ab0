"""Weights that nothing trains and copies of those that are trained: a bit that changes on one rank is named."""

import pathlib
from typing import Any

import torch

from rlframe.megatron.config.lora import LoraConfig
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.config import ModelConfig
from rlframe.utils.errors import WeightsDrifted
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.test_layouts import Weighted
from tests.multiprocess.megatron.training.test_training_options import microbatch
from tests.tiny_models import make


def on_rank(rank: int, init_method: str, folder: pathlib.Path) -> dict[str, str]:
    """What rank 0 or 1 says of each fault, which is on rank 1; nothing where it says nothing."""
    from rlframe.cluster.config import Device  # noqa: PLC0415 - the platform must be installed before Megatron
    from rlframe.megatron.cpu import platform  # noqa: PLC0415

    platform.install(platform.resolve(Device.CPU))
    from rlframe.megatron.messages.setup import RankSetup  # noqa: PLC0415
    from rlframe.megatron.worker import parallel  # noqa: PLC0415
    from rlframe.megatron.worker.forward_only import ForwardOnly  # noqa: PLC0415
    from rlframe.megatron.worker.trainer import Trainer, TrainerSetup  # noqa: PLC0415

    said = {}
    model = ModelConfig(path=str(folder / "qwen3"))
    common: dict[str, Any] = {"rank": rank, "device": torch.device("cpu"), "model": model, "temperature": 1.0}
    common["timeout_s"] = 60

    def trainer(lora: LoraConfig | None, **options: Any) -> Any:
        return Trainer(TrainerSetup(
            init_method=f"{init_method}-{len(said)}", train=TrainConfig(parallel="d2", lora=lora), seed=0,
            total_optimizer_steps=5, **common, **options,
        ))  # fmt: skip

    def during(name: str, who: Any, value: torch.Tensor) -> None:
        """A proof while one bit of rank 1's copy is another, after one while it is not."""
        assert proof(who) == ""
        word = value.detach().view(-1).view(torch.int32)
        word[7] ^= rank
        said[name] = proof(who)
        word[7] ^= rank

    both = trainer(None, with_reference=True, teacher=model)
    during("trained", both, both.model.parameters["decoder.final_layernorm.weight"])
    during("reference", both, both.reference.kept[0])
    during("teacher", both, next(iter(both.teacher.parameters.values())))
    parallel.shutdown()
    adapters = trainer(LoraConfig(rank=2), with_reference=False)
    during("base", adapters, next(iter(adapters.merged.base.values())))
    parallel.shutdown()
    whole = trainer(LoraConfig(rank=2, modules_to_save=["lm_head"]), with_reference=False)
    head = whole.model.parameters["output_layer.weight"].clone()
    whole.train([[microbatch([5, 7], rank)]], Weighted(), first_step=0)
    assert not torch.equal(whole.model.parameters["output_layer.weight"], head) and proof(whole) == ""
    during("beside", whole, next(iter(whole.merged.base.values())))
    parallel.shutdown()
    frozen = ForwardOnly(RankSetup(init_method=f"{init_method}-f", train=TrainConfig(parallel="d2"), **common))
    during("frozen", frozen, next(iter(frozen.model.parameters.values())))
    parallel.shutdown()
    return said


def proof(who: Any) -> str:
    torch.distributed.barrier()
    try:
        who.prove()
    except WeightsDrifted as error:
        return str(error)
    return ""


def test_a_changed_bit_is_named_with_tensor_and_rank(tmp_path: pathlib.Path) -> None:
    make("qwen3", tmp_path / "qwen3")
    here, there = run_distributed(on_rank, 2, tmp_path)
    assert here["trained"] == there["trained"]
    assert "decoder.final_layernorm.weight is held by ranks 0 and by ranks 1 with different contents" in here.pop(
        "trained"
    )
    assert set(here.values()) == {""}
    for what, name in {"reference": "the reference", "teacher": "the teacher", "base": "the base of the adapters",
                       "beside": "the base of the adapters", "frozen": str(tmp_path / "qwen3")}.items():  # fmt: skip
        assert there[what].startswith(f"{name} has changed in the memory of rank 1 since it was loaded"), there[what]
        assert there[what].endswith(", 1 tensors in all"), there[what]
