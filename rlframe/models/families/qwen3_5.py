"""Qwen3.5 with images, dense: refused."""

from rlframe.models.families._refused import Refused

REASONS = (
    "it has a vision tower, and rlframe trains text models. Save its language model by itself, once: "
    "model = transformers.AutoModelForCausalLM.from_pretrained(PATH, dtype='auto'); model._weight_conversions = None; "
    "model.save_pretrained(FOLDER), and the tokenizer with AutoTokenizer beside it. Without the second, names keep "
    "the prefix language_model",
)

FAMILY = Refused(*REASONS)
