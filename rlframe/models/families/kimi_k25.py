"""Kimi K2.5 and K2.6: refused, because of their images."""

from rlframe.models.families._refused import Refused

FAMILY = Refused(
    "the vision tower is not supported. Its language model is a Kimi K2: make a folder with the tensors "
    "language_model.*, without that prefix, and with text_config as config.json",
)
