"""A simulated run: the real sampler, leases, buffer, ledger and attempts, in a driver that does what the loop does."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig
from rlframe.attempts.account.leases import Leases
from rlframe.attempts.account.ledger import LEDGER, Ledger, read_ledger
from rlframe.attempts.buffer import Buffer
from rlframe.attempts.fleet import Attempts
from rlframe.attempts.runner import Ended
from rlframe.attempts.turns import Task
from rlframe.data.cursor import Cursor
from rlframe.loops.evaluation.evaluate import EvaluationBeside
from rlframe.loops.evaluation.sets import EvaluationSet
from rlframe.loops.sampling.buffered import BufferedSampler
from rlframe.rollout.base.seeds import request_seed
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Group, Rollout, SamplingParams
from rlframe.utils.errors import WorkerDied
from tests.unit.attempts.simulated.clock import SimulatedLoop, Stuck
from tests.unit.attempts.simulated.machines import OBSERVATION, Engine, RunnerProcess, Workers, response_to
from tests.unit.attempts.simulated.settings import Settings

LIMIT_S = 6_000.0
"""Simulated seconds after which a run counts as stuck."""
MOST_PHASES = 2_000
SAMPLING = SamplingParams(max_tokens=8)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
HELD_OUT = [Prompt(id=f"held{index}", text="", input=ModelInput((2, index))) for index in range(4)]


class DriverDied(BaseException):
    """The driver ends at once; no handler of the program runs."""


class TrainerDied(WorkerDied):
    """A trainer rank has died."""


class Fleet:
    """Does what a RolloutGroup does, for simulated engines."""

    role = "rollout"

    def __init__(self, world: "World", *, version: int):
        self._world = world
        settings = world.settings
        self.version, self.audit, self.sleeps = version, None, False
        self.setup = SimpleNamespace(rollout=SimpleNamespace(sampling=lambda: SAMPLING))
        engines = [self._engine() for _ in range(settings.num_engines)]
        self.workers = Workers(engines, world.until, world.rng, self._engine)

    def _engine(self) -> Engine:
        world = self._world
        return Engine(world.loop, world.settings, world.rng, version=self.version, sleeps=lambda: self.sleeps)

    def sleep(self) -> None:
        """Gives the devices to the policy. Requests of attempts that have run out of time may have to be ended."""
        if self._world.settings.deadline:
            self.abort()
            self._world.elapse(0.05)
        assert not any(engine.is_busy for engine in self.workers.actors if engine.alive), (
            "engines sleep when they are idle"
        )
        self.sleeps = True

    def wake(self) -> None:
        self.sleeps = False

    def replace_dead(self, engine: int, death: WorkerDied) -> None:
        assert not self.workers.actors[engine].alive, f"engine {engine} is alive and well"
        self._world.elapse(2.0)
        self.workers.replace(engine)

    def retry_after_restart(self, work: Callable[[], Any]) -> Any:
        return work()

    def abort(self) -> None:
        for engine in self.workers.actors:
            engine.abort()

    def publish(self, version: int) -> None:
        """Revives dead engines and brings all to a version, one after the other."""
        self._world.elapse(0.5)
        self.version = version
        for place, engine in enumerate(self.workers.actors):
            self._world.elapse(0.1)
            if engine.alive:
                engine.commit(version)
            else:
                self.workers.replace(place)


class SimulatedAttempts(Attempts):
    """The real class on simulated processes. Notes what it starts, and checks what it returns."""

    def __init__(self, world: "World", rollout: Fleet):
        self.rollout: Any = rollout
        self._world = world
        self._setup: Any = SimpleNamespace(rollout=SimpleNamespace(max_restarts=1000))
        self.num_restarts = 0
        self._events: Counter[str] = Counter()
        self._open: dict[str, Task] = {}
        self._kept: dict[str, Ended] = {}
        self._known: list[Any] = []
        self._aside: dict[str, Ended] = {}
        self._paused = False
        self._activity = None

        def make() -> RunnerProcess:
            return RunnerProcess(world.loop, world.settings, world.rng)

        self.workers: Any = Workers([make()], world.until, world.rng, make)
        self.begun: dict[str, tuple[int, int, int]] = {}
        """Arguments of the seeds by the id of the group."""
        self._begin()

    def start(self, tasks: list[Task]) -> None:
        for task in tasks:
            when = (task.step, task.epoch, task.again)
            assert self.begun.setdefault(task.group.id, when) == when, "a task that begins again keeps its seeds"
        super().start(tasks)

    def pause(self) -> tuple[list[Task], list[Ended]]:
        tasks, ended = super().pause()
        assert all(self._open[task.group.id] is task for task in tasks), "a runner that dies now loses no tokens"
        return tasks, ended

    def look(self, *, wait_s: float) -> list[Ended]:
        size = self._world.settings.group_size
        found = super().look(wait_s=wait_s)
        for ended in found:
            expected = 1 if ended.group.prompt.id.startswith("held") else size
            assert len(ended.group.rollouts) + sum(map(len, ended.lost.values())) == expected, "an attempt has no end"
            check_tokens(ended.group, *self.begun[ended.group.id])
            if ended.group.prompt.id.startswith("held"):
                del self.begun[ended.group.id]
        return found

    def finish(self, names: Collection[str]) -> dict[str, Ended]:
        found = super().finish(names)
        for ended in found.values():
            assert len(ended.group.rollouts) + sum(map(len, ended.lost.values())) == 1
            check_tokens(ended.group, *self.begun.pop(ended.group.id))
        return found


def check_tokens(group: Group, step: int, epoch: int, again: int) -> None:
    """Checks that each rollout has the answers to its own requests, and the versions of one policy after the other."""
    indices = [rollout.sample_index for rollout in group.rollouts]
    assert indices == sorted(set(indices)), "each attempt is there once"
    for rollout in group.rollouts:
        rest, turn = rollout.token_ids[len(rollout.prompt.input) :].tolist(), 0
        while rest:
            seed = request_seed(
                run_seed=0,
                prompt_id=group.prompt.id,
                sample_index=rollout.sample_index,
                step=step,
                epoch=epoch,
                again=again,
                turn=turn,
            )
            answer = response_to(seed)
            assert rest[: len(answer)] == answer, f"turn {turn} of group {group.id} has another request's answer"
            rest, turn = rest[len(answer) :], turn + 1
            if rest:
                assert rest[: len(OBSERVATION)] == OBSERVATION, f"group {group.id}, turn {turn}: {answer}, then {rest}"
                rest = rest[len(OBSERVATION) :]
        assert turn > 0, "an attempt without a response"
        sampled = rollout.versions[rollout.loss_mask].tolist()
        assert sampled == sorted(sampled), "versions never fall within an attempt"


class Scorer:
    """A reward model that takes its time, during which the policy waits."""

    def __init__(self, world: "World"):
        self._world = world

    def score(self, rollouts: list[Rollout]) -> None:
        self._world.elapse(0.2)
        for rollout in rollouts:
            rollout.reward += 0.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run goes on from."""

    step: int
    data: dict[str, Any]
    folder: Path
    """What was in flight."""
    begun: dict[str, tuple[int, int, int]]
    """The seeds' arguments of the groups that were begun."""


