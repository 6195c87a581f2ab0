"""The checkpoint that a run starts from: what it must hold."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from rlframe.run.check import check
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError


def faults(start: Path, *overrides: str) -> list[str]:
    """The faults of a run that starts from the folder."""
    try:
        check(load("sft_qwen3_moe_tiny", [f"checkpoint.start_from={start}", *overrides]))
    except ConfigError as error:
        return list(map(str, error.faults))
    return []


def test_it_must_be_a_distributed_checkpoint(tmp_path: Path) -> None:
    start = tmp_path / "training"
    save({"decoder.final_layernorm.weight": torch.ones(2)}, checkpoint_id=start, no_dist=True)
    assert faults(start) == [
        f"checkpoint.start_from must be the folder of a Megatron distributed checkpoint, got {start}, which has no "
        "metadata.json; set model.path for a Hugging Face model"
    ]
    (start / "metadata.json").touch()
    assert faults(start) == []
    # As of a run's checkpoint, which has it in `training`.
    (fault,) = faults(tmp_path)
    assert fault.endswith(f"which has no .metadata and no metadata.json; write checkpoint.start_from={start}")
    (start / ".metadata").write_bytes(b"")
    (fault,) = faults(start)
    assert fault.startswith(f"checkpoint.start_from: {start}/.metadata")


def test_a_head_that_is_kept_must_be_in_it(tmp_path: Path) -> None:
    save({"decoder.final_layernorm.weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").touch()
    found = [fault for fault in faults(tmp_path, "train.mtp.mode=keep") if "start_from" in fault]
    assert found == [
        f"train.mtp.mode must be drop, got keep: checkpoint.start_from={tmp_path} has no head for multi-token "
        "prediction; or start from another checkpoint"
    ]
    save({"mtp_head.norm.weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert not [fault for fault in faults(tmp_path, "train.mtp.mode=keep") if "start_from" in fault]


def test_one_of_adapters_alone_is_no_model(tmp_path: Path) -> None:
    half = "lora.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save({half: torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").touch()
    (fault,) = faults(tmp_path)
    assert fault.endswith("without the model below them; set model.path to that run's model/, which has them merged")
