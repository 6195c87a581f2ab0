"""MixedSampler: some steps train on responses that the policy does not sample, but the data or a teacher gives."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, Protocol

import numpy as np

from rlframe.attempts.account.ledger import DropReason
from rlframe.attempts.buffer import Finished, main_reason
from rlframe.attempts.fleet import Attempts
from rlframe.data.config import DataConfig
from rlframe.data.kinds.examples import ExampleSource, learnt_turns
from rlframe.data.prompts import PromptSource
from rlframe.data.sources import load
from rlframe.data.text.turns import Tokens
from rlframe.loops.sampling.base import REPLACEMENT_ROUNDS, Sampler, sizes
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import OFFLINE_VERSION, FinishReason, Group, Rollout, SamplingParams, members
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.errors import DataError, RlframeError


class ResponseSource(Protocol):
    """Source of the responses that the student does not sample."""

    phase: ClassVar[str]
    """Name of the phase in which it runs."""

    def respond(self, prompts: list[Prompt], *, step: int) -> list[Group]:
        """Returns a response to each prompt, each as a group of one rollout that was not sampled by the policy."""
        ...


@dataclass(kw_only=True)
class MixedSampler(Sampler):
    """Uses the same stream of prompts for the student's and the given responses."""

    response_source: ResponseSource
    samples: Callable[[int], bool]
    """Returns whether the student samples the responses of a step."""
    num_minibatches: int = 1
    """Number of groups of which a batch that does not get full keeps a multiple."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.group_size == 1, "there is one given response to a prompt"
        self._sampled = False
        self._dropped: Counter[str] = Counter()
        self._untrained: list[tuple[int, int]] = []

    @property
    def untrained(self) -> Sequence[tuple[int, int]]:
        """See GroupSource."""
        return self._untrained

    def collect(self, step: int) -> list[Group]:
        """Returns P groups of one rollout of the next P prompts, or of the source's responses to them. Those without a
        response are dropped and replaced by further prompts, or there are fewer after all rounds.

        Raises:
            RlframeError: too few groups for an optimizer step, after all rounds.
        """
        self._sampled, self._dropped, self._taken, self._untrained = self.samples(step), Counter(), [], []
        for again in range(REPLACEMENT_ROUNDS):
            missing = self.prompts_per_step - len(self._taken)
            if self._sampled:
                self.attempt(missing, step=step, again=again)
            else:
                self._respond(missing, step=step)
            for each in self._taken:
                if not each.group.rollouts:
                    self._drop(each, "unsuccessful")
            self._taken = [each for each in self._taken if each.group.rollouts]
            if len(self._taken) == self.prompts_per_step:
                break
        whole = len(self._taken) // self.num_minibatches * self.num_minibatches
        if not whole:
            raise RlframeError(
                f"step {step}: fewer than the {self.num_minibatches} prompts that an update needs got a response, in "
                f"{REPLACEMENT_ROUNDS} rounds; the warnings above say why attempts failed. Mend the environment, or "
                "raise rollout.attempt_timeout_s"
            )
        for each in self._taken[whole:]:
            self._drop(each, "left_over")
        del self._taken[whole:]
        return [each.group for each in self._taken]

    def _respond(self, count: int, *, step: int) -> None:
        """Takes the source's responses to the next `count` prompts."""
        with self.phase(self.response_source.phase):
            leases = self.leases.take(count, step=step, version=step - 1)
            found = self.response_source.respond([lease.prompt for lease in leases], step=step)
        groups = [replace(group, id=lease.group_id) for lease, group in zip(leases, found, strict=True)]
        with self.phase("reward"):
            self.attempts.score(groups)
        self.score(groups)
        self._taken += [Finished(lease=lease, group=group) for lease, group in zip(leases, groups, strict=True)]

    def _drop(self, each: Finished, why: str) -> None:
        self._dropped[why] += 1
        reason = DropReason.LEFT_OVER if each.group.rollouts else main_reason(each.lost)
        attempts = [*each.group.rollouts, *chain(*each.lost.values())]
        if self._sampled:
            self._untrained += sizes(attempts)
        self.leases.ledger.dropped(each.lease.ordinal, reason, attempts)

    def metrics(self) -> dict[str, float]:
        """Returns metrics about the source of the step's responses, and the numbers of what was dropped, if any."""
        dropped = {f"rollout/dropped_{why}_groups": float(count) for why, count in self._dropped.items()}
        if self._untrained:
            dropped["rollout/dropped_tokens"] = float(sum(sampled for _, sampled in self._untrained))
        return {"rollout/on_policy": float(self._sampled), **dropped}


