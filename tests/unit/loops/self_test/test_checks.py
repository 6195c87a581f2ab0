"""Each check passes on what a right run shows, and fails on what its fault shows."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.loops.self_test.checks import find_checks
from rlframe.loops.self_test.checks.memory import slope
from rlframe.loops.self_test.checks.seeds import shared_fraction
from rlframe.loops.self_test.config import SelfTestConfig
from rlframe.loops.self_test.finding import Check, Finding, Verdict, found
from rlframe.loops.self_test.procedure import responses_of
from rlframe.loops.self_test.seen import (
    Facts,
    Repeats,
    Resampled,
    Rounding,
    Seen,
    StepSeen,
    SyncSeen,
    gap_of,
    position_in_response,
)
from rlframe.loops.self_test.verdict import SelfTestFailed, judged, require_no_fault, table, worst, write
from rlframe.ops.packing import pack
from rlframe.types.batch import TrainBatch
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import OFFLINE_VERSION, FinishReason, Group, Rollout
from rlframe.utils.errors import ConfigError
from rlframe.utils.process.memory import MemoryUse

END = 2
FIXED = [[-1.0, -2.0, -0.5], [-3.0]]


def rollout(prompt: Prompt, index: int, response: list[int], nats: list[float]) -> Rollout:
    return Rollout(
        prompt=prompt,
        sample_index=index,
        input=ModelInput((*prompt.input.token_ids.tolist(), *response)),
        loss_mask=[False, False, *[True] * len(response)],
        rollout_logprobs=[0.0, 0.0, *nats],
        versions=[OFFLINE_VERSION] * 2 + [0] * len(response),
        finish_reason=FinishReason.STOP,
        reward=float(index),
    )


def groups() -> list[Group]:
    """Two prompts with two attempts each, the second of which is better."""
    prompts = [Prompt(id=str(number), text="", input=ModelInput((7, 8 + number))) for number in range(2)]
    attempts = [([5, END], [-0.1, -0.3]), ([6, 4, END], [-2.0, -1.0, -0.2])]
    made = [Group.begin(prompt.id, prompt, 2) for prompt in prompts]
    for group in made:
        group.rollouts[:] = [rollout(group.prompt, index, *each) for index, each in enumerate(attempts)]
    return made


def memory_of(own_bytes: int) -> MemoryUse:
    return MemoryUse(resident_bytes=2 * 10**9, resident_peak_bytes=2 * 10**9, own_bytes=own_bytes)


def step(number: int, batch: TrainBatch) -> StepSeen:
    return StepSeen(
        step=number,
        metrics={"train/lr": 0.0},
        weights="same",
        trainer=FIXED,
        engines=[FIXED, FIXED],
        gap=gap_of(batch, batch.rollout_logprobs),
        # Pools fill at first.
        memory={"policy-0": memory_of(10**9 + min(number, 2) * 10**8)},
    )


def clean() -> Seen:
    """What a run shows in which everything is right: the numbers of engine and trainer are the same."""
    packed, algorithm = groups(), Grpo(GrpoConfig(group_size=2))
    batch = pack(packed)
    batch.old_logprobs = batch.rollout_logprobs.clone()
    trained = algorithm.train_batch(batch)
    seen = Seen(
        settings=SelfTestConfig(),
        facts=Facts(online=True, stop_tokens=[END], deterministic=True, needs_reference=True),
        weights="same",
        steps=[step(number, trained) for number in range(1, 6)],
    )
    seen.rollouts, seen.batch = [each for group in packed for each in group.rollouts], trained
    seen.token_weights = algorithm.token_weights(trained)
    seen.logprobs, seen.reference, seen.at_temperature = (batch.rollout_logprobs.clone() for _ in range(3))
    seen.entropies = -batch.rollout_logprobs
    seen.gaps_by_temperature = {0.5: 0.4, 1.0: 1e-6, 2.0: 0.3}
    seen.repeats = Repeats(logprobs=0.0, losses={"train/loss": (0.5, 0.5)}, trained={"train/grad_norm": (1.0, 1.0)})
    seen.resampled = Resampled(first=[[5, 2], [6, 4]], again=[[5, 2], [6, 4]], others=[[9, 2], [6, 4]])
    seen.sync = SyncSeen(moved_nats=3.0, gap_nats=1e-6, disturbed="model.norm.weight", noticed="it has changed")
    return seen


def failed(seen: Seen) -> set[str]:
    """Names of the checks that fail."""
    findings = judged(find_checks(without=[], further=[]), seen)
    return {name for name, own in findings.items() if any(each.verdict is Verdict.FAIL for each in own)}


def test_a_right_run_passes_without_a_warning() -> None:
    findings = judged(find_checks(without=[], further=[]), clean())
    assert worst(findings) is Verdict.PASS, table(findings)
    assert {each.verdict for own in findings.values() for each in own if each.what != "device memory"} == {Verdict.PASS}
    require_no_fault(findings)


def batch_of(seen: Seen) -> TrainBatch:
    assert isinstance(seen.batch, TrainBatch)
    return seen.batch


def last(seen: Seen, **changes: object) -> None:
    seen.steps[-1] = replace(seen.steps[-1], **changes)


def shifted(seen: Seen) -> None:
    """The engine's logprobs stand one token too late."""
    batch = batch_of(seen)
    gap = gap_of(batch, batch.rollout_logprobs.roll(1))
    seen.steps = [replace(each, gap=gap) for each in seen.steps]


