"""The order of a step, seen by what comes of it: a policy small enough to be trained a second time by hand.

The policy is one row of logits, whatever came before a token: its logprobs, its gradient and its update are real, and
so are sampling, packing, the algorithm and the loop. The engine samples from weights that were published to it, and its
logprobs are off by a constant, as an engine's in another number format are. What the run must come to is worked out
below from the formulas of the paper, without rlframe's own.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig
from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.algorithms.policy_gradient import ClippedPolicyGradient
from rlframe.attempts.account.leases import Leases
from rlframe.attempts.account.ledger import Ledger
from rlframe.attempts.buffer import Buffer
from rlframe.loops.online import OnlineLoop
from rlframe.loops.phases import Phases
from rlframe.loops.reporting.metrics import MetricsLog
from rlframe.loops.reporting.throughput import Shape, Throughput
from rlframe.loops.sampling.buffered import BufferedSampler
from rlframe.loops.saving.checkpoints import Checkpoints
from rlframe.loops.schedule import Schedule
from rlframe.run.load import load
from rlframe.types.batch import Batch, Sequences
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.results import PolicyOutput, TrainResult
from rlframe.types.rollout import (
    Completion,
    FinishReason,
    GenerationRequest,
    Group,
    Rollout,
    members,
)
from rlframe.weight_sync.channel import SyncReport
from tests.local_attempts import LocalAttempts, answering

VOCABULARY, PROMPTS, GROUP, STEPS, LR = 4, 4, 3, 3, 0.5
ENGINE_BIAS_NATS = 0.3
"""How far the engine's logprobs are from the trainer's of the same weights."""
CLIP, KL = 0.2, 0.1
ROLES = ("policy", "rollout")
START = torch.tensor([0.3, -0.2, 0.1, 0.0])
WORTH = [1.0, 0.0, 0.5, -0.25]
"""Reward of a response by its first token."""


@dataclass
class Bandit:
    """Is both the policy's ranks and, where it is the engine, the copy that it samples from."""

    algorithm: ClippedPolicyGradient
    num_minibatches: int
    logits: Tensor = field(default_factory=START.clone)
    first: Tensor = field(default_factory=START.clone)
    metrics: dict[str, float] = field(default_factory=dict)
    spared: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    awake: bool = True

    def sleep(self) -> None:
        self.awake = False

    def wake(self) -> None:
        self.awake = True

    @property
    def updates_per_batch(self) -> int:
        return self.num_minibatches

    def logprobs(self, batch: Sequences, *, reference: bool = False) -> Tensor:
        assert self.awake
        return nats(self.first if reference else self.logits, batch.token_ids)

    def train(self, batch: Batch) -> TrainResult:
        """Takes one plain step of gradient descent for each part of the batch, groups kept whole."""
        assert self.awake
        size = batch.num_sequences // self.num_minibatches
        for start in range(0, batch.num_sequences, size):
            part = batch.select(list(range(start, start + size)))
            logits = self.logits.clone().requires_grad_()
            output = PolicyOutput(logprobs=nats(logits, part.token_ids), entropy=torch.zeros(part.num_tokens))
            loss = self.algorithm.loss(output, part, self.algorithm.token_weights(part)).loss
            (gradient,) = torch.autograd.grad(loss, logits)
            self.logits = self.logits - LR * gradient
        return TrainResult(metrics={}, num_optimizer_steps=self.num_minibatches)


def nats(logits: Tensor, token_ids: Tensor) -> Tensor:
    """[T] nats; tokens of the vocabulary are the last VOCABULARY ids, those before them are prompts."""
    table = torch.cat([torch.zeros(VOCABULARY), logits.log_softmax(0)])
    return table[token_ids]


