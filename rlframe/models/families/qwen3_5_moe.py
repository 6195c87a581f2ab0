"""Qwen3.5 with images and experts: refused."""

from rlframe.models.families._refused import Refused
from rlframe.models.families.qwen3_5 import REASONS

FAMILY = Refused(*REASONS)