@dataclass(frozen=True, kw_only=True)
class DataResponses:
    """Uses the data's own responses."""

    phase: ClassVar[str] = "data"
    examples: Mapping[str, Tokens]
    """The response to each prompt, with the prompt, by the prompt's id."""
    tokenizer: PreTrainedTokenizerBase

    def respond(self, prompts: list[Prompt], *, step: int) -> list[Group]:
        """See ResponseSource."""
        return [self._given(prompt, step) for prompt in prompts]

    def _given(self, prompt: Prompt, step: int) -> Group:
        example = self.examples[prompt.id]
        response = example.token_ids[len(prompt.input) :].tolist()
        length = len(example.token_ids)
        rollout = Rollout(
            prompt=prompt,
            sample_index=0,
            input=ModelInput(example.token_ids),
            loss_mask=example.weights > 0,
            rollout_logprobs=np.zeros(length),
            versions=np.full(length, OFFLINE_VERSION),
            finish_reason=FinishReason.STOP,
            text=str(self.tokenizer.decode(response, skip_special_tokens=True)),
        )
        return Group(id=f"{step}.{prompt.id}", prompt=prompt, rollouts=[rollout])


@dataclass(frozen=True, kw_only=True)
class TeacherResponses:
    """Uses the teacher's responses: sequence-level distillation, Kim and Rush 2016, arXiv 1606.07947."""

    phase: ClassVar[str] = "teacher_rollout"
    attempts: Attempts
    """Attempts of the teacher's engines."""
    sampling: SamplingParams

    def respond(self, prompts: list[Prompt], *, step: int) -> list[Group]:
        """See ResponseSource."""
        groups = self.attempts.generate(prompts, group_size=1, step=step, sampling=self.sampling)
        for rollout in members(groups):
            # New arrays: those that came from another process cannot be written.
            rollout.rollout_logprobs = np.zeros_like(rollout.rollout_logprobs)
            rollout.versions = np.full_like(rollout.versions, OFFLINE_VERSION)
        return groups


def responses(
    config: DataConfig,
    prompts: PromptSource,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    max_tokens: int,
    max_positions: int | None = None,
) -> dict[str, Tokens]:
    """Returns the data's response to every prompt of `prompts`, with the prompt, by the prompt's id.

    Args:
        max_tokens: most tokens of a forward pass.
        max_positions: most tokens of a sequence of the model. A model with rotary positions would compute further ones,
            which it has never learnt.

    Raises:
        DataError: a record does not end with the assistant, is too long with its response, or has a message of another
            weight than 0 or 1.
    """
    found = load(config, seed=seed, understand=ExampleSource.understand)
    conversations = {conversation.id: conversation for part in found.train for conversation in part}
    for prompt in prompts.first(len(prompts)):
        if not conversations[prompt.id].weights[-1]:
            where = conversations[prompt.id].record.where
            raise DataError(f"{where}: expected a response to learn, found the weight 0 on the last message; remove it")
    examples = {
        prompt.id: learnt_turns(conversations[prompt.id], tokenizer, config=config).single(
            where=conversations[prompt.id].record.where, what="a prompt with its response"
        )
        for prompt in prompts.first(len(prompts))
    }
    for name, example in examples.items():
        if len(others := example.weights[~np.isin(example.weights, (0, 1))]):
            raise DataError(
                f"{conversations[name].record.where}: expected messages of weight 0 or 1, learned like responses that "
                f"the policy samples, found the weight {others[0]:g}; give 0 or 1"
            )
    most, limit, hint = max_tokens, "train.max_tokens_per_microbatch", "raise the limit, or remove them from the data"
    if max_positions is not None and max_positions < max_tokens:
        most, limit, hint = max_positions, "the model's positions", "remove them from the data, or shorten them"
    if long := [name for name, example in examples.items() if len(example.token_ids) > most]:
        raise DataError(
            f"{config.what}: expected every prompt with its response in at most {most} tokens ({limit}), found "
            f"{len(long)} longer ones, such as {long[0]}; {hint}"
        )
    return examples
