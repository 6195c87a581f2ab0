"""TRL's side of step_vs_trl.py: runs under TRL's own Python, does one GRPO step for each line it reads.

Reads `step` lines from stdin and answers each with one JSON line on stdout: seconds of the step and of its phases.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

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

    def _timed(self, phase, method, *args, **kwargs):
        begin = time.perf_counter()
        result = method(*args, **kwargs)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
        return result

    def _generate_single_turn(self, *args, **kwargs):
        return self._timed("generation", super()._generate_single_turn, *args, **kwargs)

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
        self.trainer.seconds = {}
        self.begin = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        total = time.perf_counter() - self.begin
        seconds = self.trainer.seconds
        reply = {
            "step": total,
            "generation": seconds["generation"],
            "reward_and_advantages": seconds["generation_and_scoring"] - seconds["generation"],
            "forward": seconds["forward"],
            "backward_and_optimizer": total - seconds["generation_and_scoring"] - seconds["forward"],
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
    return parser.parse_args()


def reward(completions: list, **kwargs) -> list[float]:
    """The reward of each completion, a list of one assistant message."""
    return [score(completion[0]["content"]) for completion in completions]


def build(arguments: argparse.Namespace, callback: StepOnRequest) -> PhasedTrainer:
    """The trainer with everything off that a bare step does not need, in float32 on the CPU."""
    records = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [{"prompt": [{"role": "user", "content": record["prompt"]}]} for record in records]
    config = GRPOConfig(
        output_dir=arguments.output,
        use_cpu=True,
        bf16=False,
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
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = PhasedTrainer(
        model=arguments.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[callback],
    )
    callback.trainer = trainer
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
