"""Gemma 3 with images: refused."""

from rlframe.models.families._refused import Refused

FAMILY = Refused(
    "it has a vision tower, and rlframe trains text models: save its language model alone with "
    "`Gemma3ForCausalLM.from_pretrained(PATH).save_pretrained(FOLDER)` of transformers, and train that"
)
