"""Tokens a second of vLLM with speculative decoding, beside plain decoding of the same requests.

    python examples/benchmarks/speculative.py MODEL --device cuda --method ngram --output result.json
    python examples/benchmarks/speculative.py MODEL --device cuda --method draft_model --draft FOLDER

MODEL is a folder or a hub id with weights. 32 requests run at once, when decoding waits for weights to be read: each
edits a short text, so that parts of the answer have occurred before. All go on for 512 tokens, whatever they are,
and the prefix cache stays as it is. One batch warms up, three are timed, the median counts. Both engines get the same
seeds. With ngram and draft_model they must sample the same tokens, except where rounding differs: `equal_fraction`.

    python examples/benchmarks/speculative.py --rehearse

does the same on a CPU with random weights of a tiny model. Its ratio says nothing about another machine.
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.hub import EMBEDDED, resolve
from rlframe.rollout.base.speculative import SpeculativeConfig, SpeculativeMethod
from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, GenerationRequest, SamplingParams

NUM_REQUESTS, REPEATS = 32, 3
TEXT = (
    "The engine reads the weights once for every step. A step that checks four drafted tokens reads them as often as a "
    "step that samples one. If the policy would have sampled the drafted tokens, the step has yielded five. Drafts "
    "come from a smaller model, from heads of the model itself, or from what the sequence has said before."
)
TASKS = (
    "Copy this text",
    "Translate this text into short bullet points",
    "Correct the grammar of this text",
    "Continue",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or hub id")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument(
        "--method", type=SpeculativeMethod, choices=list(SpeculativeMethod), default=SpeculativeMethod.NGRAM
    )
    parser.add_argument("--draft", help="folder or hub id of the draft model")
    parser.add_argument("--tokens", type=int, default=4, help="tokens drafted at once")
    parser.add_argument("--response", type=int, default=512, help="tokens of a response")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model with random weights, on a CPU")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.rehearse == (arguments.model is not None):
        parser.error("name a model, or --rehearse")
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(arguments, Path(scratch))
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def measure(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Returns the figures of both ways."""
    if arguments.rehearse:
        arguments.device, arguments.response = "cpu", min(arguments.response, 64)
        folder = random_model(scratch)
        arguments.draft = str(folder) if arguments.method is SpeculativeMethod.DRAFT_MODEL else None
    else:
        folder = resolve(ModelConfig(path=arguments.model))
    speculative = SpeculativeConfig(method=arguments.method, num_tokens=arguments.tokens, model=arguments.draft)
    plain = timed(folder, arguments, None)
    drafted = timed(folder, arguments, speculative)
    pairs = list(zip(plain.pop("tokens"), drafted.pop("tokens"), strict=True))
    return {
        "machine": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor(),
        "model": arguments.model or "tiny, random weights",
        "method": arguments.method.value,
        "num_tokens": arguments.tokens,
        "running_requests": NUM_REQUESTS,
        "response_tokens": arguments.response,
        "temperature": arguments.temperature,
        "plain": plain,
        "speculative": drafted,
        "ratio": drafted["tokens_per_s"] / plain["tokens_per_s"],
        "equal_fraction": sum(one == other for one, other in pairs) / len(pairs),
    }


def random_model(folder: Path) -> Path:
    """Returns `folder`, with the embedded model and random weights."""
    shutil.copytree(EMBEDDED / "qwen3_moe_tiny", folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def timed(folder: Path, arguments: argparse.Namespace, speculative: SpeculativeConfig | None) -> dict[str, Any]:
    """Returns the figures of one engine, with the `tokens` of the last batch."""
    cuda = arguments.device == "cuda"
    config = VllmConfig(
        speculative=speculative, max_num_seqs=NUM_REQUESTS, enforce_eager=not cuda, sleep_level=0, compile=False
    )
    engine = VllmEngine(config, folder=folder, dtype=torch.bfloat16 if cuda else torch.float32, device=arguments.device)
    engine.gate.commit(0)
    engine.generate(requests(folder, arguments, batch=0))
    before, seconds = engine.drafts(), []
    completions: list[Completion] = []
    for batch in range(1, REPEATS + 1):
        asked = requests(folder, arguments, batch=batch)
        started = time.perf_counter()
        completions = engine.generate(asked)
        seconds.append(time.perf_counter() - started)
    drafts = engine.drafts() - before
    engine.close()
    return {
        "tokens_per_s": NUM_REQUESTS * arguments.response / statistics.median(seconds),
        "batch_s": seconds,
        **drafts.metrics(),
        "tokens": [completion.token_ids.tolist() for completion in completions],
    }


def requests(folder: Path, arguments: argparse.Namespace, *, batch: int) -> list[GenerationRequest]:
    """Returns the requests of a batch."""
    words = tokenizer.load(folder)
    sampling = SamplingParams(
        temperature=arguments.temperature, max_tokens=arguments.response, min_tokens=arguments.response
    )
    made = []
    for index in range(NUM_REQUESTS):
        message = {"role": "user", "content": f"{TASKS[index % len(TASKS)]} ({index}):\n\n{TEXT}"}
        text = str(words.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
        ids = np.array(words.encode(text, add_special_tokens=False))
        made.append(GenerationRequest(input=ModelInput(ids), sampling=sampling, seed=1000 * batch + index))
    return made


if __name__ == "__main__":
    main()
