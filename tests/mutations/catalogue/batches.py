"""Faults in packing, masks, micro-batches, and what the model is given and gives."""

from tests.mutations.mutation import Mutation, faults

PACKING = "tests/unit/ops/test_packing.py"
MICROBATCH = "tests/unit/megatron/messages/test_microbatch.py"
PACKED = "tests/multiprocess/megatron/test_packed.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/ops/packing.py",
        PACKING,
        (
            "truncated rollouts are masked though not asked",
            "cut = [mask_truncated and",
            "cut = [True and",
        ),
        (
            "truncated rollouts stay though masking is asked",
            "cut = [mask_truncated and",
            "cut = [False and",
        ),
        ("the loss mask is lost", "loss_mask=packed.loss_mask & ~torch", "loss_mask=~torch"),
        (
            "groups are not neighbours",
            "torch.repeat_interleave(torch.tensor([len(group.rollouts) for group in groups], dtype=torch.int64))",
            "torch.arange(len(rollouts)) % len(groups)",
        ),
        (
            "versions are those of the first rollout",
            "[rollout.versions for rollout in rollouts]",
            "[rollouts[0].versions for rollout in rollouts]",
        ),
        (
            "who ended is taken for cut",
            "and rollout.finish_reason is not FinishReason.STOP",
            "and rollout.finish_reason is FinishReason.STOP",
        ),
        ("an attempt that went on is taken for cut", "rollout is last[number] and rollout", "rollout"),
        ("micro-batches overflow", "if left >= lengths[index]", "if left >= 0"),
        (
            "ranks get unequal numbers",
            "count = max(len(microbatches) for microbatches in filled)",
            "count = min(len(microbatches) for microbatches in filled)",
        ),
        ("all to one rank", "rank = loads.index(min(loads))", "rank = loads.index(max(loads))"),
        (
            "a unit is split",
            "members.setdefault(unit, []).append(index)",
            "members.setdefault(index, []).append(index)",
        ),
    ),
    *faults(
        "rlframe/megatron/messages/microbatch.py",
        MICROBATCH,
        (
            "the first minibatch every time",
            "return [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)] * epochs_per_batch",
            "return [range(*bounds[:2]) for pair in zip(bounds, bounds[1:], strict=False)] * epochs_per_batch",
        ),
        (
            "one epoch whatever is asked",
            "for pair in zip(bounds, bounds[1:], strict=False)] * epochs_per_batch",
            "for pair in zip(bounds, bounds[1:], strict=False)]",
        ),
        (
            "a prompt's rollouts in two updates",
            "batch.group if isinstance(batch, Batch) else",
            "batch.group if False else",
        ),
        (
            "results come back in another order",
            "joined[places] = values.numpy()",
            "joined[places[::-1]] = values.numpy()",
        ),
        (
            "weights stay where they were",
            "weights=torch.cat([pieces[index] for index in own])",
            "weights=torch.cat([pieces[0] for index in own])",
        ),
    ),
    *faults(
        "rlframe/types/batch.py",
        "tests/unit/types/test_batch.py",
        (
            "select: fields of sequences by token",
            'rewards: Float[Tensor, " R"] = by_sequence()',
            'rewards: Float[Tensor, " R"] = by_token()',
        ),
    ),
    *faults(
        "rlframe/megatron/model/forward.py",
        PACKED,
        (
            "each token's logprob is its successor's",
            "return torch.cat([whole.new_zeros(1, *whole.shape[1:]), whole])[: batch.num_tokens] * predicted",
            "return whole * predicted",
        ),
        (
            "the last token of a sequence predicts the next one's first",
            "predicted.index_fill_(0, torch.cumsum(batch.lengths, 0) - batch.lengths, 0.0)",
            "pass",
        ),
    ),
    *faults(
        "rlframe/rollout/base/sampling.py",
        "tests/unit/rollout/base/test_sampling.py",
        ("the temperature is forgotten", "logits = logits / sampling.temperature", "logits = logits * 1.0"),
        (
            "top-p keeps one too few",
            "(reached - probabilities < top_p * reached[:, -1:])",
            "(reached < top_p * reached[:, -1:])",
        ),
        ("top-k keeps one too many", "probabilities[:, top_k:] = 0.0", "probabilities[:, top_k + 1 :] = 0.0"),
        (
            "logprobs of what is left",
            "return Sampled(tokens, logprobs.gather(1, tokens[:, None])[:, 0])",
            "return Sampled(tokens, torch.log_softmax(allowed, -1).gather(1, tokens[:, None])[:, 0])",
        ),
        ("greedy draws", "if sampling.temperature == 0.0:", "if False:"),
    ),
    *faults(
        "rlframe/rollout/base/seeds.py",
        "tests/unit/rollout/base/test_sampling.py",
        ("seeds do not know the step", 'when = f"{step}.{again}" if again else f"{step}"', 'when = f"{again}"'),
        (
            "seeds do not know the sample",
            'f"{run_seed} {when} {sample_index} {turn} {prompt_id}"',
            'f"{run_seed} {when} {turn} {prompt_id}"',
        ),
    ),
]
