"""Gemma 4 with images and sound: refused, as is its language model."""

from rlframe.models.families._refused import Refused
from rlframe.models.families.gemma4_text import REASONS

FAMILY = Refused(*REASONS)
