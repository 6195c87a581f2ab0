"""Tiny models with a tokenizer, ready for a rollout engine, and requests for them."""

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlframe.types.input import ModelInput
from rlframe.types.rollout import GenerationRequest, SamplingParams
from tests.tiny_models import COMMON, make

EOS = 2
WORDS = ["<pad>", "<unk>", "<eos>", "<user>", "<assistant>"] + [f"w{i}" for i in range(5, COMMON["vocab_size"])]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_with_tokenizer(name: str, folder: Path, **changes: Any) -> Path:
    """`folder`, with the model `name` of `tests.tiny_models`, with `changes`, and a tokenizer of one word per token."""
    make(name, folder, **changes)
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder


def make_requests(
    num_prompts: int, *, group_size: int = 1, sampling: SamplingParams, longest: int = 20
) -> list[GenerationRequest]:
    """`num_prompts * group_size` requests with prompts of 1 to `longest` tokens and a seed each."""
    generator = random.Random(0)
    prompts = [
        tuple(generator.randrange(5, len(WORDS)) for _ in range(generator.randint(1, longest)))
        for _ in range(num_prompts)
    ]
    return [
        GenerationRequest(input=ModelInput(prompt), sampling=sampling, seed=1000 * index + sample)
        for index, prompt in enumerate(prompts)
        for sample in range(group_size)
    ]
