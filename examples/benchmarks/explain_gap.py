"""Why vLLM's logprobs differ from Megatron's, of layers of Qwen3-30B-A3B on one GPU, rung by rung.

    python examples/benchmarks/explain_gap.py --output result.json

Runs `rlframe.tools.explain_gap` on the dimensions of the published model with fewer layers and random weights, in
bfloat16, with Transformer Engine and with vLLM and its CUDA graphs, on random prompts of 64 tokens. The JSON is written
after each rung, so that a run that is cut off keeps what it has. At most four engines are started, after `--limit-s`
only the last one.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from async_rl import HERE, PROMPT_TOKENS, write_prompts
from models_by_size import MODELS, make_model

SIZES = [1, 2, 4, 8, 16, 32, 64]
"""Batches for which decoding has a CUDA graph."""


def main() -> int:
    arguments = read_arguments()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"}
        done = subprocess.run(command(arguments, Path(folder)), env=environment, timeout=arguments.limit_s + 120)
        for log in Path(folder).glob("run/explain_gap/logs/*.log") if done.returncode else []:
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
    return done.returncode


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3_30b_a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each response")
    parser.add_argument("--engine-starts", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=190.0, help="seconds after which only the last engine starts")
    parser.add_argument("--skip", default="", help="rungs to leave out, with commas")
    parser.add_argument("--set", nargs="*", default=[], help="key=value for rlframe's configuration")
    parser.add_argument("--output", type=Path, default=HERE / "results/explain_gap.json")
    return parser.parse_args()


def command(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Returns the command of the tool, and writes what it reads."""
    config = MODELS[arguments.model] | {"num_hidden_layers": arguments.layers}
    graphs = f"{{mode:0,cudagraph_mode:FULL_DECODE_ONLY,cudagraph_capture_sizes:{SIZES}}}".replace(" ", "")
    settings = {
        "output": folder / "run",
        "model.path": make_model(config, folder / "model", words=config["vocab_size"]),
        "model.random_init": "true",
        "data.path": write_prompts(folder / "prompts.jsonl", count=64),
        "data.max_prompt_tokens": PROMPT_TOKENS,
        "data.evaluation_count": 0,
        "data.shuffle": "false",
        "prompts_per_step": 16,
        "reward.parts.exact_match.name": f"{HERE / 'even_characters.py'}:score",
        "rollout.max_tokens": arguments.tokens,
        "rollout.min_tokens": arguments.tokens,
        "rollout.max_model_len": 4 * PROMPT_TOKENS + arguments.tokens,
        "rollout.max_num_seqs": max(SIZES),
        # With a size of its own the engine starts beside the policy. 64 sequences of 384 tokens take 0.2 GB in float32.
        "rollout.kv_cache_gb": 2,
        "rollout.sleep_level": 0,
        "rollout.num_engines": 1,
        "rollout.engine_options": f"{{compilation_config:{graphs}}}",
        "train.dtype": "bfloat16",
        "train.optimizer.precision_aware": "true",
        "evaluation.every_steps": 0,
    }
    groups = ["rollout=vllm", "train=cuda", "cluster=cuda"]
    overrides = [*groups, *(f"{key}={value}" for key, value in settings.items()), *arguments.set]
    limits = {
        "--num-prompts": arguments.prompts,
        "--samples": arguments.samples,
        "--engine-starts": arguments.engine_starts,
        "--limit-s": arguments.limit_s,
        "--output": arguments.output.absolute(),
    }
    options = [f"{name}={value}" for name, value in limits.items()]
    options += [f"--skip={arguments.skip}"] if arguments.skip else []
    tool = ["-m", "rlframe.tools.explain_gap", "--config-name", "grpo_qwen3_moe"]
    return [sys.executable, *tool, *options, *overrides]


if __name__ == "__main__":
    sys.exit(main())
