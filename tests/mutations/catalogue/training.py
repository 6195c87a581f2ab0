"""Faults in the optimizer, its schedule and the vocabulary's kernels."""

from tests.mutations.mutation import Mutation, faults

UPDATES = '"tests/multiprocess/megatron/training/test_updates.py::test_every_setting_of_the_optimizer_does_what_torchs_does[d1]"'.strip(
    '"'
)

INTERPRETED = "tests/multiprocess/test_interpreted.py::test_kernels_through_tritons_interpreter[triton]"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/megatron/worker/optimizer.py",
        UPDATES,
        ("gradients are not clipped", "clip_grad=config.clip_grad,", "clip_grad=0.0,"),
        (
            "no weight decay",
            'group["weight_decay"] = config.weight_decay * group["wd_mult"]',
            'group["weight_decay"] = 0.0',
        ),
        ("weight decay of norms too", 'config.weight_decay * group["wd_mult"]', "config.weight_decay"),
        ("beta1 is the default", "adam_beta1=config.beta1,", ""),
        ("beta2 is the default", "adam_beta2=config.beta2,", ""),
        ("eps is the default", "adam_eps=config.eps,", ""),
        ("the learning rate stays", 'group["lr"] = lr', 'group["lr"] = config.lr'),
        (
            "the schedule is one step late",
            "lr = learning_rate(config, step_index, total_steps)",
            "lr = learning_rate(config, max(0, step_index - 1), total_steps)",
        ),
    ),
    *faults(
        "rlframe/megatron/worker/trainer.py",
        UPDATES,
        ("the schedule begins anew with each batch", "step_index=first_step + index,", "step_index=index,"),
    ),
    *faults(
        "rlframe/megatron/worker/trainer.py",
        "tests/multiprocess/megatron/training/test_warm_up.py::test_nothing_that_a_run_computes_shows_it",
        ("a warm-up moves the routers' biases", "            self.optimizer.biases.put_back()\n", ""),
        ("tokens of a warm-up are part of the experts' load", "            self.expert_load.counts.zero_()\n", ""),
    ),
    *faults(
        "rlframe/megatron/cpu/gloo.py",
        "tests/multiprocess/megatron/test_platform.py::test_all_groups_of_a_rank_share_one_thread_of_gloo_and_keep_their_limits",
        ("each group has a thread of its own", "devices[os.getpid()] = group.options._devices", "pass"),
        (
            "groups on a shared thread have torch's limit",
            "options._timeout, options._devices = timeout, shared",
            "options._devices = shared",
        ),
    ),
    *faults(
        "rlframe/utils/process/early.py",
        "tests/unit/utils/process/test_early.py::test_a_process_may_set_its_title_after_a_change",
        (
            "a process has no title once its first variable has changed",
            'importlib.import_module("setproctitle").getproctitle()',
            "pass",
        ),
    ),
    *faults(
        "rlframe/megatron/packed/split_attention.py",
        "tests/unit/megatron/packed/test_split_attention.py",
        (
            "the backward pass of split attention knows only the softmax over a sequence's own tokens",
            "ctx.save_for_backward(query, key, value, output, lse, *own, *rest)",
            "ctx.save_for_backward(query, key, value, output, kernels.forward(query, key, value, split.own)[1], *own, *rest)",
        ),
        (
            "keys of a split prompt have no gradient from other responses",
            "rows = (split.reads, split.is_read, split.is_read)",
            "rows = (split.reads, split.reads, split.is_read)",
        ),
        (
            "what a call has not written reaches the sums of split attention",
            "return torch.where(chosen, sums.to(output.dtype), output), torch.where(chosen, both, lse)",
            "return sums.to(output.dtype), both",
        ),
    ),
    *faults(
        "rlframe/megatron/packed/split_bounds.py",
        "tests/unit/megatron/packed/test_split_attention.py",
        (
            "a split prompt is read by its first sequence too",
            "readers=slice(bounds[head + 1], bounds[end])",
            "readers=slice(bounds[head], bounds[end])",
        ),
        (
            "short prompts are split",
            "if not groups or num_keys < KEYS_PER_ROW * num_rows:",
            "if not groups:",
        ),
    ),
    *faults(
        "rlframe/megatron/config/schedule.py",
        "tests/unit/megatron/config/test_schedule.py",
        ("warm-up begins at the peak", "return config.lr * (step + 1) / config.warmup_steps", "return config.lr"),
        ("cosine is linear", "0.5 * (1 + math.cos(math.pi * done))", "1 - done"),
        ("the floor is 0", "return config.min_lr + (config.lr - config.min_lr) * left", "return config.lr * left"),
        (
            "wsd decays from the start",
            "start = max(start, end - round(config.decay_fraction * (end + 1)))",
            "start = start + 0",
        ),
        ("decay_steps are not looked at", "end = (config.decay_steps or total_steps) - 1", "end = total_steps - 1"),
    ),
    *faults(
        "rlframe/megatron/driver/policy.py",
        "tests/unit/megatron/driver/test_policy.py",
        (
            "sums are added over steps",
            "float(metric.value) / (len(steps) if isinstance(metric, Sum) else 1)",
            "float(metric.value)",
        ),
    ),
    *faults(
        "rlframe/types/results.py",
        "tests/unit/types/test_results.py",
        (
            "NaN is no greatest number",
            "self.value != self.value or self.value >= other.value",
            "self.value >= other.value",
        ),
    ),
    *faults(
        "rlframe/types/results.py",
        "tests/contracts/test_losses_read_no_number.py",
        (
            "micro-batches' numbers change places",
            "for share in metrics:\n        for value in numbers(share)",
            "for share in reversed(metrics):\n        for value in numbers(share)",
        ),
    ),
    *faults(
        "rlframe/ops/surrogate.py",
        "tests/contracts/test_losses_read_no_number.py",
        ("a metric is read off the device", "0.0).sum(), mask.sum())", "0.0).sum(), float(mask.sum()))"),
    ),
    *faults(
        "rlframe/megatron/model/layers/experts/dispatch.py",
        "tests/multiprocess/megatron/test_dispatch.py",
        ("tokens of several ranks are sorted once", "dispatcher.ep_size * dispatcher.tp_size == 1", "True"),
        ("tokens of one rank are sorted twice", "dispatcher.ep_size * dispatcher.tp_size == 1", "False"),
    ),
    *faults(
        "rlframe/megatron/model/layers/experts/once.py",
        "tests/multiprocess/megatron/test_dispatch.py",
        ("an expert with a weight of 0 is not chosen", "probs.detach() != NOT_CHOSEN", "probs.detach() > 0"),
        ("a weight that is not a number is left out", "probs.detach() != NOT_CHOSEN", "probs.detach() >= 0"),
        ("tokens of this rank alone are counted", "experts].sum(0)", "experts][self.rank]"),
        ("a token goes to the first rank only", ".any(2)", ".any(2).cumsum(1) == 1"),
    ),
    *faults(
        "rlframe/megatron/model/layers/experts/order_kernels.py",
        INTERPRETED,
        (
            "a row is copied to its first place only",
            "tl.where(own > place, own, 2147483647), 0)\n        tl.store(",
            "tl.where(own >= 0, own, 2147483647), 0)\n        tl.store(",
        ),
        (
            "a place without a choice has a weight",
            "mask=own >= 0, other=0.0)\n            tl.store(of_out + token",
            "other=1.0)\n            tl.store(of_out + token",
        ),
    ),
    *faults(
        "rlframe/megatron/vocab/picked_rows.py",
        "tests/unit/megatron/vocab/test_picked_rows.py",
        (
            "gradients of logits go to other tokens",
            "index_copy_(0, rows, above)",
            "index_copy_(0, rows.flip(0), above)",
        ),
    ),
    *faults(
        "rlframe/loops/reference.py",
        "tests/unit/loops/test_reference.py",
        (
            "reference logprobs are found whatever the loss counts",
            "tokens.numpy().tobytes() + mask.numpy().tobytes()",
            "tokens.numpy().tobytes()",
        ),
    ),
    *faults(
        "rlframe/megatron/packed/inputs.py",
        "tests/multiprocess/megatron/test_packed.py",
        ("logits of the tokens of the loss, not before them", "mask[1:].long()", "mask[:-1].long()"),
        ("tensor-parallel ranks get unequal shares of logits", "-(-int(marks.sum()) // multiple)", "int(marks.sum())"),
    ),
    *faults(
        "rlframe/megatron/model/layers/query_key.py",
        "tests/unit/megatron/model/test_transformer.py",
        ("a teacher has the policy's angles", "key = angles.data_ptr(), angles.shape", "key = 0"),
    ),
    *faults(
        "rlframe/megatron/model/layers/experts/gradients.py",
        INTERPRETED,
        (
            "an expert's gradient has the next one's tokens",
            "part = tl.where(inside, of_above.load([whole, row]), 0.0)",
            "part = of_above.load([whole, row])",
        ),
        (
            "the last tokens of an expert are left out",
            "    if whole < end:\n",
            "    if whole < begin:\n",
        ),
        (
            "an expert without tokens keeps an old gradient",
            "if ADDS and begin == end:",
            "if begin == end:",
        ),
        (
            "quantised parts are asked for a dtype",
            "    if not all(type(each) is Tensor for each in (*inputs, *above)):\n        return None\n",
            "",
        ),
    ),
    *faults(
        "rlframe/megatron/model/layers/experts/operation.py",
        INTERPRETED,
        (
            "frozen experts get gradients",
            "if held.parameters[0].requires_grad and len(tokens):",
            "if len(tokens):",
        ),
        (
            "weights get no gradient behind tokens without one",
            "return held if held.gradients and comes else None",
            "return held if held.gradients else None",
        ),
        ("a teacher decides about the policy's experts", "if not getattr(layer.config, JOINS, False):", "if False:"),
        ("memory that has moved is not seen", "if held is None or held.addresses != addresses:", "if held is None:"),
    ),
    *faults(
        "rlframe/megatron/model/layers/experts/products.py",
        INTERPRETED,
        (
            "an expert's last rows are written over the next one's",
            "    if row + ROWS <= end:\n",
            "    if row + ROWS <= end + ROWS:\n",
        ),
        ("weights lie in the order of experts", "        weights.first,\n", "        0,\n"),
    ),
    *faults(
        "rlframe/megatron/model/layers/experts/stacked.py",
        INTERPRETED,
        ("gradients at any places are taken", "if len(distances) == 1 else None", "if distances else None"),
        ("matrices of two storages are one", " or len(storages) > 1", ""),
    ),
    *faults(
        "rlframe/megatron/adam/kernels.py",
        INTERPRETED,
        ("weights are not rounded up", "upper = tl.where(lower < 0, upper + 1, upper)", "pass"),
        ("a gradient that does not count is part of the norm", "tl.where(tl.load(row + 6) != 0, ", "tl.where(True, "),
        ("the kernel does not clip gradients", ".to(tl.float32) * scale\n    first", ".to(tl.float32)\n    first"),
        ("the kernel has no weight decay", "(size + weight_decay * main)", "size"),
    ),
    *faults(
        "rlframe/megatron/adam/table.py",
        INTERPRETED,
        ("tensors that moved are not found", "if addresses == self._addresses:", "if self._addresses:"),
    ),
    *faults(
        "rlframe/megatron/adam/step.py",
        INTERPRETED,
        ("moments of a checkpoint are not found", "or any(a is not b for", "or any(False for"),
        ("steps are not counted", 'group["step"] = group.get("step", 0) + 1', "pass"),
        ("the norm is one rank's", "            dist.all_reduce(total, group=group)\n", ""),
        ("nothing is clipped", "self.clip_grad / (norm + 1e-6)", "1.0"),
    ),
    *faults(
        "rlframe/megatron/vocab/divergence_kernels.py",
        INTERPRETED,
        (
            "padding is part of the divergence",
            "tl.where(inside, tl.exp(ours) * (ours - middle), 0.0)",
            "tl.exp(ours) * (ours - middle)",
        ),
        ("the gradient is that of the whole of KL", "found = found * (1 - beta)", "pass"),
    ),
]
