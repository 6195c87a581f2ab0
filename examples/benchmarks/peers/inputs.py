"""What all sides of step_vs_peers.py read: one model folder with random weights, prompts, and lengths of responses."""

import json
import multiprocessing
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from async_rl import PROMPT_TOKENS, write_prompts
from async_rl_engine import draw_length
from models_by_size import MODELS, TEMPLATE, make_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["\n", "<|im_end|>"]
"""Tokens that verl asks a tokenizer of a Qwen model for."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape of a step."""

    prompts: int
    group: int = 8
    prompt_tokens: int
    response_tokens: int
    """Tokens of every response, or of the longest one."""
    mean_tokens: float = 0.0
    """Mean of the lognormal distribution of response lengths, before they are cut off. 0: all have response_tokens."""
    sigma: float = 1.0

    @property
    def responses(self) -> int:
        """The number of responses of a step."""
        return self.prompts * self.group

    @property
    def sequence_tokens(self) -> int:
        """The most tokens of a sequence. A chat template may add a few."""
        return self.prompt_tokens + self.response_tokens + 16


WORKLOADS = {
    "equal": Workload(prompts=32, prompt_tokens=170, response_tokens=512),
    "tail": Workload(prompts=8, prompt_tokens=4096, response_tokens=2048, mean_tokens=400.0),
    "async": Workload(prompts=32, prompt_tokens=64, response_tokens=4096, mean_tokens=400.0),
    "tiny": Workload(prompts=2, group=2, prompt_tokens=9, response_tokens=8),
    "tiny_tail": Workload(prompts=2, group=2, prompt_tokens=9, response_tokens=16, mean_tokens=6.0),
}


def make_inputs(folder: Path, model: str, workload: Workload, steps: int) -> None:
    """Fills `folder`: prompts and lengths of `steps` steps, and a link to the model, which all workloads share."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = folder.parent / model
    if not (shared / "model.safetensors").exists():
        config = MODELS[model]
        make_model(config, shared)
        make_tokenizer(config["vocab_size"]).save_pretrained(shared)
        # A process of its own, which leaves nothing on the device.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            pool.submit(write_weights, shared).result()
    if not (folder / "model").exists():
        (folder / "model").symlink_to(shared)
    prompts = list(islice(texts(workload, folder, MODELS[model]["vocab_size"]), workload.prompts * steps))
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": each, "answer": ""}) + "\n" for each in prompts)
    )
    (folder / "prompts_verl.jsonl").write_text(
        "".join(json.dumps(verl_row(*each)) + "\n" for each in enumerate(prompts))
    )
    (folder / "lengths.json").write_text(json.dumps(dict(lengths(each, workload) for each in prompts)))


def verl_row(row: int, text: str) -> dict[str, Any]:
    """Returns a prompt as verl reads it."""
    return {
        "data_source": "step_vs_peers",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": row},
    }


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of a word for each token; the last are those of SPECIAL, and no other begins like them."""
    names = [*(f"w{index}" for index in range(vocabulary - len(SPECIAL))), *SPECIAL]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[-1], chat_template=TEMPLATE)
    made.add_tokens(SPECIAL)
    return made


def texts(workload: Workload, folder: Path, vocabulary: int) -> Iterator[str]:
    """Yields prompts of a token for each word, no two alike. Those of `async` are async_rl.py's."""
    if workload.prompt_tokens == PROMPT_TOKENS:
        for line in write_prompts(folder / "prompts.jsonl").read_text().splitlines():
            yield json.loads(line)["prompt"]
    for row in count():
        yield " ".join(
            f"w{10 + (row * 7919 + place * 104729) % (vocabulary - 20)}" for place in range(workload.prompt_tokens)
        )


def lengths(text: str, workload: Workload) -> tuple[int, list[int]]:
    """Returns the checksum of a prompt's tokens, and the lengths that async_rl_engine.py draws for it."""
    name = zlib.crc32(np.array([int(word[1:]) for word in text.split()], dtype=np.int32).tobytes())
    generator = np.random.default_rng(name)
    if not workload.mean_tokens:
        return name, [workload.response_tokens] * workload.group
    shape = (workload.mean_tokens, workload.sigma, workload.response_tokens)
    return name, [draw_length(generator, *shape) for _ in range(workload.group)]


def write_weights(folder: Path) -> None:
    """Writes random weights in bfloat16, made on the GPU if there is one."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
