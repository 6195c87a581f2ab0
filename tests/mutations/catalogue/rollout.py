"""Faults in engines: aborts by name, responses that are continued, keys and values over a sync."""

from tests.mutations.mutation import Mutation, faults

IN_FLIGHT = "tests/unit/rollout/transformers/test_in_flight.py"
SGLANG = "tests/unit/rollout/sglang/test_parts.py"
VLLM = "tests/unit/rollout/vllm/test_pending.py"
JOINED = "tests/unit/rollout/vllm/test_joined.py"
STEADY = "tests/unit/rollout/vllm/test_steady.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/rollout/transformers/decode.py",
        IN_FLIGHT,
        (
            "an abort by name aborts all",
            "            if names is None:\n                self._aborts += 1",
            "            if True:\n                self._aborts += 1",
        ),
        (
            "an aborted request that waits begins all the same",
            "if self.requests[index].name not in self.control.aborted)",
            "if self.requests[index].name is not None)",
        ),
        (
            "aborted names are never forgotten",
            "self.wanted, self.aborted = True, False, frozenset()",
            "self.wanted = True, False",
        ),
        (
            "a continued response draws from position 0",
            "generated=self._integers([request.first_position for request in requests]),",
            "generated=self._integers([0 for request in requests]),",
        ),
        (
            "a completion holds what an earlier request sampled",
            "token_ids=tokens[index, first:count].copy(),\n                logprobs=logprobs[index, first:count].copy(),",
            "token_ids=tokens[index, : count - first].copy(),\n"
            "                logprobs=logprobs[index, : count - first].copy(),",
        ),
        (
            "a prefix computed anew has the first part twice",
            "prompts = [self.inputs[index][: request.prompt_tokens] for",
            "prompts = [self.inputs[index][:] for",
        ),
        ("a cache is kept that should be computed anew", "if not self.recompute:", "if True:"),
        ("a cache is computed anew that should be kept", "if not self.recompute:", "if False:"),
    ),
    *faults(
        "rlframe/rollout/sglang/sampler.py",
        SGLANG,
        ("SGLang continues a response from position 0", " - own.get(FIRST_POSITION, 0)", ""),
    ),
    *faults(
        "rlframe/rollout/sglang/epochs.py",
        SGLANG,
        ("SGLang serves new requests from a cache that was kept", 'request.extra_key = f"rlframe {epoch}"', "pass"),
        (
            "SGLang begins waiting requests with a prefix of older weights",
            "    for request in scheduler.waiting_queue:\n        _enter(scheduler, request)",
            "    pass",
        ),
    ),
    *faults(
        "rlframe/rollout/vllm/pending.py",
        VLLM,
        (
            "vLLM serves new requests from a cache that was kept",
            '{"cache_salt": f"rlframe {epoch}"} if epoch else ids',
            '{"cache_salt": "rlframe"} if epoch else ids',
        ),
        (
            "vLLM ends a request that should begin again",
            "if pending.epoch != epoch and not pending.token_ids:",
            "if False:",
        ),
        (
            "vLLM forgets an abort that overtakes its request",
            "if pending.finish_reason is None and pending.aborted:",
            "if False:",
        ),
    ),
    *faults(
        "rlframe/rollout/served/pending.py",
        VLLM,
        (
            "a stop string does not see the first part of a response",
            "token_ids, before = request.begun + token_ids, request.first_position",
            "token_ids, before = [0] * request.first_position + token_ids, request.first_position",
        ),
    ),
    *faults(
        "rlframe/types/rollout.py",
        "tests/unit/types/test_rollout.py",
        ("a whole input may be a response", "limit = min(len(self.input), ", "limit = min(len(self.input) + 1, "),
    ),
    *faults(
        "rlframe/rollout/vllm/decode/joined.py",
        JOINED,
        (
            "a layer begins the next attention with its own weights",
            "product = after[0].self_attn.qkv_proj",
            "product = layer.self_attn.qkv_proj",
        ),
        (
            "a layer norms for the next one by its own weights",
            "following = after[0].input_layernorm.weight,",
            "following = layer.input_layernorm.weight,",
        ),
        ("layers with adapters are joined", "config.lora_config is None and ", ""),
        ("layers whose weights lie elsewhere are joined", 'if "forward" in vars(layer) or ', "if "),
        ("products divided among GPUs are joined", " and each.tp_size == 1", ""),
        (
            "the cache of compiled models does not know",
            "{**config.additional_config, JOINED: is_joined}",
            "{**config.additional_config}",
        ),
    ),
    *faults(
        "rlframe/rollout/vllm/decode/admission.py",
        "tests/unit/rollout/vllm/test_scheduler.py",
        (
            "a preempted request does not wait for its tokens",
            'if each.status.name == "PREEMPTED" and each.num_output_placeholders\n',
            "if False\n",
        ),
        (
            "no request is admitted after a preemption",
            "            scheduler._pause_state = PauseState.UNPAUSED\n",
            "            pass\n",
        ),
    ),
    *faults(
        "rlframe/rollout/vllm/decode/admission.py",
        "tests/unit/rollout/vllm/test_admission.py",
        ("requests wait while places are free", "if scheduler.waiting and is_full else", "if is_full else"),
        ("the last requests of a batch wait", "saves = len(waiting) > empty and ", "saves = "),
        ("a step with prompts costs one sequence", "self._step_cost * num_running", "self._step_cost"),
        ("requests wait for a prompt that is computed in parts", "(decodes and not admits)", "(not admits)"),
        ("places that are full are looked through", "num_running >= scheduler.max_num_running_reqs or ", ""),
    ),
    *faults(
        "rlframe/rollout/vllm/decode/steady.py",
        STEADY,
        (
            "a step that is captured moves requests twice",
            "        self._is_updated = True\n        return result",
            "        return result",
        ),
        (
            "the next step is not moved after one that was captured",
            "            self._update(*arguments, **options)\n        self._is_updated = False",
            "            self._update(*arguments, **options)",
        ),
        (
            "other requests are launched as those before",
            "        self._times, self._begin, self._ends = 0, None, {}\n",
            "        self._times = 0\n",
        ),
        (
            "requests that are not plain are captured",
            "if not captured or not sampler.plain[batch.idx_mapping_np].all():",
            "if not captured:",
        ),
    ),
]
