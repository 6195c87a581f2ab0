"""The sampler of distillation: some steps' responses are sampled, the others' are the data's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from rlframe.data.config import DataConfig
from rlframe.data.kinds.examples import ExampleStream, learnt_turns
from rlframe.data.prompts import PromptStream
from rlframe.data.sources import load
from rlframe.data.turns import Tokens
from rlframe.loops.sampling import Sampler
from rlframe.types.batch import GIVEN
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, Rollout, Segment
from rlframe.utils.errors import DataError


@dataclass(kw_only=True)
class MixedSampler(Sampler):
    """Walks one stream of prompts, whoever answers them."""

    examples: Mapping[str, Tokens]
    """The data's response to each prompt, with the prompt, by the prompt's id."""
    samples: Callable[[int], bool]
    """Whether the responses of a step are sampled."""

    def __post_init__(self) -> None:
        self._sampled = False

    def collect(self, step: int) -> list[Rollout]:
        """[P * group_size] rollouts of the next P prompts, or the data's responses to them."""
        self._sampled = self.samples(step)
        if self._sampled:
            return self.attempt(self.prompts_per_step, step=step)
        with self.phase("data"):
            rollouts = [
                self.given(prompt, sample_index)
                for prompt in self.prompts.next(self.prompts_per_step)
                for sample_index in range(self.group_size)
            ]
        with self.phase("reward"):
            self.judge.score(rollouts)
        return rollouts

    def given(self, prompt: Prompt, sample_index: int) -> Rollout:
        """The data's response as a rollout that no policy made."""
        example = self.examples[prompt.id]
        token_ids = example.token_ids.tolist()
        response = token_ids[len(prompt.token_ids) :]
        return Rollout(
            prompt=prompt,
            sample_index=sample_index,
            token_ids=token_ids,
            loss_mask=(example.weights > 0).tolist(),
            rollout_logprobs=[0.0] * len(token_ids),
            segments=[Segment(version=GIVEN, start=len(prompt.token_ids), end=len(token_ids))],
            finish_reason=FinishReason.STOP,
            text=str(self.rollout.tokenizer.decode(response, skip_special_tokens=True)),
        )

    def metrics(self) -> dict[str, float]:
        """Who made the step's responses."""
        return {"rollout/on_policy": float(self._sampled)}


def responses(
    config: DataConfig, prompts: PromptStream, *, tokenizer: PreTrainedTokenizerBase, seed: int, max_tokens: int
) -> dict[str, Tokens]:
    """The data's response to every prompt of `prompts`, with the prompt, by the prompt's id.

    Raises:
        DataError: a record does not end with the assistant, or is too long with its response.
    """
    found = load(config, seed=seed, understand=ExampleStream.understand)
    conversations = {conversation.id: conversation for part in found.train for conversation in part}
    for prompt in prompts.first(len(prompts)):
        if not conversations[prompt.id].weights[-1]:
            where = conversations[prompt.id].record.where
            raise DataError(f"{where}: expected a response to learn, found the weight 0 on the last message; remove it")
    examples = {prompt.id: learnt_turns(conversations[prompt.id], tokenizer) for prompt in prompts.first(len(prompts))}
    if long := [name for name, example in examples.items() if len(example.token_ids) > max_tokens]:
        raise DataError(
            f"{config.what}: expected every prompt with its response in at most {max_tokens} tokens "
            f"(train.max_tokens_per_microbatch), found {len(long)} longer ones, such as {long[0]}; raise it, or take "
            "them out of the data"
        )
    return examples
