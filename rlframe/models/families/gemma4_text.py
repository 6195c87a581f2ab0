"""Gemma 4 without images and sound: refused."""

from rlframe.models.families._refused import Refused

REASONS = (
    "its layers without a window have heads of another width than the others, and Megatron-Core has one width for all",
    "its layers share keys and values with layers before them, or use keys as values, which no layer of Megatron-Core "
    "does; use Gemma 3, or another family of rlframe/models/README.md",
)

FAMILY = Refused(*REASONS)
