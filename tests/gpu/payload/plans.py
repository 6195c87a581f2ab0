"""Writes plans for jobs.py: what is to be measured on one, two, four or eight GPUs, the most wanted first.

    python tests/gpu/payload/plans.py kernels > plan.json

Peers need peers.py's packages in ~/peers_site. A run of rlframe starts in 90 to 170 seconds on a slow host, verl in 180
to 340.
"""

import argparse
import json
from typing import Any

BENCHMARKS = "python examples/benchmarks"
FOUR, EIGHT = "0,1,2,3", "0,1,2,3,4,5,6,7"
ONE_PROCESS = "--set rlframe:++rollout.worker_process=false"
WIDE = {
    "rlframe": "--set rlframe:++train.max_tokens_per_microbatch=17408 --set rlframe:train.release_memory=false "
    "--set rlframe:++rollout.sleep_level=0",
    "verl": "--set verl:actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480",
    "trl": " ".join(
        f"--set trl:{key}=16"
        for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    )
    + " --set trl:vllm_enable_sleep_mode=false",
}
"""Micro-batches of twice the tokens, and vLLM awake where it fits beside them, for GPUs of 141 GB."""
Job = dict[str, Any]
Phase = dict[str, list[Job]]
"""Jobs by the GPUs of their lane."""
SPARE_S = 35
"""Seconds of a job beside those of the run that its benchmark ends: imports, and the end itself."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", choices=PLANS)
    print(json.dumps(PLANS[parser.parse_args().plan], indent=1))


def job(name: str, run: str, limit_s: int, **more: Any) -> Job:
    """Returns a job."""
    return {"name": name, "run": run, "limit_s": limit_s, **more}


def side(name: str, of: str, limit_s: int, more: str = "", *, warm_up: int = 2) -> Job:
    """Returns a job that runs one side of step_vs_peers.py on the GPU of its lane. Its model is deleted after it."""
    script = f"{BENCHMARKS}/step_vs_peers.py {of} {more} --gpu $CUDA_VISIBLE_DEVICES --warm-up {warm_up} --steps 3"
    folders = f"--folder /tmp/{name}/inputs --logs $RESULT/logs --output $RESULT/out"
    run = f"{script} --limit-s {limit_s - SPARE_S} {folders}; rc=$?; rm -rf /tmp/{name}/inputs; exit $rc"
    return job(name, run, limit_s, **({} if of == "rlframe" else {"path": ["peers_site"]}))


def benchmark(name: str, run: str, limit_s: int, **more: Any) -> Job:
    """Returns a job that runs a benchmark, whose own limit leaves it time to write what it has."""
    ends_itself = " --logs $RESULT/logs --limit-s " + str(limit_s - SPARE_S)
    has_limit = run.startswith(("recipes.py", "async_rl.py"))
    command = f"{BENCHMARKS}/{run} --output $RESULT/result.json{ends_itself if has_limit else ''}"
    return job(name, command, limit_s, **more)


def tests(name: str, run: str, limit_s: int) -> Job:
    """Returns a job of tests."""
    return job(name, f"python -m pytest -o addopts='' -q {run}", limit_s)


DRAWS = tests(
    "draws",
    "tests/gpu/test_one_pass_cuda.py tests/gpu/test_seeded_draws_cuda.py tests/gpu/test_router_replay_cuda.py "
    "tests/gpu/test_weight_sync_cuda.py -k 'not sglang'",
    400,
)
QUERY_KEY = benchmark("query_key", "query_key.py --search", 90)
KERNELS = [
    DRAWS,
    QUERY_KEY,
    benchmark("attention", "shared_attention.py", 70),
    benchmark("decode_layer", "decode_layer.py --search", 150),
    tests(
        "options",
        "tests/gpu/test_training_options_cuda.py tests/gpu/test_families_cuda.py",
        300,
    ),
]
OURS = "rlframe rlframe_one_process rlframe_unshared rlframe_two_steps"
ROLLOUT = benchmark("rollout", f"rollout_vs_engine.py qwen3_1p7b --group 8 --repeats 2 --cases offline {OURS}", 300)
TRAINING = benchmark("training", "train_step.py qwen3_1p7b_equal qwen3_1p7b_tail --profile", 200)
CUT = "train_step.py qwen3_30b_a3b_cut --profile"
TAIL = "--workload tail"
LOOPS = "--set train.max_tokens_per_microbatch=16384"
MIXTURE = "--model qwen3_30b_a3b --layers 24 --prompts 64"
DENSE = (
    "--model qwen3_4b --prompts 64 --set train.parallel=d2 rollout.num_engines=2 train.max_tokens_per_microbatch=5120"
)
PLANS: dict[str, list[Phase]] = {
    "kernels": [{"0": [TRAINING, ROLLOUT, *KERNELS]}],
    # 1,000 seconds on a slow host: a mixture on two GPUs, a teacher with heads of its own, and what was cut off.
    "experts": [
        {"0,1": [benchmark("ep2", "train_step.py qwen3_30b_a3b_ep2 --profile", 140)]},
        {"0,1": [tests("teachers", "tests/gpu/test_loops_cuda.py -k gkd", 240)]},
        {
            "0": [benchmark("offline", f"loops.py pretrain classification {LOOPS}", 200)],
            "1": [
                benchmark(
                    "checkpoint", "checkpoint_speed.py qwen3_1p7b --folder /tmp/disk --sequences 16 --rounds 1", 300
                )
            ],
        },
    ],
    "equal": [
        {
            "0": [side("verl", "verl", 470, warm_up=1)],
            "1": [side("rlframe", "rlframe", 270), QUERY_KEY],
            "2": [side("rlframe_one_process", "rlframe", 270, ONE_PROCESS)],
            "3": [side("trl", "trl", 250, warm_up=1), ROLLOUT],
        }
    ],
    "tail": [
        {
            "0": [side("verl_tail", "verl", 470, TAIL, warm_up=1)],
            "1": [side("rlframe_tail", "rlframe", 290, TAIL)],
            "2": [side("rlframe_one_process_tail", "rlframe", 290, f"{TAIL} {ONE_PROCESS}")],
            "3": [side("trl_tail", "trl", 420, TAIL, warm_up=1)],
        }
    ],
    # 1,300 seconds: the second workload on all sides, one after the other.
    "one_h200": [
        {
            "0": [
                side("rlframe_tail", "rlframe", 300, f"{TAIL} {WIDE['rlframe']}"),
                side("verl_tail", "verl", 520, TAIL, warm_up=1),
                side("trl_tail", "trl", 420, TAIL, warm_up=1),
                benchmark("attention", "shared_attention.py", 70),
            ]
        }
    ],
    # 1,000 seconds: both workloads on all sides, and tests.
    "two_h200": [
        {
            "0": [
                side("verl", "verl", 470, WIDE["verl"], warm_up=1),
                side("verl_tail", "verl", 520, TAIL, warm_up=1),
                DRAWS,
            ],
            "1": [
                side("trl", "trl", 250, WIDE["trl"], warm_up=1),
                side("rlframe", "rlframe", 300, WIDE["rlframe"]),
                side("rlframe_tail", "rlframe", 300, f"{TAIL} {WIDE['rlframe']}"),
                side("trl_tail", "trl", 420, TAIL, warm_up=1),
                ROLLOUT,
            ],
        }
    ],
    "four_h200": [
        {
            FOUR: [benchmark("mixture1", f"async_rl.py mixture_lag1 {MIXTURE} --warm-up 2 --steps 4", 350)],
            # The policy of the run beside them leaves room for their models.
            "0": [DRAWS],
        },
        {FOUR: [benchmark("mixture0", f"async_rl.py mixture_lag0 {MIXTURE} --warm-up 1 --steps 2", 270)]},
        {FOUR: [benchmark("tp4", "recipes.py grpo_30b_tp4 --warm-up 1 --steps 1", 400)]},
        {FOUR: [benchmark("2_2", "recipes.py grpo_30b_2_2 --warm-up 1 --steps 1", 380)]},
        {FOUR: [benchmark("sglang", "recipes.py grpo_30b_sglang --warm-up 1 --steps 1", 480, path=["sglang_site"])]},
    ],
    "four_h100": [
        {FOUR: [benchmark("dense0", f"async_rl.py lag0 {DENSE} --warm-up 2 --steps 4", 240)]},
        {FOUR: [benchmark("dense1", f"async_rl.py lag1 {DENSE} --warm-up 3 --steps 5", 240)]},
    ],
    "eight_h200": [
        {EIGHT: [benchmark("resident", "recipes.py grpo_30b_eight_resident --warm-up 1 --steps 2", 400)]},
        {EIGHT: [benchmark("sync", "weight_sync.py 235b", 400)]},
        {EIGHT: [benchmark("grpo_8b", "recipes.py grpo_8b_eight --warm-up 1 --steps 2", 300)]},
        {EIGHT: [benchmark("ppo_8b", "recipes.py ppo_8b_eight --warm-up 1 --steps 2", 300)]},
    ],
}

if __name__ == "__main__":
    main()
