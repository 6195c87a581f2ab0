"""What is asked of Megatron's configuration: every field is one that it has. Factors round as transformers' do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.cpu import platform
from rlframe.megatron.model import transformer
from rlframe.megatron.model.layers import query_key
from rlframe.megatron.model.layers.parts import scale_embeddings
from rlframe.megatron.model.layers.query_key import turns_of, turns_whole_heads
from rlframe.megatron.model.layers.sparse_attention import Indexer
from rlframe.megatron.packed.inputs import packing_of
from rlframe.models.families.base import IndexerDimensions
from rlframe.models.hub import load_family, read_config
from tests.contracts.test_model_family import CONFIGS
from tests.tiny_models import make


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


@pytest.mark.parametrize(("name", "changes"), [("gemma3", {"hidden_size": 96}), ("granite", {})])
def test_embeddings_in_bfloat16_are_scaled_bit_for_bit_as_in_transformers(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model: Any = make(name, tmp_path, **changes).bfloat16()
    token_ids = torch.arange(67)[None]
    stage: Any = torch.nn.Module()
    stage.pre_process = True
    stage.embedding = torch.nn.Embedding.from_pretrained(model.get_input_embeddings().weight)
    scale_embeddings(stage, load_family(tmp_path).architecture(read_config(tmp_path)))
    expected = model.model(token_ids, output_hidden_states=True).hidden_states[0]
    assert torch.equal(stage.embedding(token_ids), expected)


WHOLE_HEADS = {"granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss"}
"""Families whose rotary positions turn whole heads, in all layers alike. Others have windows or layers without
positions, yarn, parts of heads, norms over all heads, gates, or latent attention."""


def test_families_whose_positions_and_norms_are_one_kernel(tmp_path: Path) -> None:
    found = set()
    for name, (config, *_) in CONFIGS.items():
        config.save_pretrained(tmp_path / name)
        architecture = load_family(tmp_path / name).architecture(read_config(tmp_path / name))
        found |= {name} if turns_whole_heads(architecture, tp=1) else set()
        assert not turns_whole_heads(architecture, tp=architecture.num_kv_heads + 1)
    assert found == WHOLE_HEADS


def test_a_teacher_has_angles_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another head, or another base, on the micro-batch that the policy has seen before."""
    monkeypatch.setattr(query_key, "place_in", lambda _: (1, 0))
    monkeypatch.setattr(query_key, "sharing", lambda _: None)
    packing = packing_of(torch.tensor([0, 3, 5], dtype=torch.int32), padded=False)
    positions = torch.arange(3.0)[:, None, None, None]
    # Two models with heads of 4, whose bases differ, and one with heads of 8.
    models = [positions * torch.full((4,), rate) for rate in (1.0, 0.5)] + [positions * torch.ones(8)]
    for angles in [*models, *models]:
        cosine, sine = turns_of(angles, packing, 5)
        expected = angles.flatten(1)[[0, 1, 2, 0, 1], : angles.shape[-1] // 2]
        torch.testing.assert_close(cosine, expected.cos())
        torch.testing.assert_close(sine, expected.sin())
    # Recomputation brings the same angles in another tensor.
    assert turns_of(models[0].detach(), packing, 5)[0] is turns_of(models[0], packing, 5)[0]


def test_keys_of_equal_score_are_chosen_alike_beside_sequences_of_any_length() -> None:
    indexer = Indexer.__new__(Indexer)
    torch.nn.Module.__init__(indexer)
    indexer.shape = IndexerDimensions(num_heads=1, head_dim=1, top_k=3, interleaved=False)
    queries, weights = torch.ones(1, 60, 1, 1), torch.ones(1, 60, 1)
    # No head looks at any key but the fifth.
    keys = torch.full((1, 60, 1), -1.0)
    keys[0, 4] = 1.0
    for length in (11, 12, 40, 60):
        found = indexer._of_grid(queries[:, :length], keys[:, :length], weights[:, :length])[0, 0]
        assert found[10].nonzero()[:, 0].tolist() == [0, 1, 4] and found[1].nonzero()[:, 0].tolist() == [0, 1]
