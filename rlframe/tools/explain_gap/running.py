"""Both sides in their processes: Megatron ranks and one engine, as a run has them."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rlframe.algorithms.base import Algorithm
from rlframe.cluster.placement import Allocation
from rlframe.cluster.reaper import reaping
from rlframe.cluster.watch.watchdog import watching, work
from rlframe.megatron.config.train import Dtype
from rlframe.megatron.driver.policy import PolicyGroup
from rlframe.rollout.base.config import RolloutConfig
from rlframe.rollout.base.seeds import request_seed
from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.rollout.fleet.worker import EngineWorker
from rlframe.run.check.context import algorithm_of
from rlframe.run.compose import models
from rlframe.run.compose.online import starts_at_once
from rlframe.run.compose.parts import LOGS, Parts
from rlframe.run.config import RunConfig
from rlframe.tools.explain_gap.gap import Nats
from rlframe.tools.explain_gap.settings import Settings, requirements_of, two_sides
from rlframe.tools.explain_gap.sides import Routes, Sample
from rlframe.types.batch import TopLogprobs
from rlframe.types.packed import Packed
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import GenerationRequest, Scored
from rlframe.utils.errors import RlframeError, WeightSyncFailed
from rlframe.weight_sync.channel import WeightSync

EXACT_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
"""Variables without which products of float32 on CUDA are of 10 bits."""


class RunningSides:
    """A run's policy and one of its engines. See Sides."""

    def __init__(
        self,
        settings: Settings,
        prompts: Sequence[Prompt],
        parts: Parts,
        *,
        samples_per_prompt: int,
        max_tokens: int | None,
    ):
        """Reserves the devices; `start` starts both sides.

        Args:
            max_tokens: limit of a response; None means rollout.max_tokens.
        """
        self.num_engine_starts, self.longest_start_s = 0, 0.0
        self._settings, self._prompts, self._parts = settings, prompts, parts
        self._samples_per_prompt, self._max_tokens = samples_per_prompt, max_tokens
        self._placement = parts.devices()
        self._run: RunConfig | None = None
        self._policy: PolicyGroup | None = None
        self._rollout: RolloutGroup | None = None
        self._sync: WeightSync | None = None
        self._stale = ""

    def start(self, settings: Mapping[str, Any]) -> None:
        """See Sides."""
        run = two_sides(self._settings.run(settings))
        before, self._run, self._parts.config = self._run, None, run
        same_policy = before is not None and (before.train, before.model) == (run.train, run.model)
        if before is not None and same_policy and before.rollout == run.rollout:
            self._run = run
            return
        began = time.monotonic()
        self._stop(policy=not same_policy)
        self._start(run, algorithm_of(run))
        # Only now: what has failed to start is started again.
        self._run = run
        self.num_engine_starts += 1
        self.longest_start_s = max(self.longest_start_s, time.monotonic() - began)

    def _start(self, run: RunConfig, algorithm: Algorithm) -> None:
        exact = EXACT_FLOAT32 if run.train.dtype is Dtype.FLOAT32 else {}
        slots = replace(self._placement, slots=with_variables(self._placement.slots, exact))
        self._rollout = rollout = models.rollout(self._parts, slots)
        at_once = starts_at_once(run, self._parts.device, resumes=False)
        channel = run.rollout.engine_format.channel
        if at_once:
            rollout.begin()
        if self._policy is None:
            self._parts.groups.clear()
            self._policy = models.policy(self._parts, slots, algorithm)
            self._policy.start()
            if at_once:
                self._policy.warm_up_sync(channel)
        rollout.start()
        self._sync = WeightSync(self._policy.channel(channel), rollout, run.weight_sync)
        self._sync.connect()
        self._stale = ""
        try:
            self._sync.calibrate(version=0)
        except WeightSyncFailed as error:
            # The ladder measures what that costs, and then sends them.
            self._stale = str(error)
            rollout.commit(0)

    def close(self) -> None:
        """Ends both sides."""
        self._stop(policy=True)

    def _stop(self, *, policy: bool) -> None:
        """Ends the engine, and the policy too if it is to change."""
        if self._sync:
            # What has died cannot give its memory back.
            with contextlib.suppress(RlframeError):
                self._sync.close()
        if self._rollout:
            self._rollout.stop()
        if self._policy and policy:
            self._policy.workers.stop()
            self._policy = None
        self._sync = self._rollout = None

    def sample(self) -> Sample:
        """See Sides."""
        requests = [
            GenerationRequest(
                input=prompt.input,
                sampling=self._sampling(self._rollout_config),
                seed=request_seed(run_seed=self._parts.config.seed, prompt_id=prompt.id, sample_index=index, step=1),
            )
            for prompt in self._prompts
            for index in range(self._samples_per_prompt)
        ]
        (completions,) = self._ask(EngineWorker.generate, Packed(requests), doing="sampling")
        return Sample.of(requests, completions.objects())

    def _sampling(self, rollout: RolloutConfig) -> Any:
        sampling = rollout.sampling()
        limit = min(sampling.max_tokens, self._max_tokens or sampling.max_tokens)
        return replace(sampling, max_tokens=limit, min_tokens=min(sampling.min_tokens, limit))

    def engine(self, sample: Sample, *, alone: bool) -> list[Scored]:
        """See Sides."""
        calls = [[each] for each in sample.sequences] if alone else [sample.sequences]
        answers = [self._ask(EngineWorker.score_with_routes, call, doing="scores") for call in calls]
        return [scored for (answer,) in answers for scored in answer]

    def engine_top(self, sample: Sample, k: int) -> list[TopLogprobs]:
        """See Sides."""
        return self._ask(EngineWorker.top, sample.sequences, k, doing="most likely tokens")[0]

    def trainer(self, sample: Sample, *, temperature: float, routes: Routes | None, alone: bool) -> Nats:
        """See Sides."""
        assert self._policy is not None
        indices = range(len(sample.sequences))
        found = []
        for chosen in [[index] for index in indices] if alone else [list(indices)]:
            batch = sample.batch(routes, chosen)
            nats = self._policy.logprobs(batch, temperature=temperature)
            found += [each[1:].tolist() for each in nats.split(batch.lengths.tolist())]
        return sample.of_responses(found)

    def stale_weights(self) -> str:
        """See Sides."""
        if self._stale:
            return self._stale
        assert self._sync is not None
        try:
            self._sync.audit()
        except WeightSyncFailed as error:
            return str(error)
        return ""

    def send_weights(self) -> None:
        """See Sides."""
        assert self._sync is not None
        self._sync.overwrite((self._sync.policy_version or 0) + 1)
        self._stale = ""

    @property
    def _rollout_config(self) -> RolloutConfig:
        return self._parts.config.rollout

    def _ask(self, method: Any, *arguments: Any, doing: str) -> list[Any]:
        assert self._rollout is not None
        return self._rollout.workers.wait(self._rollout.workers.ask_all(method, *arguments), doing=doing)


def with_variables(
    slots: Mapping[str, Sequence[Allocation]], variables: Mapping[str, str]
) -> dict[str, list[Allocation]]:
    """Returns the slots of all roles, with variables for their processes."""
    return {
        role: [replace(slot, environment={**slot.environment, **variables}) for slot in own]
        for role, own in slots.items()
    }


def running(
    settings: Settings,
    prompts: Sequence[Prompt],
    stack: ExitStack,
    *,
    samples_per_prompt: int,
    max_tokens: int | None,
) -> RunningSides:
    """Returns both sides, not started, whose processes end with `stack`. The arguments are those of RunningSides."""
    run = two_sides(settings.subject.run)
    watchdog = stack.enter_context(watching(run.cluster, run.folder / LOGS, learns=False))
    stack.enter_context(work(watchdog))
    reaper = stack.enter_context(reaping(run.cluster.stall_warning_s))
    watchdog.beat, watchdog.leaving = reaper.beat, reaper.leave
    parts = Parts(run, requirements_of(run), stack)
    sides = RunningSides(settings, prompts, parts, samples_per_prompt=samples_per_prompt, max_tokens=max_tokens)
    stack.callback(sides.close)
    return sides
