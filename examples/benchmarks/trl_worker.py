"""TRL's side of step_vs_trl.py and step_vs_peers.py: runs under TRL's own Python, one GRPO step for each line read.

Reads `step` lines from stdin and answers each with one JSON line on stdout: seconds of the step and of its phases, when
each phase began and ended, and the tokens of the step's responses. On CUDA vLLM samples in this process.
"""

import argparse
import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from even_characters import score
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class PhasedTrainer(GRPOTrainer):
    """GRPOTrainer that notes how long its own methods take."""

    seconds: dict[str, float]
    spans: list[tuple[str, float, float]]
    """Name of a phase, and when it began and ended."""
    response_tokens = 0

    def _timed(self, phase, method, *args, **kwargs):
        begin, begin_at = time.perf_counter(), time.time()
        result = method(*args, **kwargs)
        if torch.cuda.is_available() and phase != "forward":
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
        self.spans.append((phase, begin_at, time.time()))
        return result

    def time_weight_sync(self):
        """Times what brings the weights to vLLM, a part of the generation."""
        original = self.vllm_generation.sync_weights
        self.vllm_generation.sync_weights = lambda: self._timed("weight_sync", original)

    def _generate_single_turn(self, *args, **kwargs):
        result = self._timed("generation", super()._generate_single_turn, *args, **kwargs)
        self.response_tokens = sum(map(len, result[0]))
        return result

    def _generate_and_score_completions(self, inputs):
        return self._timed("generation_and_scoring", super()._generate_and_score_completions, inputs)

    def compute_loss(self, *args, **kwargs):
        return self._timed("forward", super().compute_loss, *args, **kwargs)


class StepOnRequest(TrainerCallback):
    """Holds the trainer between steps until the parent asks for the next one."""

    def __init__(self, replies):
        self.replies = replies
        self.trainer: PhasedTrainer | None = None
        self.begin = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if sys.stdin.readline().strip() != "step":
            sys.exit(0)
        self.trainer.seconds, self.trainer.spans = {}, []
        self.begin = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        total = time.perf_counter() - self.begin
        seconds, spans = self.trainer.seconds, self.trainer.spans
        train_begin = next(end for phase, _, end in spans if phase == "generation_and_scoring")
        reply = {
            "step": total,
            "generation": seconds["generation"] - seconds.get("weight_sync", 0.0),
            "weight_sync": seconds.get("weight_sync", 0.0),
            "reward_and_advantages": seconds["generation_and_scoring"] - seconds["generation"],
            "forward": seconds["forward"],
            "backward_and_optimizer": total - seconds["generation_and_scoring"] - seconds["forward"],
            "spans": [*spans, ("train", train_begin, time.time())],
            "response_tokens": self.trainer.response_tokens,
        }
        answer(self.replies, reply)


def answer(replies, reply: dict) -> None:
    """One JSON line to the parent."""
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def read_arguments() -> argparse.Namespace:
    """What step_vs_trl.py passes on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder of the model and its tokenizer")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a `prompt` in each line")
    parser.add_argument("--prompts-per-step", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--response-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON of further fields of GRPOConfig")
    parser.add_argument("--lengths", type=Path, help="JSON with the lengths of the responses to each prompt")
    return parser.parse_args()


def force_lengths(engine: Any, file: Path) -> None:
    """Gives each response the length that `file` says: a list by the checksum of the prompt's tokens."""
    lengths = {int(name): iter(values) for name, values in json.loads(file.read_text()).items()}
    generate = engine.generate

    def with_lengths(prompts, sampling_params, **others):
        chosen = []
        for prompt in prompts:
            name = zlib.crc32(np.asarray(prompt["prompt_token_ids"], dtype=np.int32).tobytes())
            parameters = sampling_params.clone()
            parameters.max_tokens = next(lengths[name])
            chosen.append(parameters)
        return generate(prompts, sampling_params=chosen, **others)

    engine.generate = with_lengths


def reward(completions: list, **kwargs) -> list[float]:
    """The reward of each completion, a list of one assistant message."""
    return [score(completion[0]["content"]) for completion in completions]


def build(arguments: argparse.Namespace, callback: StepOnRequest) -> PhasedTrainer:
    """The trainer with everything off that a bare step does not need: float32 on the CPU, bfloat16 with float32 weights
    on CUDA."""
    records = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [{"prompt": [{"role": "user", "content": record["prompt"]}]} for record in records]
    device: dict[str, Any] = {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
    if arguments.device == "cuda":
        device = {"bf16": True, "use_vllm": True, "vllm_mode": "colocate"}
    defaults = dict(
        output_dir=arguments.output,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=arguments.prompts_per_step * arguments.group_size,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=arguments.group_size,
        max_completion_length=arguments.response_tokens,
        generation_kwargs={"min_new_tokens": arguments.response_tokens},
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=arguments.steps,
        shuffle_dataset=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = PhasedTrainer(
        model=arguments.model,
        reward_funcs=reward,
        args=GRPOConfig(**(defaults | device | arguments.settings)),
        train_dataset=Dataset.from_list(prompts),
        callbacks=[callback],
    )
    callback.trainer = trainer
    if trainer.use_vllm:
        trainer.time_weight_sync()
        if arguments.lengths:
            force_lengths(trainer.vllm_generation.llm, arguments.lengths)
    return trainer


def main() -> None:
    """Build the trainer, say so with the versions, then step on request."""
    arguments = read_arguments()
    torch.set_num_threads(arguments.threads)
    # Libraries may print; the replies keep a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    trainer = build(arguments, StepOnRequest(replies))
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    answer(replies, {"versions": versions, "parameters": sum(p.numel() for p in trainer.model.parameters())})
    trainer.train()


if __name__ == "__main__":
    main()
