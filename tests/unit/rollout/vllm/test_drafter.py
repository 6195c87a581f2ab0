"""The head for multi-token prediction inside vLLM: a sync fills vLLM's drafter and proves it
(https://github.com/vllm-project/vllm/issues/48296)."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlframe.rollout.served.recording import LoadNotes, checkpoint_tensors, places
from rlframe.rollout.vllm import layout as vllm_layout
from rlframe.rollout.vllm.drafter import DRAFT_NOTES, PREFIX, Drafter, DraftNotes, parameters_with
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.channel import WeightDestination, WeightSync
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.layout.memory import record_loader
from tests.contracts.engines.trainer import Trainer, perturbed
from tests.mtp_models import make_with_mtp
from tests.unit.weight_sync.groups import LocalDestinations

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine  # as test_layout.py

CASES = [
    ("glm4_moe", 2),
    ("deepseek_v3", 1),
    *(pytest.param(name, 2, marks=pytest.mark.thorough) for name in ("deepseek_v3", "glm4_moe_lite", "qwen3_next")),
]


@dataclass
class Rank:
    """A rank of an engine, with everything in memory, and its end of weight sync."""

    policy: Any
    drafter: Drafter
    destination: WeightDestination


def start(folder: Path, tp: int, *, share: bool = True) -> list[Rank]:
    """The ranks of an engine that has loaded `folder`, as vLLM's worker and its proposer make them."""
    from vllm.config import set_current_vllm_config

    vllm_layout.prepare()
    config, found = engine_config(folder, tp), []
    for rank in range(tp):
        mine = copy.deepcopy(config)
        with vllm_layout._stand_in_groups(rank, tp), set_current_vllm_config(mine), torch.no_grad():
            found.append(load(folder, mine, share=share))
    return found


def engine_config(folder: Path, tp: int) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        tensor_parallel_size=tp,
        distributed_executor_backend="mp",
        enforce_eager=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()


def load(folder: Path, config: Any, *, share: bool) -> Rank:
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    checkpoint = load_file(folder / "model.safetensors")
    policy = initialize_model(config)
    model = initialize_model(config, model_config=config.speculative_config.draft_model_config)
    tensors, with_head = checkpoint_tensors(folder), checkpoint_tensors(folder, with_mtp=True)
    layout = record_loader(policy.load_weights, dict(policy.named_parameters()), tensors)
    recorded = record_loader(model.load_weights, dict(model.named_parameters()), with_head, sparse=True)
    for each in (policy, model):
        each.load_weights(iter(checkpoint.items()))
    setattr(model, DRAFT_NOTES, DraftNotes(with_head, recorded, "", 0.0))
    if share:
        proposer = SimpleNamespace(model=model, vllm_config=config, use_local_argmax_reduction=False)
        SpecDecodeBaseProposer._maybe_share_embeddings(proposer, policy)  # pyright: ignore[reportArgumentType]
        SpecDecodeBaseProposer._maybe_share_lm_head(proposer, policy)  # pyright: ignore[reportArgumentType]
    drafter = Drafter.of(model, policy)
    notes = drafter.joined(LoadNotes(tensors, frozenset(places(dict(policy.named_parameters()))), layout, "", 0.0))
    parameters = parameters_with(drafter, dict(policy.named_parameters()))
    end = WeightDestination(
        notes.layout, parameters, tensors=notes.tensors, dtype=torch.float32, device=torch.device("cpu")
    )
    return Rank(policy, drafter, end)


def synced(folder: Path, ranks: list[Rank]) -> tuple[Trainer, WeightSync, dict[str, torch.Tensor]]:
    weights = load_file(folder / "model.safetensors")
    trainer = Trainer(weights)
    sync = WeightSync(trainer, LocalDestinations([[rank.destination for rank in ranks]]), WeightSyncConfig())
    sync.connect()
    return trainer, sync, weights


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name = getattr(request, "param", "glm4_moe")
    make_with_mtp(name, tmp_path)
    if name == "deepseek_v3":
        # Without the word vLLM's routers have no bias. transformers' have it always.
        config = tmp_path / "model" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"topk_method": "noaux_tc"}))
    return tmp_path / "model"


