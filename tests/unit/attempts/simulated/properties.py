"""What holds of every simulated run, whatever was slow and whatever died."""

from collections.abc import Iterator
from typing import Any

import yaml

from rlframe.attempts.account.ledger import DropReason, read_ledger
from rlframe.rollout.base.config import OversampleRest
from rlframe.tools.audit import Run, faults
from tests.unit.attempts.simulated.settings import Settings
from tests.unit.attempts.simulated.world import Driver, World


def check_run(world: World, driver: Driver) -> None:
    """Checks all of it."""
    audited = ledger_of(world)
    assert list(faults(audited)) == []
    check_timeline(world)
    check_ledger(world, audited)
    check_leases(world, driver, audited)
    check_evaluations(world)
    assert not driver.attempts._open and not driver.attempts._kept or driver.sampler.buffer.open


def ledger_of(world: World) -> Run:
    """Returns the account of the run that the audit makes."""
    settings = world.settings
    content = {
        "steps": settings.steps,
        "prompts_per_step": settings.prompts_per_step,
        "algorithm": {"group_size": settings.group_size},
        "loop": {"max_policy_lag": settings.lag},
        "rollout": {"oversample": settings.oversample, "oversample_rest": settings.rest.value},
    }
    (world.output / "config.yaml").write_text(yaml.safe_dump(content))
    return Run(world.output, read_ledger(world.output))


def check_timeline(world: World) -> None:
    """Checks what the trainer saw: each step once, groups in the order of their leases, none twice, none too old."""
    settings = world.settings
    assert [each.step for each in world.timeline] == list(range(1, settings.steps + 1))
    seen = [group.id for each in world.timeline for group in each.groups]
    assert len(seen) == len(set(seen)), "a group was trained on twice"
    for each in world.timeline:
        ordinals = [int(group.id) for group in each.groups]
        asked = [(group.prompt.id, seeds) for group, seeds in zip(each.groups, each.seeds, strict=True)]
        assert len(asked) == len(set(asked)), "a prompt that comes twice is answered anew"
        assert ordinals == sorted(ordinals) and 0 < len(ordinals) <= settings.prompts_per_step
        for group, (step, epoch, again) in zip(each.groups, each.seeds, strict=True):
            check_age(
                settings, each.step, [version for one in group.rollouts for version in one.versions[one.loss_mask]]
            )
            if settings.lag or settings.oversample > 1:
                assert (step, again) == (int(group.id) // settings.prompts_per_step + 1, 0)
            assert epoch == int(group.id) // settings.num_prompts
            if not settings.in_flight_updates:
                assert all(len({span.version for span in spans_of_turn}) == 1 for spans_of_turn in turns(group))


def check_evaluations(world: World) -> None:
    """Checks that each evaluation that was due is written, once."""
    settings = world.settings
    due = {0, settings.steps, *range(settings.evaluate_every, settings.steps, settings.evaluate_every)}
    assert sorted(world.evaluated) == sorted(due)


def turns(group: Any) -> Iterator[list[Any]]:
    """Yields the spans of each response: those with no observation between them."""
    for rollout in group.rollouts:
        spans: list[Any] = []
        for span in rollout.spans:
            if spans and spans[-1].end != span.start:
                yield spans
                spans = []
            spans.append(span)
        yield spans


def check_age(settings: Settings, step: int, versions: list[int]) -> None:
    """Checks that tokens are neither too old nor from the future."""
    assert all(step - 1 - settings.lag <= version <= step - 1 for version in versions), (step, versions)


def check_ledger(world: World, audited: Run) -> None:
    """Checks that the ledger says what the trainer saw, and why a step was small."""
    settings = world.settings
    said = {(event.trained_at, event.lease): event.tokens for event in audited.trained}
    seen = {
        (each.step, int(group.id)): [rollout.num_sampled_tokens for rollout in group.rollouts]
        for each in world.timeline
        for group in each.groups
    }
    assert said == seen
    for each in world.timeline:
        if len(each.groups) < settings.prompts_per_step:
            assert any(event.step == each.step for event in audited.dropped), f"step {each.step} is small"
    reasons = {DropReason(event.reason) for event in audited.dropped}
    allowed = {DropReason.FAILED} if settings.raises else set()
    allowed |= {DropReason.TIMED_OUT} if settings.deadline else set()
    if settings.dynamic:
        allowed |= {reason for reason in DropReason if reason.startswith("flat")}
    if settings.oversample > 1 and settings.rest is OversampleRest.DROP:
        allowed |= {DropReason.OVERSAMPLED}
    assert reasons <= allowed | {DropReason.LEFT_OVER}
    if settings.num_minibatches == 1:
        assert DropReason.LEFT_OVER not in reasons


def check_leases(world: World, driver: Driver, audited: Run) -> None:
    """Checks that every lease of the surviving timeline ended once, and that no prompt was passed over."""
    leases = {event.lease: event for event in audited.leased}
    numbers = sorted(leases)
    assert numbers == list(range(driver.leases.num_taken)), "leases have a number each"
    prompts = [leases[number] for number in numbers]
    size = world.settings.num_prompts
    for epoch in range(0, len(prompts) // size):
        leased = {event.prompt for event in prompts[epoch * size : (epoch + 1) * size]}
        assert len(leased) == size, f"epoch {epoch} has each prompt once"
    waiting = {each.lease.ordinal for each in driver.sampler.buffer.waiting}
    under_way = {lease.ordinal for lease in driver.sampler.buffer.open}
    assert under_way == waiting, "nothing is sampled beyond the last step"
    assert set(audited.open) == under_way, "every other lease has ended"


def trained_on(world: World) -> list[Any]:
    """Returns all that decides what the steps have learned."""
    return [
        (
            each.step,
            each.seeds,
            [
                (group.id, group.prompt.id, rollout.sample_index, rollout.token_ids.tolist(), rollout.versions.tolist())
                for group in each.groups
                for rollout in group.rollouts
            ],
        )
        for each in world.timeline
    ]