@dataclass
class World:
    """Holds prompts, an engine, a reward and a channel for weights, each as small as can be and real."""

    policy: Bandit
    published: dict[int, Tensor]
    epoch: int = 0
    last_epoch: int = 0
    version: int = 0
    audit_s: float = 0.0
    hold_metrics: dict[str, float] = field(default_factory=dict)
    samples: list[list[Rollout]] = field(default_factory=list)
    attempts: Any = None
    sampler: Any = None
    finish: Callable[[Tensor], FinishReason] = lambda drawn: FinishReason.STOP
    beside: list[bool] = field(default_factory=list)
    """Whether the policy was awake in each sync."""

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def next(self, count: int) -> list[Prompt]:
        return [Prompt(id=str(index), text="p", input=ModelInput((index % VOCABULARY,))) for index in range(count)]

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def answer(self, request: GenerationRequest) -> Completion:
        """Samples a response of two tokens from the newest weights that were published."""
        logits = self.published[self.version]
        generator = torch.Generator().manual_seed(request.seed % 2**63)
        drawn = torch.multinomial(logits.softmax(0), 2, replacement=True, generator=generator)
        return Completion(
            token_ids=drawn + VOCABULARY,
            logprobs=logits.log_softmax(0)[drawn] - ENGINE_BIAS_NATS,
            versions=[self.version, self.version],
            finish_reason=self.finish(drawn),
        )

    def score(self, rollout: Rollout) -> None:
        rollout.reward = WORTH[rollout.token_ids[1] - VOCABULARY]

    def publish(self, version: int) -> SyncReport:
        self.version = self.attempts.rollout.version = version
        self.beside.append(self.policy.awake)
        self.published[version] = self.policy.logits.clone()
        return SyncReport(
            version=version, transport="none", num_bytes=0, pause_s=0.0, pull_s=0.0, verify_s=0.0, total_s=0.0
        )

    def metrics(self) -> dict[str, float]:
        return {}


class Noted:
    """The world's sampler, whose samples the world notes."""

    def __init__(self, world: World):
        self.world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world.sampler, name)

    def collect(self, step: int) -> list[Group]:
        groups = self.world.sampler.collect(step)
        self.world.samples.append(members(groups))
        return groups


def trained(
    tmp_path: Path,
    *,
    num_minibatches: int,
    edit: Callable[[GrpoConfig], GrpoConfig] = lambda one: one,
    shares: Callable[[World], list[Any]] = lambda world: [],
    dynamic: DynamicSamplingConfig | None = None,
    finish: Callable[[Tensor], FinishReason] = lambda drawn: FinishReason.STOP,
) -> World:
    """Runs the loop for STEPS steps.

    Args:
        shares: the roles that take turns on a device.
        dynamic: by which groups are dropped.
        finish: returns why a response ended.
    """
    algorithm = Grpo(edit(GrpoConfig(group_size=GROUP, kl_coefficient=KL, clip_low=CLIP, clip_high=CLIP)))
    overrides = [f"output={tmp_path}", f"steps={STEPS}", "logging.tensorboard=false", "logging.progress=false"]
    config = load("grpo_qwen3_moe", overrides)
    tmp_path.mkdir(exist_ok=True)
    policy = Bandit(algorithm, num_minibatches)
    world = World(policy, published={0: START.clone()}, finish=finish)
    phase = Phases(sharing=shares(world), announce=lambda name: None)
    metrics = MetricsLog(config.logging, tmp_path, name="bandit", steps=STEPS, done_steps=None)
    checkpoints = Checkpoints(tmp_path / "checkpoints", config.checkpoint)
    world.attempts = LocalAttempts([answering(world.answer)], world.score)
    buffer = Buffer(prompts_per_step=PROMPTS, max_policy_lag=0, pipeline_depth=1)
    leases = Leases(world, Ledger(tmp_path))
    world.sampler = BufferedSampler(
        leases=leases, attempts=world.attempts, scorer=None, phase=phase, prompts_per_step=PROMPTS,
        group_size=GROUP, buffer=buffer, last_step=STEPS, dynamic=dynamic,
    )  # fmt: skip
    loop = OnlineLoop(
        schedule=Schedule(last_step=STEPS, every={}, checkpoints=checkpoints),
        algorithm=algorithm, policy=policy, critic=None, weight_sync=world, metrics=metrics,
        prompts=world, rollout=world, leases=leases, attempts=world.attempts, scorer=None, sampler=Noted(world),
        phase=phase,
        checkpoints=checkpoints, export=lambda folder: None,
        throughput=Throughput(
            shapes={role: Shape(devices=2, operations=lambda length, share: length * share) for role in ROLES}, peak=1e3
        ),
    )  # fmt: skip
    for step in range(1, STEPS + 1):
        loop.step(step)
    return world


