"""Makes config and tokenizer of the embedded models; their weights come from the supervised recipes.

    python examples/embedded_model/make_tokenizer.py FOLDER            for qwen3_moe_tiny and qwen3_moe_tiny_reasoning
    python examples/embedded_model/make_tokenizer.py FOLDER --tools    for qwen3_moe_tiny_tools

One token per byte, so that any text can be written, plus special tokens: five, and three more for calls of tools.
"""

import pathlib
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL_SPECIAL = ("<|tool|>", "<tool_call>", "</tool_call>")
# Tools by name and arguments only: a schema would be longer than the problem.
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}("
    "{{ tool.function.parameters.properties | join(', ') }}){% if not loop.last %}\n{% endif %}{% endfor %}<|end|>"
    "{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(*, tools: bool = False) -> PreTrainedTokenizerFast:
    """Bytes as tokens, special tokens first."""
    special = [*SPECIAL, *(TOOL_SPECIAL if tools else ())]
    symbols = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=special[2:],
        chat_template=TOOL_TEMPLATE if tools else CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def make_config(vocab_size: int) -> Qwen3MoeConfig:
    """Half a million parameters: two layers of eight experts."""
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=SPECIAL.index("<|pad|>"),
        bos_token_id=None,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    tokenizer = make_tokenizer(tools="--tools" in sys.argv)
    tokenizer.save_pretrained(folder)
    config = make_config(len(tokenizer))
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id).save_pretrained(folder)
