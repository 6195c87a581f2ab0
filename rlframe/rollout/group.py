"""RolloutGroup: all engines as one object. Prompts in, finished rollouts out; and where weight sync delivers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlframe.cluster.config import Device
from rlframe.cluster.placement import Slot
from rlframe.cluster.worker import Worker
from rlframe.cluster.worker_group import WorkerGroup
from rlframe.environments.base import Environment
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.rollout.base import RolloutEngine
from rlframe.rollout.config import EngineDtype, RolloutConfig
from rlframe.rollout.sampling import request_seed
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Rollout, SamplingParams, Segment
from rlframe.utils.errors import WeightSyncFailed
from rlframe.utils.registry import find
from rlframe.weight_sync.boxes import Region
from rlframe.weight_sync.channel import DestinationGroup
from rlframe.weight_sync.layout import Layout
from rlframe.weight_sync.plan import Copy


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSetup:
    """What the engines need to start, besides their devices."""

    rollout: RolloutConfig
    model: ModelConfig
    dtype: EngineDtype
    """What `rollout.dtype` comes to: float32 or bfloat16, not auto."""
    device: Device
    seed: int
    """The run's: decides every sampled token, and the weights of a model with random_init."""


class RolloutWorker(Worker):
    """The Ray actor of one engine: forwards typed calls to it."""

    engine: RolloutEngine

    def start(self, setup: RolloutSetup) -> None:
        """Build the engine and load its weights."""
        engine_class, _ = find("rlframe.rollout", setup.rollout.name, key="rollout.name")
        cuda = setup.device is Device.CUDA or (setup.device is Device.AUTO and torch.cuda.is_available())
        self.engine = engine_class(
            setup.rollout,
            folder=resolve(setup.model),
            dtype=getattr(torch, setup.dtype.value),
            device="cuda" if cuda else "cpu",
            random_seed=setup.seed if setup.model.random_init else None,
        )

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """See RolloutEngine.generate."""
        return self.engine.generate(requests)

    def sleep(self) -> None:
        """See RolloutEngine.sleep."""
        self.engine.sleep()

    def wake(self) -> None:
        """See RolloutEngine.wake."""
        self.engine.wake()

    def weight_layout(self) -> Layout:
        """Where the Hugging Face tensors lie in the engine's memory."""
        return self.engine.weights.layout

    def weight_connect(self, copies: Sequence[Copy], memories: Sequence[Any], transport: str) -> None:
        """See WeightDestination.connect."""
        self.engine.weights.connect(copies, memories, transport)

    def weight_begin(self, version: int) -> None:
        """See WeightDestination.begin."""
        self.engine.weights.begin(version)

    def weight_pull(self) -> None:
        """See WeightDestination.pull."""
        self.engine.weights.pull()

    def weight_commit(self, version: int) -> None:
        """See WeightDestination.commit."""
        self.engine.weights.commit(version)

    def weight_digests(self) -> dict[str, int]:
        """See WeightDestination.digests."""
        return self.engine.weights.digests()

    def weight_box_digests(self, tensor: str, regions: Sequence[Region]) -> dict[Region, int]:
        """See WeightDestination.box_digests."""
        return self.engine.weights.box_digests(tensor, regions)


