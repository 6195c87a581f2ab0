"""Qwen3.5 with images, dense: refused."""

from rlframe.models.families._refused import Refused

REASONS = (
    "it has a vision tower, and rlframe trains text models; save its language model in a folder of its own, once: "
    "transformers.AutoModelForCausalLM.from_pretrained(PATH, dtype='auto').save_pretrained(FOLDER), and the tokenizer "
    "with AutoTokenizer beside it",
)

FAMILY = Refused(*REASONS)