@dataclass(slots=True)
class Trained:
    """The groups of one step, as the trainer saw them."""

    step: int
    groups: list[Group]
    seeds: list[tuple[int, int, int]]
    """Step, epoch and number of the round of each group."""


@dataclass(slots=True)
class World:
    """What outlives every process: the clock, the disk, and what the test notes."""

    settings: Settings
    output: Path
    loop: SimulatedLoop = field(init=False)
    rng: Random = field(init=False)
    checkpoint: Checkpoint | None = None
    timeline: list[Trained] = field(default_factory=list)
    """The steps that were done and not undone."""
    evaluated: list[int] = field(default_factory=list)
    """The steps whose evaluations are in the run's files."""
    deaths: list[str] = field(default_factory=list)
    driver: "Driver | None" = None
    trainer_is_dead: bool = False
    driver_is_dead: bool = False
    num_folders: int = 0

    def __post_init__(self) -> None:
        self.loop = SimulatedLoop(limit_s=LIMIT_S)
        self.rng = Random(self.settings.seed)

    def new_folder(self) -> Path:
        """Returns a folder for a checkpoint."""
        self.num_folders += 1
        folder = self.output / f"state-{self.num_folders}"
        folder.mkdir()
        return folder

    def until(self, work: Any) -> Any:
        """Runs the simulation until `work` is done, on which the driver waits."""
        result = self.loop.run_until_complete(work)
        if self.driver_is_dead:
            raise DriverDied
        return result

    def elapse(self, mean_s: float) -> None:
        """Lets time pass, in which the driver does something."""
        self.until(asyncio.sleep(0.0 if self.settings.plain else self.rng.expovariate(1 / mean_s)))

    def run(self) -> "Driver":
        """Runs all steps, in as many drivers as it takes, and returns the last one."""
        reaper = self.loop.create_task(self._reap())
        while True:
            self.driver_is_dead = self.trainer_is_dead = False
            try:
                self.driver = Driver(self)
                self.driver.finish()
                break
            except DriverDied:
                self._bury(reaper)
        reaper.cancel()
        return self.driver

    def _bury(self, reaper: "asyncio.Task[None]") -> None:
        """Ends what the dead driver had under way. Half a line may stand in the ledger."""
        done_steps = max((each.step for each in self.timeline), default=0)
        said = read_ledger(self.output).events if (self.output / LEDGER).exists() else []
        assert all(event.step <= done_steps for event in said), "the ledger says only what was done"
        for task in asyncio.all_tasks(self.loop) - {reaper}:
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        if self.rng.random() < 0.5:
            with (self.output / LEDGER).open("a", encoding="utf-8") as file:
                file.write('{"step": 1, "event": "lea')

    async def _reap(self) -> None:
        for _ in range(self.settings.num_deaths):
            await asyncio.sleep(self.rng.expovariate(1 / self.settings.death_every_s))
            who = self.rng.choice(["engine", "engine", "engine", "runner", "runner", "trainer", "driver"])
            if self.driver is None:
                continue
            self.deaths.append(f"{who} at {self.loop.time():.2f} s")
            if who == "engine":
                self.rng.choice(self.driver.rollout.workers.actors).kill()
            elif who == "runner":
                self.driver.attempts.workers.actors[0].kill()
            elif who == "trainer":
                self.trainer_is_dead = True
            else:
                self.driver_is_dead = True


