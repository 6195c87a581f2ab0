"""GRPO in one file, to be read from top to bottom: `python examples/teaching_loop.py`.

A small language model that half knows arithmetic learns the rest, on one CPU core. One step is: sample, judge, pack,
train, sync. The parts are rlframe's own: data, engine, reward, types, algorithm. What makes the real loop longer
(rlframe/loops/online.py) is left out: processes, devices, Megatron's ranks, checkpoints, and weights that trainer and
engine cut differently.
"""

import argparse

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForCausalLM

from rlframe.algorithms.grpo import Grpo, GrpoConfig
from rlframe.data.config import DataConfig
from rlframe.data.prompts import PromptSource
from rlframe.models.config import ModelConfig
from rlframe.models.hub import resolve
from rlframe.ops.packing import pack, split_into_microbatches
from rlframe.rewards.exact_match import ExactMatch, ExactMatchConfig
from rlframe.rewards.runner import attempt_of
from rlframe.rollout.base.seeds import request_seed
from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine, weights_of
from rlframe.types.batch import Sequences, TrainBatch
from rlframe.types.prompt import Prompt
from rlframe.types.results import PolicyOutput
from rlframe.types.rollout import GenerationRequest, Group, Rollout, SamplingParams, members

MICROBATCH_TOKENS = 1024
"""Tokens of one forward pass, which bound its memory."""


class TeachingLoop:
    """A policy that is trained, and an engine that samples with a copy of its weights."""

    def __init__(self, steps: int, *, model: str = "qwen3_moe_tiny", data: str = "arithmetic", lr: float = 5e-4):
        folder = resolve(ModelConfig(path=model))
        kind = {"folder": folder, "dtype": torch.float32}
        self.engine = TransformersEngine(TransformersConfig(), device="cpu", **kind)
        self.engine.gate.commit(0)  # the weights that it has loaded are version 0
        self.policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.schedule = LinearLR(self.optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
        self.algorithm = Grpo(GrpoConfig(group_size=8))
        self.reward = ExactMatch(ExactMatchConfig())
        self.prompts = PromptSource(DataConfig(path=data), tokenizer=self.engine.tokenizer, seed=0)

    def step(self, step: int, *, num_prompts: int) -> dict[str, float]:
        """Samples a batch of rollouts and takes one optimizer step on it."""
        groups = [
            Group.begin(f"{step}/{prompt.id}", prompt, self.algorithm.group_size)
            for prompt in self.prompts.next(num_prompts)
        ]
        self.sample(members(groups), SamplingParams(max_tokens=8), step=step)
        self.judge(members(groups))
        # From here on all rollouts are one row of T tokens, without padding.
        batch = pack(groups)
        # A rollout's advantage is its reward less the mean of its group, over the group's standard deviation. All of
        # its tokens have it.
        train_batch = self.algorithm.train_batch(batch)
        metrics = self.train(train_batch)
        self.sync(version=step)
        return metrics | {"reward": float(batch.rewards.mean())}

    def sample(self, rollouts: list[Rollout], sampling: SamplingParams, *, step: int) -> None:
        """Has the engine continue each rollout."""
        requests = [
            GenerationRequest(
                input=rollout.input,
                sampling=sampling,
                # Every token follows from this seed, whatever else is in the batch.
                seed=request_seed(
                    run_seed=0, prompt_id=rollout.prompt.id, sample_index=rollout.sample_index, step=step
                ),
            )
            for rollout in rollouts
        ]
        for rollout, completion in zip(rollouts, self.engine.generate(requests), strict=True):
            # With the tokens come their logprobs under the engine's weights, and the version of these.
            rollout.append(completion)
            rollout.text = self.engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)

    def judge(self, rollouts: list[Rollout]) -> None:
        """Gives each rollout its reward: 1 if the response is the answer, else 0."""
        for rollout in rollouts:
            rollout.reward = self.reward.score(attempt_of(rollout))

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """Takes one optimizer step on the whole batch, micro-batch by micro-batch."""
        # The weight of a token holds the denominator of the whole batch, so that the losses of micro-batches add up,
        # however the batch is cut.
        weights = self.algorithm.token_weights(batch).split(batch.lengths.tolist())
        (microbatches,) = split_into_microbatches(batch.lengths.tolist(), num_ranks=1, max_tokens=MICROBATCH_TOKENS)
        loss, gap = 0.0, 0.0
        for indices in microbatches:
            part = batch.select(indices)
            output = self.forward(part)
            result = self.algorithm.loss(output, part, torch.cat([weights[index] for index in indices]))
            result.loss.backward()
            loss += result.loss.item()
            # Engine and trainer must agree on the logprobs of what was sampled, or the gradient is of another policy.
            difference = (output.logprobs.detach() - part.rollout_logprobs).abs() * part.loss_mask
            gap = max(gap, float(difference.max()))
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "grad_norm": float(norm), "logprob_gap_nats": gap}

    def forward(self, batch: Sequences) -> PolicyOutput:
        """Returns logprob and entropy of each token under the policy, with gradients. One row holds all sequences: no
        token sees another sequence, and positions begin anew in each."""
        sequence = batch.sequence_index()  # [T]
        place = torch.arange(batch.num_tokens)
        seen = (sequence[:, None] == sequence) & (place[:, None] >= place)  # [T, T]
        positions = torch.cat([torch.arange(length) for length in batch.lengths.tolist()])
        logits = self.policy(
            batch.token_ids[None], attention_mask=seen[None, None], position_ids=positions[None], use_cache=False
        ).logits[0]  # [T, V]
        # The logits at a token are of the one after it. Those before a first token are of another sequence.
        distribution = logits.roll(1, dims=0).log_softmax(-1)
        first = positions == 0
        logprobs = distribution.gather(1, batch.token_ids[:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        return PolicyOutput(logprobs=logprobs.masked_fill(first, 0.0), entropy=entropy.masked_fill(first, 0.0))

    def sync(self, *, version: int) -> None:
        """Gives the engine the policy's weights. Both are models of transformers, so that names agree; where they do
        not, rlframe.weight_sync plans which part of a tensor goes where, and proves that it has arrived."""
        trained: dict[str, Tensor] = weights_of(self.policy)
        self.engine.gate.begin(version)
        with torch.no_grad():
            for name, parameter in weights_of(self.engine.model).items():
                parameter.copy_(trained[name])
        self.engine.gate.commit(version)

    def evaluate(self, prompts: list[Prompt]) -> float:
        """Returns the mean reward of greedy answers."""
        rollouts = [Rollout.begin(prompt, 0) for prompt in prompts]
        self.sample(rollouts, SamplingParams(temperature=0.0, max_tokens=8), step=0)
        self.judge(rollouts)
        return sum(rollout.reward for rollout in rollouts) / len(rollouts)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO of a small model on arithmetic.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=32, help="of a step, with 8 responses each")
    options = parser.parse_args()
    loop = TeachingLoop(options.steps)
    held_out = loop.prompts.evaluation_prompts()
    print(f"held-out answers right before: {loop.evaluate(held_out):.3f}")
    for step in range(1, options.steps + 1):
        metrics = loop.step(step, num_prompts=options.prompts)
        print(f"step {step}: " + ", ".join(f"{name} {value:.3g}" for name, value in metrics.items()))
    print(f"held-out answers right after: {loop.evaluate(held_out):.3f}")


if __name__ == "__main__":
    main()
