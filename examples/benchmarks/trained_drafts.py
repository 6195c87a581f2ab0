"""A model with a head for multi-token prediction and a draft model for it, trained here on a text.

Random weights have no draft that follows them, and a machine without a network no others. So both models learn the same
answers by `rlframe.main`, from nothing, until they know them: then the draft knows what the model will say, as a draft
of a published model does for most of its tokens. What that yields depends on the acceptance, which belongs to every
figure.
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl import follow, stop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, SPECIAL = "<|end|>", ["<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = 8192
"""Tokens that the tokenizer has. The models have more rows, as many as Qwen3."""
LIMIT_S = 420.0
"""Seconds that training may take."""
ON_CUDA = {
    "train.optimizer.precision_aware": "true",
    "train.optimizer.moment_dtype": "bfloat16",
    "train.max_tokens_per_microbatch": 8192,
}
COMMON = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
}
TARGET = COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": False,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
    # vLLM wants experts in the head, so the last layer, to which the head is alike, has some too.
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
DRAFT = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "use_sliding_window": False,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 8192,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """Dimensions of a model and of its draft model."""

    target: dict[str, Any]
    draft: dict[str, Any]


SIZES = {
    "tiny": Size(target=TARGET | TINY | {"first_k_dense_replace": 1, "moe_intermediate_size": 64}, draft=DRAFT | TINY),
    # Those of Qwen3-1.7B and Qwen3-4B, but for the last layer and an output layer of its own.
    "1p7b": Size(
        target=TARGET
        | {
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "intermediate_size": 6144,
            "first_k_dense_replace": 27,
            "moe_intermediate_size": 2048,
        },
        draft=DRAFT,
    ),
    "4b": Size(
        target=TARGET
        | {
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "intermediate_size": 9728,
            "first_k_dense_replace": 35,
            "moe_intermediate_size": 3072,
        },
        draft=DRAFT,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Both models in Hugging Face format, and what they were trained on."""

    target: Path
    draft: Path
    questions: list[str]
    figures: dict[str, Any]
    """Nats a token of both at the end, of the head too, and the seconds that training took."""


def train(data: Path, folder: Path, *, size: str, examples: int, steps: int, cuda: bool) -> Trained:
    """Returns the models of that size after `steps` steps on the first `examples` answers of a JSONL file of
    {question, answer}. Both are trained at the same time."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()[:examples]]
    learned = folder / "examples.jsonl"
    learned.write_text(
        "".join(json.dumps({"prompt": row["question"], "completion": row["answer"]}) + "\n" for row in rows)
    )
    words = tokenizer([text for row in rows for text in (row["question"], row["answer"])])
    started, running = time.monotonic(), {}
    for name, config in (("target", SIZES[size].target), ("draft", SIZES[size].draft)):
        words.save_pretrained(folder / name)
        eos = words.convert_tokens_to_ids(END)
        (folder / name / "config.json").write_text(json.dumps(config | {"eos_token_id": eos, "pad_token_id": eos}))
        changes = settings(folder / name, learned, folder / f"{name}_run", steps=steps, batch=min(16, examples))
        changes |= {"train": "cuda", "cluster": "cuda"} | ON_CUDA if cuda else {"train": "cpu", "cluster": "cpu"}
        if name == "target":
            changes |= {"train.mtp.mode": "train", "train.mtp.loss_scaling_factor": 1.0}
        running[name] = start(folder / f"{name}_run", changes)
    # At once: the smaller model would go on meanwhile, and come to its end.
    with ThreadPoolExecutor(len(running)) as pool:
        ends = {name: pool.submit(wait, process, folder / f"{name}_run", steps) for name, process in running.items()}
    return Trained(
        target=ends["target"].result(),
        draft=ends["draft"].result(),
        questions=[row["question"] for row in rows],
        figures={"train_s": time.monotonic() - started, "examples": len(rows), "steps": steps}
        | {name: losses(folder / f"{name}_run") for name in running},
    )


def settings(model: Path, data: Path, output: Path, *, steps: int, batch: int) -> dict[str, Any]:
    """Returns what is changed in the recipe of the embedded model."""
    return {
        "output": output,
        "model.path": model,
        "model.random_init": "true",
        "data.path": data,
        "data.evaluation_count": 0,
        "evaluation.every_steps": 0,
        "prompts_per_step": batch,
        # More than are waited for: at the end the run would save everything.
        "steps": steps + 100,
        "train.parallel": "d1",
        "train.optimizer.lr": 5e-4,
        "train.optimizer.warmup_steps": min(20, steps // 2),
        "checkpoint.every_steps": 0,
        "checkpoint.export_every_steps": steps,
        "checkpoint.on_signal_s": 0,
        "cluster.preflight": "off",
        "logging.progress": "false",
        "logging.tensorboard": "false",
    }


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of byte pairs made for these texts."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=WORDS,
            special_tokens=[END, *SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END, pad_token=END, chat_template=TEMPLATE)


def start(output: Path, changes: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Returns the process of a run."""
    overrides = [f"{key}={value}" for key, value in changes.items()]
    command = [sys.executable, "-m", "rlframe.main", "--config-name", "sft_qwen3_moe_tiny", *overrides]
    with output.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def wait(process: "subprocess.Popen[bytes]", output: Path, steps: int) -> Path:
    """Returns the export of a run after `steps` steps, and ends the run."""
    # The next step is written when the export is complete.
    written = list(follow(output / "metrics.jsonl", process, count=steps + 1, until=time.time() + LIMIT_S))
    stop(process)
    if len(written) <= steps:
        raise SystemExit(f"training came to no end:\n{output.with_suffix('.log').read_text()[-3000:]}")
    return output / "exports" / f"step-{steps:08d}"


def losses(output: Path) -> dict[str, float]:
    """Returns the last losses of a run in nats a token."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "train/loss" in line]
    return {key: trained[-1][key] for key in ("train/loss", "train/mtp_loss") if key in trained[-1]}
