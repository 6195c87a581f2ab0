"""Tokens a second of vLLM with speculative decoding, beside plain decoding of the same requests.

    python examples/benchmarks/speculative.py MODEL --device cuda --method ngram --output result.json
    python examples/benchmarks/speculative.py MODEL --device cuda --method draft_model --draft FOLDER

MODEL is a folder or a hub id with weights. 32 requests run at once, when decoding waits for weights to be read: each
edits a short text, so that parts of the answer have occurred before. All go on for 512 tokens, whatever they are,
and the prefix cache stays as it is. One batch warms up, three are timed, the median counts. Both engines get the same
seeds. With ngram and draft_model they must sample the same tokens, except where rounding differs: `equal_fraction`.

    python examples/benchmarks/speculative.py --train train.jsonl --device cuda --output result.json

needs no weights: it trains a model with a head for multi-token prediction, and a draft model, on the first answers of a
file of {question, answer} until they know them (trained_drafts.py), and asks the same questions, 32 at a time, 128 in a
batch, until each answer ends. Every way to draft is measured; `mtp_second_runner` is vLLM's model runner V2 with vLLM's
own check of drafts (docs/speculative.md). How well the models know the text decides the acceptance, and that the ratio.

    python examples/benchmarks/speculative.py --rehearse [--train train.jsonl]

does the same on a CPU with tiny models. Its ratio says nothing about another machine.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trained_drafts import SIZES, Trained, train
from transformers import AutoConfig, AutoModelForCausalLM

from rlframe.models import tokenizer
from rlframe.models.config import ModelConfig
from rlframe.models.hub import EMBEDDED, resolve
from rlframe.rollout.base.speculative import SpeculativeConfig, SpeculativeMethod
from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.decode import runner
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, GenerationRequest, SamplingParams

NUM_REQUESTS, REPEATS = 32, 3
ASKED = 4
"""Batches' worth of questions to trained models: as one answer ends the next begins, so that 32 run."""
WAYS = {
    "ngram": SpeculativeMethod.NGRAM,
    "draft_model": SpeculativeMethod.DRAFT_MODEL,
    "mtp": SpeculativeMethod.MTP,
    "mtp_second_runner": SpeculativeMethod.MTP,
}
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
    parser.add_argument("--train", type=Path, metavar="FILE", help="train both models on this text first")
    parser.add_argument("--size", choices=list(SIZES), default="4b", help="of the model that --train trains")
    parser.add_argument("--examples", type=int, default=64, help="answers that --train learns")
    parser.add_argument("--steps", type=int, default=240, help="optimizer steps of --train")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of drafting, with --train")
    parser.add_argument("--compile", action="store_true", help="let Inductor compile the models (rollout.compile)")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if (arguments.rehearse or arguments.train is not None) == (arguments.model is not None):
        parser.error("name a model, or --train, or --rehearse")
    with tempfile.TemporaryDirectory() as scratch:
        measured = measure if arguments.train is None else measure_trained
        result = measured(arguments, Path(scratch))
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