def unlikely(seen: Seen) -> None:
    """The engine gives no number to a token that it has sampled in the last step."""
    batch = batch_of(seen)
    logprobs = batch.rollout_logprobs.clone()
    logprobs[batch.loss_mask.nonzero()[0]] = math.nan
    last(seen, gap=gap_of(batch, logprobs))


def masked(seen: Seen, place: int, *, counts: bool) -> None:
    batch_of(seen).loss_mask[place] = counts


def doubled(seen: Seen) -> None:
    """The first sequence stands in the place of the second too."""
    seen.batch = batch = batch_of(seen).select([0, 0, 2, 3])
    seen.token_weights = batch.loss_mask / 10
    seen.logprobs, seen.reference, seen.at_temperature = (batch.rollout_logprobs.clone() for _ in range(3))
    seen.entropies = -batch.rollout_logprobs


def leaking(seen: Seen) -> None:
    seen.steps = [replace(each, memory={"rollout-0": memory_of(10**9 + each.step * 5 * 10**7)}) for each in seen.steps]


FAULTS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "weights move": ("weights", lambda seen: last(seen, weights="other")),
    "a learning rate": ("weights", lambda seen: last(seen, metrics={"train/lr": 1e-6})),
    "the trainer drifts": ("drift", lambda seen: last(seen, trainer=[[-1.0, -2.0, -0.6], [-3.0]])),
    "an engine drifts": ("drift", lambda seen: last(seen, engines=[FIXED, [[-1.0, -2.0, -0.6], [-3.0]]])),
    "logprobs of the token before": ("gap", shifted),
    "an engine of other weights": ("gap", lambda seen: last(seen, engines=[FIXED, [[-1.1, -2.1, -0.6], [-3.0]]])),
    "NaN": ("gap", lambda seen: last(seen, engines=[FIXED, [[math.nan, -2.0, -0.5], [-3.0]]])),
    "NaN of a sampled token": ("gap", unlikely),
    "loss changes": (
        "determinism",
        lambda seen: setattr(seen, "repeats", replace(seen.repeats, losses={"train/loss": (0.5, 0.51)})),
    ),
    "gradients are infinite": (
        "determinism",
        lambda seen: setattr(seen, "repeats", replace(seen.repeats, trained={"train/grad_norm": (math.inf, math.inf)})),
    ),
    "an engine's temperature": ("temperature", lambda seen: seen.gaps_by_temperature.update({1.0: 0.3, 0.5: 0.01})),
    "a trainer's temperature": ("temperature", lambda seen: seen.at_temperature.add_(0.1)),
    "samples are too likely": ("sampling", lambda seen: seen.entropies.add_(4.0)),
    "no seed of a policy that is nearly certain": (
        "seeds",
        # Of 10 tokens 9 come again with any seed.
        lambda seen: setattr(
            seen,
            "resampled",
            Resampled(first=[[5] * 10] * 2, again=[[5] * 9 + [2]] * 2, others=[[5] * 9 + [3]] * 2),
        ),
    ),
    "no seed": ("seeds", lambda seen: setattr(seen, "resampled", replace(seen.resampled, again=[[9, 2], [9, 4]]))),
    "one seed": (
        "seeds",
        lambda seen: setattr(seen, "resampled", replace(seen.resampled, others=seen.resampled.first)),
    ),
    "another reference": ("reference", lambda seen: seen.reference.mul_(1.001)),
    "an older policy": ("importance", lambda seen: batch_of(seen).old_logprobs.mul_(1.001)),
    "a prompt's token in the loss": ("mask", lambda seen: masked(seen, 1, counts=True)),
    "a last token not in the loss": ("mask", lambda seen: masked(seen, 3, counts=False)),
    "no end token": ("mask", lambda seen: setattr(seen, "facts", replace(seen.facts, stop_tokens=[3]))),
    "a doubled sequence": ("batch", doubled),
    "rewards of others": ("batch", lambda seen: setattr(seen, "batch", replace(batch_of(seen), rewards=torch.ones(4)))),
    "advantages of the wrong sign": ("advantages", lambda seen: batch_of(seen).advantages.neg_()),
    "a sync is refused": ("sync", lambda seen: setattr(seen, "sync", SyncSeen(refusal="layers.1 differs"))),
    "a second copy": ("sync", lambda seen: setattr(seen.sync, "gap_nats", 0.5)),
    "nothing arrives": ("sync", lambda seen: setattr(seen.sync, "moved_nats", 0.0)),
    "a blind proof": ("sync", lambda seen: setattr(seen.sync, "noticed", "")),
    "a leak": ("memory", leaking),
    "an error": ("run", lambda seen: setattr(seen, "refusal", "a rank died")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_its_check(name: str) -> None:
    check, plant = FAULTS[name]
    seen = clean()
    plant(seen)
    assert check in failed(seen)


def test_a_reference_without_the_adapter_that_the_policy_begins_with_is_no_fault() -> None:
    seen = clean()
    seen.facts = replace(seen.facts, given_adapter=True)
    assert seen.reference is not None
    seen.reference.mul_(1.1)
    assert failed(seen) == set()


def test_a_reference_that_chooses_other_experts_than_the_replayed_ones_is_no_fault() -> None:
    # As on a CPU in bfloat16, where the engine's router may choose another expert than the trainer's.
    seen = clean()
    assert seen.reference is not None
    seen.reference.mul_(1.001)
    assert failed(seen) == {"reference"}
    seen.batch = replace(batch_of(seen), routes=torch.zeros(len(seen.reference), 1, 2, dtype=torch.uint8))
    assert failed(seen) == set()
    seen.reference.mul_(100.0)
    assert failed(seen) == {"reference"}


def test_a_position_counts_the_tokens_in_the_loss_before_it() -> None:
    batch = batch_of(clean())
    assert position_in_response(batch)[batch.loss_mask].tolist() == [0, 1, 0, 1, 2] * 2


def test_a_gap_is_over_sampled_tokens_by_position() -> None:
    batch = batch_of(clean())
    # 0.1 nats at the first of each response, 0 elsewhere: 4 of 10 tokens.
    first = batch.loss_mask & (position_in_response(batch) == 0)
    gap = gap_of(batch, batch.rollout_logprobs + 0.1 * first)
    assert gap and gap.mean_nats == pytest.approx(0.04) and gap.max_nats == pytest.approx(0.1)
    assert gap.mean_ratio == pytest.approx((4 * math.exp(0.1) + 6) / 10)
    assert gap.bands[0].mean_nats == pytest.approx(0.1) and gap.bands[-1].mean_nats == 0
    assert sum(band.count for band in gap.bands) == 10


def rounded(*, gap_nats: float, moved_nats: float, settings: SelfTestConfig | None = None) -> Verdict:
    """The verdict on a gap in bfloat16, of a model that the last bit of every weight moves by `moved_nats`."""
    seen = clean()
    seen.facts, seen.settings = replace(seen.facts, float32=False), settings or seen.settings
    seen.rounding = Rounding(sampled_nats=moved_nats, fixed_nats=moved_nats)
    batch = batch_of(seen)
    gap = gap_of(batch, batch.rollout_logprobs + gap_nats)
    seen.steps = [replace(each, gap=gap) for each in seen.steps]
    found = judged(find_checks(without=[], further=[]), seen)["gap"]
    return next(each.verdict for each in found if each.what == "gap of sampled tokens")


def test_the_limit_of_a_gap_in_bfloat16_is_what_rounding_does_to_this_model() -> None:
    # SmolLM2-135M, as measured.
    assert rounded(gap_nats=0.039, moved_nats=0.069) is Verdict.PASS
    assert rounded(gap_nats=0.09, moved_nats=0.069) is Verdict.WARN
    assert rounded(gap_nats=0.15, moved_nats=0.069) is Verdict.FAIL
    # A model that rounding hardly moves keeps the least limit, a gap that harms is told whatever moves it.
    assert rounded(gap_nats=0.019, moved_nats=0.001) is Verdict.PASS
    assert rounded(gap_nats=0.039, moved_nats=0.001) is Verdict.WARN
    assert rounded(gap_nats=0.12, moved_nats=0.5) is Verdict.WARN
    assert rounded(gap_nats=0.039, moved_nats=0.5, settings=SelfTestConfig(gap_limit_nats=0.03)) is Verdict.FAIL


def test_growth_counts_if_a_process_grows_in_every_step() -> None:
    assert slope([10, 13, 15, 20]) == 3 and slope([10, 30, 30, 50]) == 0 and slope([10, 8, 7]) == -1.5


def test_responses_are_alike_up_to_their_first_difference() -> None:
    # Whole, 1 of 4, and 2 of 3 because the other one goes on.
    assert shared_fraction([[1, 2], [1, 2, 3, 4], [5, 6]], [[1, 2], [1, 9, 3, 4], [5, 6, 7]]) == pytest.approx(23 / 36)


class Slow(Check):
    """A check of one's own."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """Finds that there are too few steps."""
        yield found("steps", f"{len(seen.steps)}", fail=len(seen.steps) < 10, threshold="10", look="your patience")


def test_own_checks_join_and_others_are_left_out(tmp_path: Path) -> None:
    checks = find_checks(without=["gap"], further=[f"{__name__}:Slow"])
    assert "gap" not in checks and isinstance(checks["Slow"], Slow)
    findings = judged(checks, clean())
    with pytest.raises(SelfTestFailed, match="the self test failed: Slow;"):
        require_no_fault(findings)
    assert "FAIL: Slow, steps: your patience" in table(findings)
    write(tmp_path, findings)
    written = json.loads((tmp_path / "self_test.json").read_text())
    assert written["verdict"] == "FAIL"
    assert [each["value"] for each in written["findings"] if each["check"] == "Slow"] == ["5"]


def test_an_unknown_check_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"self_test.without.*'gab'.*did you mean gap"):
        find_checks(without=["gab"], further=[])


def test_responses_are_compared_by_attempt_whatever_failed_and_whatever_has_several_sequences() -> None:
    first, second = groups()
    forked = rollout(second.prompt, 1, [9], [-1.0])
    forked.sequence = 1
    second.rollouts = [*second.rollouts, forked]
    assert responses_of([first, second], size=2) == [[5, 2], [6, 4, 2], [5, 2], [6, 4, 2, 9]]
    second.rollouts = second.rollouts[1:2]
    assert responses_of([first, second], size=2) == [[5, 2], [6, 4, 2], [], [6, 4, 2]]


def test_a_conversation_of_the_environments_own_may_be_shorter_than_the_prompt() -> None:
    seen = clean()
    for each in seen.rollouts:
        each.prompt = replace(each.prompt, input=ModelInput((1, 2, 3, 4, 5, 6)))
    assert not failed(seen)