class Driver:
    """The driver's process: does what `compose`, `Resumption` and `OnlineLoop` do, with a trainer that only waits."""

    def __init__(self, world: World):
        settings = world.settings
        self.world, self.settings, self.num_phases = world, settings, 0
        prompts = [
            Prompt(id=f"p{index}", text="", input=ModelInput((1, index))) for index in range(settings.num_prompts)
        ]
        ids, tokens = [prompt.id for prompt in prompts], [prompt.input.token_ids for prompt in prompts]
        done_steps = world.checkpoint.step if world.checkpoint else 0
        ledger = Ledger(world.output, done_steps=done_steps)
        self.leases = Leases(Cursor(prompts, ids=ids, tokens=tokens, seed=settings.seed, shuffle=True), ledger)
        self.beginning = self.leases.state()
        self.rollout = Fleet(world, version=0)
        self.attempts = SimulatedAttempts(world, self.rollout)
        self.sampler = BufferedSampler(
            leases=self.leases,
            attempts=self.attempts,
            scorer=Scorer(world) if settings.scorer else None,
            phase=self._phase,  # type: ignore[arg-type]
            prompts_per_step=settings.prompts_per_step,
            group_size=settings.group_size,
            buffer=Buffer(
                prompts_per_step=settings.prompts_per_step,
                max_policy_lag=settings.lag,
                pipeline_depth=settings.depth,
                oversample=settings.oversample,
                rest=settings.rest,
            ),
            last_step=settings.steps,
            dynamic=DynamicSamplingConfig(max_rounds=10) if settings.dynamic else None,
            num_minibatches=settings.num_minibatches,
        )
        self.evaluation = (
            None
            if settings.takes_turns
            else EvaluationBeside(attempts=self.attempts, sets=[EvaluationSet(prompts=HELD_OUT, sampling=GREEDY)])
        )

    def _phase(self, name: str, on: Any = None) -> AbstractContextManager[None]:
        """Counts the phases, so that a sampler that turns in circles without waiting is noticed."""
        self.num_phases += 1
        if self.num_phases > MOST_PHASES:
            raise Stuck("the sampler turns in circles")
        if on is self.rollout:
            self.rollout.wake()
        elif self.settings.takes_turns:
            self.rollout.sleep()
        return nullcontext()

    def finish(self) -> None:
        """Runs the rest of the run, again from the last checkpoint each time that a trainer rank dies."""
        while True:
            try:
                self._resume()
                return
            except TrainerDied:
                self._start_anew()

    def _start_anew(self) -> None:
        """See Resumption.start_anew and OnlineLoop.rewind."""
        self.world.trainer_is_dead = False
        self.world.elapse(5.0)
        self.leases.restore(self.beginning)
        self.leases.ledger.rewind(self.world.checkpoint.step if self.world.checkpoint else 0)
        self.sampler.reset()
        if self.evaluation:
            self.evaluation.forget()

    def _resume(self) -> None:
        """See Resumption.resume and OnlineLoop.run."""
        saved = self.world.checkpoint
        done_steps = saved.step if saved else 0
        if saved:
            self.leases.restore(saved.data)
        self.world.timeline[:] = [each for each in self.world.timeline if each.step <= done_steps]
        done = -1 if saved is None else done_steps
        self.world.evaluated[:] = [step for step in self.world.evaluated if step <= done]
        self.attempts.begun = dict(saved.begun) if saved else {}
        self.rollout.publish(done_steps)
        if saved and self.sampler.in_flight:
            self.sampler.go_on(saved.folder)
            if self.evaluation:
                self.evaluation.go_on(saved.folder, is_done=self.world.evaluated.__contains__)
        self._phase("probe")
        if done_steps == 0:
            self._evaluate(0)
        for step in range(done_steps + 1, self.settings.steps + 1):
            self._step(step)
            if step % self.settings.evaluate_every == 0 or step == self.settings.steps:
                self._evaluate(step)
            if step % self.settings.checkpoint_every == 0:
                self._save(step)
        self._trainer()

    def _step(self, step: int) -> None:
        groups = self.sampler.collect(step)
        self._phase("train")
        self.world.elapse(3.0)
        self._trainer()
        self._finish_evaluation()
        with nullcontext() if self.settings.in_flight_updates else self.attempts.between_responses():
            self.rollout.publish(step)
            self._trainer()
        self.sampler.settle(step)
        seeds = [self.attempts.begun[group.id] for group in groups]
        self.world.timeline.append(Trained(step, groups, seeds))
        self.sampler.metrics()

    def _trainer(self) -> None:
        if self.world.trainer_is_dead:
            raise TrainerDied("policy rank 0 died")

    def _finish_evaluation(self) -> None:
        if self.evaluation and (step := self.evaluation.step) is not None:
            assert self.rollout.version == step
            self.evaluation.finish()
            self.world.evaluated.append(step)

    def _evaluate(self, step: int) -> None:
        if self.evaluation:
            self.evaluation.begin(step)
            if step == self.settings.steps:
                self._finish_evaluation()
            return
        self._phase("evaluation", on=self.rollout)
        groups = self.attempts.generate(HELD_OUT, group_size=1, step=0, sampling=GREEDY)
        assert [group.prompt.id for group in groups] == [prompt.id for prompt in HELD_OUT]
        self.world.evaluated.append(step)

    def _save(self, step: int) -> None:
        self._phase("checkpoint")
        folder = self.world.new_folder()
        if self.sampler.in_flight:
            self.sampler.hold(step)(folder)
            if self.evaluation:
                self.evaluation.hold(folder)
        data = self.leases.state()
        self.world.elapse(1.0)
        self._trainer()
        self.world.checkpoint = Checkpoint(step, data, folder, dict(self.attempts.begun))


@contextmanager
def simulated(settings: Settings, output: Path) -> Iterator[tuple[World, Driver]]:
    """Runs a simulation, and gives the block what has become of it."""
    output.mkdir(parents=True)
    world = World(settings, output)
    try:
        yield world, world.run()
    finally:
        world.loop.end()
