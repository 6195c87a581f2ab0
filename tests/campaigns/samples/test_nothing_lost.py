"""Runs with random delays and deaths, on a simulated clock: nothing is lost, nothing is doubled, the lag is kept.

A failure names its seed, which repeats it: `SEEDS=123 pytest tests/campaigns/samples/test_nothing_lost.py`.
"""

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlframe.attempts.account.ledger import read_ledger
from tests.unit.attempts.simulated.properties import check_run, trained_on
from tests.unit.attempts.simulated.settings import Settings, drawn, drawn_with_oversampling
from tests.unit.attempts.simulated.world import World, simulated

NUM_SEEDS = 500
PARTS = 10
USUAL = (1,)
PART = [pytest.param(part, marks=[] if part in USUAL else pytest.mark.thorough) for part in range(PARTS)]
"""`make test` tries 50 seeds of each kind here, beside part 0 in tests/unit/attempts/simulated/test_few_seeds.py;
`make test-thorough` all."""
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A ledger is flushed to the disk at every step, which takes longer there than everything else."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for the outputs of runs."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as made:
        yield Path(made)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keeps the messages about restarts, of which there are thousands."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def try_seed(seed: int, folder: Path, settings_of: Callable[[int], Settings]) -> World:
    """Runs a seed, and checks what has become of it."""
    settings = settings_of(seed)
    with simulated(settings, folder / f"{seed}") as (world, driver):
        check_run(world, driver)
    if settings.lag == 0 and settings.oversample == 1 and not settings.deadline:
        with simulated(settings.as_plain(), folder / f"{seed}-plain") as (plain, _):
            assert trained_on(world) == trained_on(plain), "delays and deaths change nothing at lag 0"
    return world


def try_seeds(
    seeds: list[int], folder: Path, settings_of: Callable[[int], Settings] = drawn
) -> tuple[Counter[str], Counter[str]]:
    """Runs seeds, and returns how often each kind of process died, and each kind of event was."""
    deaths: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = try_seed(seed, folder, settings_of)
        except BaseException as error:
            error.add_note(f"seed {seed}: {settings_of(seed)}")
            raise
        deaths.update(death.split()[0] for death in world.deaths)
        events.update(getattr(event, "reason", event.event) for event in read_ledger(world.output).events)
    return deaths, events


@pytest.mark.parametrize("part", PART)
def test_nothing_is_lost_or_doubled_and_the_lag_is_kept(part: int, folder: Path) -> None:
    chosen = [int(seed) for seed in os.environ.get("SEEDS", "").split()]
    deaths, _ = try_seeds(chosen or list(range(part, NUM_SEEDS, PARTS)), folder)
    assert chosen or set(deaths) == {"engine", "runner", "trainer", "driver"}


@pytest.mark.parametrize("part", PART)
def test_so_it_is_with_groups_that_a_step_does_not_wait_for(part: int, folder: Path) -> None:
    chosen = [int(seed) for seed in os.environ.get("SEEDS", "").split()]
    seeds = chosen or list(range(part, NUM_SEEDS, PARTS))
    deaths, events = try_seeds(seeds, folder, drawn_with_oversampling)
    assert chosen or set(deaths) == {"engine", "runner", "trainer", "driver"}
    assert chosen or (events["carried"] > 20 and events["oversampled"] > 20)
