"""What is asked of Megatron's configuration: every field is one that it has."""

from pathlib import Path

import pytest
import torch

from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.cpu import platform
from rlframe.megatron.model import transformer
from rlframe.models.hub import load_family, read_config
from tests.contracts.test_model_family import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_megatron_knows_every_field_of_every_family(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, part, ours in platform.in_megatron():
        monkeypatch.setattr(owner, part, ours, raising=False)
    CONFIGS[name][0].save_pretrained(tmp_path)
    architecture = load_family(tmp_path).architecture(read_config(tmp_path))
    config = transformer.transformer_config(architecture, TrainConfig(), Parallel(), torch.device("cpu"))
    assert config.num_layers == architecture.num_layers


def test_a_field_that_megatron_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CONFIGS["qwen3_moe"][0].save_pretrained(tmp_path)
    architecture = load_family(tmp_path).architecture(read_config(tmp_path))
    # As if an upgrade had renamed it.
    monkeypatch.setattr(transformer, "moe_fields", lambda _: {"moe_router_top_k": 2})
    with pytest.raises(AssertionError, match="TransformerConfig of this Megatron-Core has no moe_router_top_k"):
        transformer.transformer_config(architecture, TrainConfig(), Parallel(), torch.device("cpu"))
