"""Gemma 3 with images: refused."""

from rlframe.models.families._refused import Refused
from rlframe.models.families.gemma3_text import REASONS

FAMILY = Refused("it has a vision tower, and rlframe trains text models", *REASONS)