def by_hand(
    samples: list[list[Rollout]], *, num_minibatches: int, kl: float = KL, engine_is_old: bool = False
) -> Iterator[Tensor]:
    """Yields the logits after each step, from arXiv 2402.03300: equation 3 with the ratio to the policy before the
    step, the KL of equation 4 to the first policy, and advantages over the unbiased deviation of each group; every
    token counts the same."""
    logits = START.double()
    for rollouts in samples:
        before = logits.clone()
        for part in torch.arange(len(rollouts)).chunk(num_minibatches):
            theta = logits.clone().requires_grad_()
            terms = []
            for index in part.tolist():
                group = [one.reward for one in rollouts[index // GROUP * GROUP : (index // GROUP + 1) * GROUP]]
                spread = torch.tensor(group).double()
                advantage = (rollouts[index].reward - spread.mean()) / (spread.std() + 1e-6)
                tokens = torch.tensor(rollouts[index].token_ids[1:]) - VOCABULARY
                now, old, first = (each.log_softmax(0)[tokens] for each in (theta, before, START.double()))
                if engine_is_old:
                    old = torch.tensor(rollouts[index].rollout_logprobs[1:]).double()
                ratio = (now - old).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                terms.append(gain - kl * ((first - now).exp() - (first - now) - 1))
            loss = -torch.cat(terms).mean()
            logits = logits - LR * torch.autograd.grad(loss, theta)[0]
        yield logits


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_every_step_is_the_papers(tmp_path: Path, num_minibatches: int) -> None:
    world = trained(tmp_path, num_minibatches=num_minibatches)
    expected = list(by_hand(world.samples, num_minibatches=num_minibatches))
    assert expected[-1].sub(START).abs().max() > 0.1, "something was learnt"
    for step, logits in enumerate(expected, start=1):
        torch.testing.assert_close(world.published[step].double(), logits, rtol=0, atol=2e-6)


def test_each_step_samples_from_what_the_one_before_it_published(tmp_path: Path) -> None:
    world = trained(tmp_path, num_minibatches=2)
    versions = [{rollout.spans[0].version for rollout in rollouts} for rollouts in world.samples]
    assert versions == [{0}, {1}, {2}]
    torch.testing.assert_close(world.published[STEPS], world.policy.logits, rtol=0, atol=0)


def test_the_throughput_of_engines_is_of_all_that_they_sample(tmp_path: Path) -> None:
    trained(tmp_path, num_minibatches=1, dynamic=DynamicSamplingConfig())
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tokens = [each["throughput/rollout_tokens_per_s_device"] * each["time/rollout_s"] * 2 for each in steps]
    assert tokens == pytest.approx([2 * each["rollout/sampled"] for each in steps])
    assert max(each["rollout/sampled"] for each in steps) > PROMPTS * GROUP, "some groups were dropped"


def test_logits_of_responses_that_are_masked_are_no_operations(tmp_path: Path) -> None:
    def masked(config: GrpoConfig) -> GrpoConfig:
        return replace(config, mask_truncated=True)

    def finish(drawn: Tensor) -> FinishReason:
        return FinishReason.LENGTH if drawn[0] > 1 else FinishReason.STOP

    trained(tmp_path, num_minibatches=1, edit=masked, finish=finish)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        kept = 1 - step["rollout/truncated_fraction"]
        assert 0 < kept < 1, "some responses are cut off"
        # Three passes over sequences of 3 tokens. The loss counts 2 of them, or none.
        operations = step["throughput/train_mfu_fraction"] * step["time/train_s"] * 2 * 1e3
        assert operations == pytest.approx(3 * step["rollout/tokens"] * 3 * kept * 2 / 3)


def test_a_policy_that_takes_turns_with_the_engines_sleeps_before_their_weights_come(tmp_path: Path) -> None:
    # While their weights arrive, engines are awake in part: the policy's optimizer would be beside them.
    both = trained(tmp_path / "both", num_minibatches=2, shares=lambda world: [world, world.policy])
    assert both.beside == [False] * STEPS
    # Engines that keep their memory, or have devices of their own, take none for a sync.
    alone = trained(tmp_path / "alone", num_minibatches=2, shares=lambda world: [world.policy])
    assert alone.beside == [True] * STEPS


def test_with_bypass_the_engines_logprobs_are_the_old_ones(tmp_path: Path) -> None:
    def bypass(config: GrpoConfig) -> GrpoConfig:
        return replace(config, kl_coefficient=0.0, correction=replace(config.correction, bypass=True))

    world = trained(tmp_path, num_minibatches=2, edit=bypass)
    # Every ratio is about e^0.3 = 1.35: good tokens are clipped and give no gradient, bad ones count 1.35 times.
    expected = list(by_hand(world.samples, num_minibatches=2, kl=0.0, engine_is_old=True))
    usual = list(by_hand(world.samples, num_minibatches=2, kl=0.0))
    assert (expected[0] - usual[0]).abs().max() > 0.01, "it matters whose logprobs are the old ones"
    for step, logits in enumerate(expected, start=1):
        torch.testing.assert_close(world.published[step].double(), logits, rtol=0, atol=2e-6)
