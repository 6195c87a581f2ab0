"""Mistral Small 3.1 and later, and Ministral 3 with images: refused."""

from rlframe.models.families._refused import VISION, Refused

FAMILY = Refused(VISION)