class RolloutGroup(DestinationGroup):
    """All engines: they share out the prompts, take turns with the environment, and receive weights."""

    def __init__(
        self,
        setup: RolloutSetup,
        *,
        tokenizer: Any,
        slots: list[Slot],
        log_folder: str,
        num_threads: int,
        start_timeout_s: float,
        call_timeout_s: float,
    ):
        """Start the processes; `start` builds the engines.

        Args:
            tokenizer: the one that made the prompts; decodes the responses.
        """
        self.setup = setup
        self.tokenizer = tokenizer
        self.start_timeout_s = start_timeout_s
        environment, settings = find("rlframe.environments", setup.rollout.environment, key="rollout.environment")
        self.environment: Environment = environment(settings())
        folder = resolve(setup.model)
        self.max_positions = load_family(folder).architecture(read_config(folder)).max_positions
        self.version: int | None = None
        """Version that every engine is proved to hold; None before calibration."""
        self.workers = WorkerGroup(
            RolloutWorker,
            role="rollout",
            slots=slots,
            log_folder=log_folder,
            num_threads=num_threads,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
        )

    def start(self) -> None:
        """Build the engines and load their weights. Separate from the constructor so that the policy can start at the
        same time."""
        calls = [actor.start.remote(self.setup) for actor in self.workers.actors]
        self.workers.wait(calls, doing="start of the engines", timeout_s=self.start_timeout_s)

    def generate(
        self, prompts: list[Prompt], *, group_size: int, step: int, sampling: SamplingParams | None = None
    ) -> list[Rollout]:
        """[R = P * group_size] finished attempts, ordered by prompt, then by sample.

        Args:
            step: part of the seeds, so that a prompt that comes again is answered anew.
            sampling: other than the config's, for evaluation.

        Raises:
            WeightSyncFailed: an engine sampled with other weights than those published last.
        """
        sampling = sampling or self.setup.rollout.sampling()
        rollouts = [begun(prompt, sample) for prompt in prompts for sample in range(group_size)]
        unfinished = list(range(len(rollouts)))
        turn = 0
        while unfinished:
            seeds = [self._seed(rollouts[index], step=step, turn=turn) for index in unfinished]
            requests = [
                GenerationRequest(token_ids=tuple(rollouts[index].token_ids), sampling=sampling, seed=seed)
                for index, seed in zip(unfinished, seeds, strict=True)
            ]
            completions = self._complete(requests, groups=[index // group_size for index in unfinished])
            for index, completion in zip(unfinished, completions, strict=True):
                extend(rollouts[index], completion)
            self._decode([rollouts[index] for index in unfinished])
            unfinished = [index for index in unfinished if self._respond(rollouts[index], sampling)]
            turn += 1
        return rollouts

    def _seed(self, rollout: Rollout, *, step: int, turn: int) -> int:
        return request_seed(
            run_seed=self.setup.seed,
            prompt_id=rollout.prompt.id,
            sample_index=rollout.sample_index,
            step=step,
            turn=turn,
        )

    def _complete(self, requests: list[GenerationRequest], *, groups: list[int]) -> list[Completion]:
        """A completion of each request, in their order; requests of one group go to one engine, to share a prefill."""
        shares = balanced(requests, groups, num_engines=len(self.workers.actors))
        calls = [
            actor.generate.remote([requests[index] for index in share])
            for actor, share in zip(self.workers.actors, shares, strict=True)
        ]
        completions: dict[int, Completion] = {}
        for engine, (share, results) in enumerate(zip(shares, self.workers.wait(calls, doing="generate"), strict=True)):
            for index, completion in zip(share, results, strict=True):
                if completion.version != self.version:
                    raise WeightSyncFailed(
                        f"engine {engine} sampled with weights of version {completion.version}, expected {self.version}"
                    )
                completions[index] = completion
        return [completions[index] for index in range(len(requests))]

    def _decode(self, rollouts: list[Rollout]) -> None:
        """Fill `text` with everything after the prompt."""
        responses = [rollout.token_ids[len(rollout.prompt.token_ids) :] for rollout in rollouts]
        for rollout, text in zip(
            rollouts, self.tokenizer.batch_decode(responses, skip_special_tokens=True), strict=True
        ):
            rollout.text = text

    def _respond(self, rollout: Rollout, sampling: SamplingParams) -> bool:
        """Append what the environment answers; False when the attempt is over."""
        observation = self.environment.respond(rollout)
        if observation is None:
            return False
        if len(rollout.token_ids) + len(observation) + sampling.max_tokens > self.max_positions:
            # No room for another response: the attempt ends as one that ran out of tokens does.
            rollout.finish_reason = FinishReason.LENGTH
            return False
        rollout.token_ids += observation
        rollout.loss_mask += [False] * len(observation)
        rollout.rollout_logprobs += [0.0] * len(observation)
        return True

    def sleep(self) -> None:
        """Free device memory for the roles that share the devices."""
        self.workers.wait([actor.sleep.remote() for actor in self.workers.actors], doing="sleep")

    def wake(self) -> None:
        """Undo `sleep`."""
        self.workers.wait([actor.wake.remote() for actor in self.workers.actors], doing="wake")

    def engines(self) -> list[int]:
        """See DestinationGroup: each engine is one rank."""
        return list(range(len(self.workers.actors)))

    def layouts(self) -> list[Layout]:
        """See DestinationGroup."""
        return self.workers.wait([actor.weight_layout.remote() for actor in self.workers.actors], doing="layouts")

    def hosts(self) -> list[str]:
        """See DestinationGroup."""
        return [info.host for info in self.workers.infos]

    def connect(self, copies: Sequence[Sequence[Copy]], memories: Sequence[Any], transport: str) -> None:
        """See DestinationGroup."""
        calls = [
            actor.weight_connect.remote(own, memories, transport)
            for actor, own in zip(self.workers.actors, copies, strict=True)
        ]
        self.workers.wait(calls, doing="weight sync connection")

    def begin(self, version: int) -> None:
        """See DestinationGroup."""
        self.workers.wait([actor.weight_begin.remote(version) for actor in self.workers.actors], doing="weight sync")

    def pull(self) -> None:
        """See DestinationGroup."""
        self.workers.wait([actor.weight_pull.remote() for actor in self.workers.actors], doing="weight sync")

    def commit(self, version: int) -> None:
        """See DestinationGroup."""
        self.workers.wait([actor.weight_commit.remote(version) for actor in self.workers.actors], doing="weight sync")
        self.version = version

    def digests(self) -> list[dict[str, int]]:
        """See DestinationGroup."""
        return self.workers.wait(
            [actor.weight_digests.remote() for actor in self.workers.actors], doing="weight digests"
        )

    def box_digests(self, tensor: str, regions: Sequence[Region]) -> list[dict[Region, int]]:
        """See DestinationGroup."""
        calls = [actor.weight_box_digests.remote(tensor, regions) for actor in self.workers.actors]
        return self.workers.wait(calls, doing="weight digests")


def begun(prompt: Prompt, sample_index: int) -> Rollout:
    """An attempt at `prompt` of which nothing is sampled yet."""
    length = len(prompt.token_ids)
    return Rollout(
        prompt=prompt,
        sample_index=sample_index,
        token_ids=list(prompt.token_ids),
        loss_mask=[False] * length,
        rollout_logprobs=[0.0] * length,
        segments=[],
        finish_reason=FinishReason.ABORT,
    )


def extend(rollout: Rollout, completion: Completion) -> None:
    """Append a response to `rollout`."""
    start = len(rollout.token_ids)
    rollout.token_ids += completion.token_ids
    rollout.loss_mask += [True] * len(completion.token_ids)
    rollout.rollout_logprobs += completion.logprobs
    rollout.segments.append(Segment(version=completion.version, start=start, end=len(rollout.token_ids)))
    rollout.finish_reason = completion.finish_reason


def balanced(requests: list[GenerationRequest], groups: list[int], *, num_engines: int) -> list[list[int]]:
    """For each engine the indices of its requests, in order: whole groups, the largest dealt first, each to the engine
    with the fewest tokens so far (a group's prompt, prefilled once, and its responses at full length)."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)

    def tokens(group: list[int]) -> int:
        longest = max(len(requests[index].token_ids) for index in group)
        return longest + sum(requests[index].sampling.max_tokens for index in group)

    loads = [0] * num_engines
    shares: list[list[int]] = [[] for _ in range(num_engines)]
    for group in sorted(members.values(), key=tokens, reverse=True):
        engine = loads.index(min(loads))
        loads[engine] += tokens(group)
        shares[engine] += group
    return [sorted(share) for share in shares]
