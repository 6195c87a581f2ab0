"""An engine that drafts with the policy's head for multi-token prediction: a sync brings the head, so that drafts
follow the policy; responses stay those of plain decoding."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlframe.rollout.base.engine import RolloutEngine
from rlframe.rollout.base.speculative import SpeculativeConfig, SpeculativeMethod
from rlframe.types.rollout import Completion, SamplingParams
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.border import DestinationRank
from tests.contracts.engines.kinds import KINDS, param
from tests.contracts.engines.trainer import CLOSE, STOP_TOKENS, nats, perturbed, synced
from tests.mtp_models import followed_by_the_next, make_served, reference_of
from tests.rollout_models import make_requests

pytestmark = pytest.mark.engine
NAME = "glm4_moe"
SPECULATIVE = SpeculativeConfig(method=SpeculativeMethod.MTP, num_tokens=3)
REQUESTS = [
    *make_requests(4, sampling=SamplingParams(temperature=0.0, max_tokens=24, min_tokens=24)),
    *make_requests(4, sampling=SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40, min_tokens=12)),
    *make_requests(4, sampling=SamplingParams(temperature=1.0, top_k=20, max_tokens=40)),
]
HEAD = "model.layers.2."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served(NAME, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[param("vllm")])
def drafting(folder: Path) -> Iterator[RolloutEngine]:
    engine = KINDS["vllm"].start(folder, speculative=SPECULATIVE, with_mtp=True)
    yield engine
    engine.close()


def accepted(engine: RolloutEngine) -> tuple[list[Completion], float]:
    """The responses, and the fraction of drafted tokens that were kept."""
    before = engine.drafts()
    completions = engine.generate(REQUESTS)
    made = engine.drafts() - before
    assert made.num_tokens
    return completions, made.num_accepted / made.num_tokens


def loaded(folder: Path, weights: dict[str, torch.Tensor], scratch: Path) -> Any:
    """The model of the folder with these weights, some of which are buffers in transformers."""
    shutil.copy(folder / "config.json", scratch)
    save_file(weights, scratch / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32)


def test_drafts_follow_the_policy_and_a_head_left_behind_is_felt_in_speed_alone(
    drafting: RolloutEngine, folder: Path, tmp_path: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    new = followed_by_the_next(weights, NAME, logit=14.0)
    behind = new | {name: value for name, value in weights.items() if name.startswith(HEAD)}
    trainer, _, sync = synced(drafting, weights)
    _, at_first = accepted(drafting)
    trainer.train(behind)
    sync.publish(version=1)
    slow, with_stale = accepted(drafting)
    trainer.train(new)
    sync.publish(version=2)
    fast, with_own = accepted(drafting)
    assert max(at_first, with_stale) < 0.1 and with_own > 0.8
    sync.audit()
    policy = loaded(folder, {name: value for name, value in new.items() if not name.startswith(HEAD)}, tmp_path)
    for request, completion, other in zip(REQUESTS, fast, slow, strict=True):
        tokens = completion.token_ids.tolist()
        assert tokens == other.token_ids.tolist()
        torch.testing.assert_close(torch.tensor(completion.logprobs), nats(policy, request, tokens), **CLOSE)
        if request.sampling.temperature == 0 and not set(tokens) & {66, *STOP_TOKENS}:
            assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))


def test_an_audit_looks_at_the_parameters_of_the_drafter_too(drafting: RolloutEngine, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    _, _, sync = synced(drafting, weights)
    (held,) = drafting.on_ranks([RankCall.of(DestinationRank.snapshot)])
    assert any(name.startswith("drafter.model.layers.2.") for name in held)
    sync.audit()


def test_a_policy_without_the_head_cannot_fill_such_an_engine(drafting: RolloutEngine, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    with pytest.raises(WeightSyncFailed, match=r"model\.layers\.2\."):
        synced(drafting, {name: value for name, value in weights.items() if not name.startswith(HEAD)})


def test_drafts_are_the_likeliest_tokens_of_the_head_that_was_trained(
    drafting: RolloutEngine, folder: Path, tmp_path: Path
) -> None:
    """Of each prompt the second token alone, so that it is known of each draft whether it was kept."""
    weights = load_file(folder / "model.safetensors")
    trainer, _, sync = synced(drafting, weights)
    # So much noise that some guesses are right and some are not.
    generator = torch.Generator().manual_seed(3)
    new = {
        name: value + 0.03 * torch.randn(value.shape, generator=generator)
        for name, value in followed_by_the_next(weights, NAME, logit=8.0).items()
    }
    trainer.train(new)
    sync.publish(version=1)
    head, kept, expected = reference_of(NAME, new, folder, tmp_path), [], []
    for request in make_requests(120, sampling=SamplingParams(temperature=0.0, max_tokens=2, min_tokens=2)):
        before = drafting.drafts()
        (completion,) = drafting.generate([request])
        first, second = completion.token_ids.tolist()
        kept.append((drafting.drafts() - before).num_accepted > 0)
        with torch.no_grad():
            guesses = head.logits(torch.tensor([*request.input.token_ids.tolist(), first]), as_in_vllm=True)
        expected.append(int(guesses[-1].argmax()) == second)
    assert 20 <= sum(expected) <= 100
    assert kept == expected


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [param("vllm")])
def test_every_token_is_that_of_plain_decoding_also_after_a_sync(kind: object, folder: Path) -> None:  # noqa: ARG001
    found: list[list[Completion]] = []
    for speculative in (None, SPECULATIVE):
        weights = load_file(folder / "model.safetensors")
        engine = KINDS["vllm"].start(folder, speculative=speculative, with_mtp=speculative is not None)
        trainer, _, sync = synced(engine, weights)
        before = engine.generate(REQUESTS)
        trainer.train(perturbed(followed_by_the_next(weights, NAME, logit=8.0), seed=5))
        sync.publish(version=1)
        found.append([*before, *engine.generate(REQUESTS)])
        assert (engine.drafts().num_accepted > 0) == (speculative is not None)
        engine.close()
    for plain, drafted in zip(*found, strict=True):
        assert drafted.token_ids.tolist() == plain.token_ids.tolist()
        torch.testing.assert_close(torch.tensor(drafted.logprobs), torch.tensor(plain.logprobs), **CLOSE)