def measure_trained(arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Returns the figures of plain decoding and of every way to draft, of models that are trained first."""
    if arguments.rehearse:
        arguments.device, arguments.size, arguments.response = "cpu", "tiny", min(arguments.response, 64)
        arguments.examples, arguments.steps = min(arguments.examples, 8), min(arguments.steps, 20)
    trained = train(
        arguments.train,
        scratch,
        size=arguments.size,
        examples=arguments.examples,
        steps=arguments.steps,
        cuda=arguments.device == "cuda",
    )
    show(trained.figures)
    plain = timed(trained.target, arguments, None, questions=trained.questions)
    tokens = plain.pop("tokens")
    show({"plain": plain})
    found = {}
    for way in arguments.ways:
        found[way] = drafted(way, trained, arguments)
        pairs = list(zip(tokens, found[way].pop("tokens"), strict=True))
        found[way]["ratio"] = found[way]["tokens_per_s"] / plain["tokens_per_s"]
        found[way]["equal_fraction"] = sum(one == other for one, other in pairs) / len(pairs)
        show({way: found[way]})
    return {
        "machine": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor(),
        "model": f"{arguments.size}, trained on {len(trained.questions)} answers",
        "trained": trained.figures,
        "num_tokens": arguments.tokens,
        "running_requests": NUM_REQUESTS,
        "temperature": arguments.temperature,
        "compile": arguments.compile,
        "plain": plain,
        "speculative": found,
    }


def show(figures: dict[str, Any]) -> None:
    """Prints figures as they come: a measurement that is cut off has the others."""
    print(json.dumps(figures), flush=True)


def drafted(way: str, trained: Trained, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of a way to draft."""
    method = WAYS[way]
    model = str(trained.draft) if method is SpeculativeMethod.DRAFT_MODEL else None
    speculative = SpeculativeConfig(method=method, num_tokens=arguments.tokens, model=model)
    with second_runner(way == "mtp_second_runner"):
        return timed(trained.target, arguments, speculative, questions=trained.questions)


@contextmanager
def second_runner(chosen: bool) -> Iterator[None]:
    """Makes engines that start inside the `with` take vLLM's model runner V2, as the environment variable does."""
    before = runner.CHOSEN_RUNNER
    if chosen:
        runner.CHOSEN_RUNNER = os.environ[runner.RUNNER] = "1"
    yield
    runner.CHOSEN_RUNNER = before


def random_model(folder: Path) -> Path:
    """Returns `folder`, with the embedded model and random weights."""
    shutil.copytree(EMBEDDED / "qwen3_moe_tiny", folder, dirs_exist_ok=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def timed(
    folder: Path,
    arguments: argparse.Namespace,
    speculative: SpeculativeConfig | None,
    *,
    questions: list[str] | None = None,
) -> dict[str, Any]:
    """Returns the figures of one engine, with the `tokens` of the last batch.

    Args:
        questions: what is asked; None asks for edits of a text.
    """
    cuda = arguments.device == "cuda"
    config = VllmConfig(
        speculative=speculative,
        max_num_seqs=NUM_REQUESTS,
        max_model_len=4096 if questions else None,
        kv_cache_gb=8.0 if questions and cuda else None,
        enforce_eager=not cuda,
        sleep_level=0,
        compile=arguments.compile,
    )
    engine = VllmEngine(config, folder=folder, dtype=torch.bfloat16 if cuda else torch.float32, device=arguments.device)
    engine.gate.commit(0)
    engine.generate(requests(folder, arguments, questions, batch=0))
    before, seconds, speeds = engine.drafts(), [], []
    completions: list[Completion] = []
    for batch in range(1, REPEATS + 1):
        asked = requests(folder, arguments, questions, batch=batch)
        started = time.perf_counter()
        completions = engine.generate(asked)
        seconds.append(time.perf_counter() - started)
        speeds.append(sum(len(each.token_ids) for each in completions) / seconds[-1])
    drafts = engine.drafts() - before
    engine.close()
    return {
        "tokens_per_s": statistics.median(speeds),
        "batch_s": seconds,
        "response_tokens_mean": statistics.mean(len(each.token_ids) for each in completions),
        **drafts.metrics(),
        "tokens": [completion.token_ids.tolist() for completion in completions],
    }


def requests(
    folder: Path, arguments: argparse.Namespace, questions: list[str] | None, *, batch: int
) -> list[GenerationRequest]:
    """Returns the requests of a batch."""
    words = tokenizer.load(folder)
    shortest = 0 if questions else arguments.response
    sampling = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.response, min_tokens=shortest)
    edits = [f"{TASKS[index % len(TASKS)]} ({index}):\n\n{TEXT}" for index in range(NUM_REQUESTS)]
    asked = [questions[index % len(questions)] for index in range(ASKED * NUM_REQUESTS)] if questions else edits
    made = []
    for index, content in enumerate(asked):
        message = {"role": "user", "content": content}
        text = str(words.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
        ids = np.array(words.encode(text, add_special_tokens=False))
        made.append(GenerationRequest(input=ModelInput(ids), sampling=sampling, seed=1000 * batch + index))
    return made


if __name__ == "__main__":
    main()
