"""Gemma 3 without images (the 1B model, and the language model of the others): refused."""

from rlframe.models.families._refused import Refused

REASONS = (
    "the norms behind attention and behind the MLP have no place in a layer of Megatron-Core 0.16.1",
    "layers with a window have another rope_theta than the others, and its GPTModel has one for all",
    "embeddings are multiplied by the root of hidden_size, which its GPTModel does not do",
)

FAMILY = Refused(*REASONS)