@pytest.mark.parametrize(("folder", "tp"), CASES, indirect=["folder"])
def test_after_a_sync_the_drafter_holds_what_a_fresh_one_would_load(folder: Path, tp: int) -> None:
    ranks = start(folder, tp)
    trainer, sync, weights = synced(folder, ranks)
    sync.calibrate(version=0)
    new = perturbed(weights, seed=3)
    trainer.train(new)
    sync.publish(version=1)
    save_file(new, folder / "model.safetensors", metadata={"format": "pt"})
    for rank, fresh in zip(ranks, start(folder, tp), strict=True):
        expected = dict(fresh.drafter.model.named_parameters())
        held = dict(rank.drafter.model.named_parameters())
        assert held.keys() == expected.keys()
        assert rank.drafter.parameters
        for name, value in expected.items():
            assert torch.equal(held[name], value), name
    sync.audit()


def test_an_embedding_and_an_output_layer_of_the_drafters_own_are_filled_and_proved_too(folder: Path) -> None:
    (rank,) = start(folder, 1, share=False)
    own = {"drafter.model.embed_tokens.weight", "drafter.model.layers.2.shared_head.head.weight"}
    assert own <= rank.drafter.parameters.keys()
    trainer, sync, weights = synced(folder, [rank])
    sync.calibrate(version=0)
    trainer.train(perturbed(weights, seed=3))
    sync.publish(version=1)
    held = rank.drafter.parameters
    for name, source in zip(sorted(own), ("model.embed_tokens.weight", "lm_head.weight"), strict=True):
        assert torch.equal(held[name][:67], trainer.parameters[source])
    with torch.no_grad():
        held["drafter.model.embed_tokens.weight"][3, 5] += 1.0
    with pytest.raises(WeightSyncFailed, match=r"model\.embed_tokens\.weight"):
        sync.audit()


def test_a_stale_head_is_noticed(folder: Path) -> None:
    (rank,) = start(folder, 1)
    trainer, sync, weights = synced(folder, [rank])
    sync.calibrate(version=0)
    name = "drafter.model.layers.2.eh_proj.weight"
    stale = rank.drafter.parameters[name].detach().clone()
    trainer.train(perturbed(weights, seed=3))
    sync.publish(version=1)
    with torch.no_grad():
        rank.drafter.parameters[name].copy_(stale)
    with pytest.raises(WeightSyncFailed, match=r"no longer holds version 1: model\.layers\.2\.eh_proj\.weight"):
        sync.audit()


def test_a_drafter_that_reads_what_nobody_proves_is_refused(folder: Path) -> None:
    (rank,) = start(folder, 1)
    model = rank.drafter.model
    model.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(WeightSyncFailed, match="vLLM's drafter reads extra, which is neither a parameter of"):
        Drafter.of(model, rank.policy)


def test_a_trainer_that_has_dropped_the_head_is_refused(folder: Path) -> None:
    (rank,) = start(folder, 1)
    weights = {name: value for name, value in load_file(folder / "model.safetensors").items() if "layers.2" not in name}
    sync = WeightSync(Trainer(weights), LocalDestinations([[rank.destination]]), WeightSyncConfig())
    with pytest.raises(WeightSyncFailed, match=r"model\.layers\.2\."):
        sync.connect()


def test_buffers_of_the_drafters_own_survive_a_deep_sleep(folder: Path) -> None:
    (rank,) = start(folder, 1)
    own = {name: value.clone() for name, (value, _) in rank.drafter.buffers.items()}
    for value, _ in rank.drafter.buffers.values():
        value.zero_()
    rank.drafter.refill()
    assert all(torch.equal(value, own[name]) for name, (value, _) in rank.drafter.buffers.items())
    assert all(name.startswith(PREFIX) for name in rank.drafter.parameters)
