"""The cases of recipes.py, which are recipes with what one device, four or eight ask to be changed."""

from dataclasses import dataclass, replace

ONE_DEVICE = ["train.parallel=d1", "rollout.num_engines=1"]
ONE_TRAINER = ["train.parallel=d1"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe and what is changed in it."""

    recipe: str
    model: str
    overrides: tuple[str, ...]
    prompts: int = 8
    prompt_tokens: int = 512
    response_tokens: int = 512
    num_layers: int = 0
    """Layers that are left of the model. 0: all."""
    online: bool = True
    tools: bool = False
    """Whether the model's chat template has tools."""


SMALL_STATE = ("train.optimizer.precision_aware=true", "train.optimizer.moment_dtype=bfloat16")
"""12 bytes a parameter in place of 18: 4B fit 80 GB beside an engine asleep."""
SMALL_ENGINE = (
    "~rollout.gpu_memory_utilization",
    "rollout.kv_cache_gb=16",
    "rollout.compile=false",
    "rollout.max_num_seqs=64",
)
"""Engines that start beside the policy, without Inductor."""
FROZEN = {
    "grpo_4b_80": Case(recipe="grpo_qwen3_4b", model="qwen3_4b", overrides=(*SMALL_STATE, *SMALL_ENGINE), prompts=4),
    "lora_4b_80": Case(recipe="grpo_qwen3_4b_lora", model="qwen3_4b", overrides=SMALL_ENGINE, prompts=6),
    "ppo_1p7b_80": Case(
        recipe="ppo_qwen3_8b",
        model="qwen3_1p7b",
        overrides=(*ONE_DEVICE, "train.num_minibatches=2", *SMALL_ENGINE),
        prompts=32,
    ),
    "dpo_4b_80": Case(
        recipe="dpo_qwen3_8b", model="qwen3_4b", overrides=(*ONE_TRAINER, *SMALL_STATE), online=False, prompts=24
    ),
    "sft_4b_80": Case(
        recipe="sft_qwen3_8b", model="qwen3_4b", overrides=(*ONE_TRAINER, *SMALL_STATE), online=False, prompts=64
    ),
    "reward_model_1p7b_80": Case(
        recipe="reward_model_qwen3_8b", model="qwen3_1p7b", overrides=tuple(ONE_TRAINER), online=False, prompts=32
    ),
    "grpo_4b_split": Case(
        recipe="grpo_qwen3_4b",
        model="qwen3_4b",
        overrides=(*SMALL_STATE, *SMALL_ENGINE, "cluster.colocate=false", "train.offload_optimizer=false"),
        prompts=4,
    ),
}
"""Cases of devices of 80 GB, which were chosen, and first measured, after the constants of preflight were frozen."""
MIXTURE = Case(
    recipe="grpo_qwen3_30b_a3b",
    model="qwen3_30b_a3b",
    overrides=(),
    prompts=64,
    prompt_tokens=256,
    response_tokens=2048,
)
FOUR_TRAINERS = (
    "train.parallel=d4e4",
    *SMALL_STATE,
    "rollout.num_engines=1",
    "rollout.tp=4",
    "rollout.max_num_seqs=512",
    "~rollout.gpu_memory_utilization",
    "rollout.kv_cache_gb=32",
)
"""Experts on four devices, which sample as one engine. Its cache has room for 512 sequences of 2,304 tokens."""
HOST_OPTIMIZER = (
    "train.optimizer.cpu_offload_fraction=1",
    "train.optimizer.precision_aware=false",
    "train.optimizer.moment_dtype=float32",
)
"""For 80 GB: main weights and moments stay in host memory, where the processor updates them."""
FEW_GRAPHS = "{compilation_config:{mode:0,cudagraph_mode:FULL_DECODE_ONLY,cudagraph_capture_sizes:[8,64,256,512]}}"
VLLM_GRAPHS = f"rollout.engine_options={FEW_GRAPHS}"
"""Without Inductor, whose compilation would take longer than the steps."""
SGLANG_GRAPHS = "rollout.engine_options={cuda_graph_bs_decode:[8,64,256,512],disable_prefill_cuda_graph:true}"
RESIDENT = ("train.offload_optimizer=false", "train.release_memory=true")
"""What preflight proposes for 141 GB: nothing is copied to host memory."""
FOUR = {
    "grpo_30b_ep4": replace(MIXTURE, overrides=(*FOUR_TRAINERS, "rollout.expert_parallel=true", VLLM_GRAPHS)),
    "grpo_30b_tp4": replace(MIXTURE, overrides=(*FOUR_TRAINERS, *RESIDENT, VLLM_GRAPHS)),
    # What preflight proposes: two processes choose what comes next.
    "grpo_30b_two_engines": replace(
        MIXTURE,
        overrides=(
            "train.parallel=d4e4",
            *SMALL_STATE,
            *RESIDENT,
            "rollout.num_engines=2",
            "rollout.tp=2",
            "rollout.expert_parallel=true",
            "rollout.max_num_seqs=256",
            "~rollout.gpu_memory_utilization",
            "rollout.kv_cache_gb=32",
            VLLM_GRAPHS.replace("256,512", "256"),
        ),
    ),
    "grpo_30b_ep4_80": replace(
        MIXTURE, overrides=(*FOUR_TRAINERS, *HOST_OPTIMIZER, "rollout.expert_parallel=true", VLLM_GRAPHS)
    ),
    "grpo_30b_tp4_80": replace(MIXTURE, overrides=(*FOUR_TRAINERS, *HOST_OPTIMIZER, VLLM_GRAPHS)),
    "grpo_30b_sglang": replace(
        MIXTURE,
        overrides=("rollout=sglang", *FOUR_TRAINERS, *RESIDENT, "rollout.expert_parallel=true", SGLANG_GRAPHS),
    ),
    "grpo_30b_2_2": replace(
        MIXTURE,
        num_layers=24,
        overrides=(
            "train.parallel=d2e2",
            *SMALL_STATE,
            "train.offload_optimizer=false",
            "cluster.colocate=false",
            "rollout.num_engines=2",
            "rollout.tp=1",
            "rollout.max_num_seqs=256",
            VLLM_GRAPHS.replace("256,512", "256"),
        ),
    ),
}
"""Cases of four devices, of 141 GB but for those whose names end in 80."""
EIGHT_8B = Case(recipe="", model="qwen3_8b", overrides=("rollout.compile=false",), prompts=64, response_tokens=1024)
OFFLINE_8B = Case(recipe="", model="qwen3_8b", overrides=(), online=False, prompts=128)
EIGHT = {
    "grpo_30b_eight": MIXTURE,
    # What preflight proposes: nothing is copied to host memory, and half of the layers are recomputed.
    "grpo_30b_eight_resident": replace(
        MIXTURE,
        overrides=(
            *RESIDENT,
            "train.recompute_options.method=block",
            "train.recompute_options.layers=24",
            "rollout.num_engines=2",
            "rollout.tp=4",
            "rollout.expert_parallel=true",
            "rollout.max_num_seqs=256",
            "~rollout.gpu_memory_utilization",
            "rollout.kv_cache_gb=24",
            VLLM_GRAPHS.replace("256,512", "256"),
        ),
    ),
    "grpo_8b_eight": replace(EIGHT_8B, recipe="grpo_qwen3_8b"),
    "dapo_8b_eight": replace(
        EIGHT_8B,
        recipe="dapo_qwen3_8b",
        overrides=(*EIGHT_8B.overrides, "algorithm.dynamic_sampling.reward_part=noise"),
    ),
    "ppo_8b_eight": replace(EIGHT_8B, recipe="ppo_qwen3_8b", prompts=256),
    "dpo_8b_eight": replace(OFFLINE_8B, recipe="dpo_qwen3_8b"),
    "kto_8b_eight": replace(OFFLINE_8B, recipe="kto_qwen3_8b"),
    "sft_8b_eight": replace(OFFLINE_8B, recipe="sft_qwen3_8b"),
    "reward_model_8b_eight": replace(OFFLINE_8B, recipe="reward_model_qwen3_8b"),
}
"""The recipes for eight devices, with fewer and shorter sequences than they ask for."""
ONE = {
    "search_4b_80": Case(
        recipe="grpo_qwen3_4b_search",
        model="qwen3_4b",
        overrides=(*SMALL_STATE, *SMALL_ENGINE),
        prompts=12,
        response_tokens=1024,
        tools=True,
    ),
    "grpo_4b": Case(recipe="grpo_qwen3_4b", model="qwen3_4b", overrides=()),
    "lora_4b": Case(recipe="grpo_qwen3_4b_lora", model="qwen3_4b", overrides=()),
    "grpo_4b_resident": Case(
        recipe="grpo_qwen3_4b",
        model="qwen3_4b",
        overrides=("train.offload_optimizer=false", "rollout.gpu_memory_utilization=0.3"),
    ),
    "ppo_1p7b": Case(
        recipe="ppo_qwen3_8b", model="qwen3_1p7b", overrides=(*ONE_DEVICE, "train.num_minibatches=2"), prompts=64
    ),
    "grpo_30b_cut": Case(
        recipe="grpo_qwen3_30b_a3b",
        model="qwen3_30b_a3b",
        num_layers=8,
        overrides=(*ONE_DEVICE, "rollout.tp=1", "train.moe.router_replay=false"),
    ),
    "dpo_4b": Case(recipe="dpo_qwen3_8b", model="qwen3_4b", overrides=tuple(ONE_TRAINER), online=False, prompts=16),
    "sft_4b": Case(recipe="sft_qwen3_8b", model="qwen3_4b", overrides=tuple(ONE_TRAINER), online=False, prompts=64),
    "reward_model_1p7b": Case(
        recipe="reward_model_qwen3_8b", model="qwen3_1p7b", overrides=tuple(ONE_TRAINER), online=False, prompts=32
    ),
}
"""Cases of one device, of 141 GB but for the first."""
CASES = FROZEN | FOUR | EIGHT | ONE
