"""Tells why the engine's logprobs differ from the trainer's: `python -m rlframe.tools.explain_gap --config-name NAME`.

command     the command line
settings    the settings with which both sides start
sides       what a ladder asks of trainer and engine
running     both sides in their processes
ladder      the climb: one measurement a rung
rungs       the causes, a file each
gap         statistics of a difference of logprobs
rest        what the tokens say of a gap that no rung explains
answer      the table and the JSON
"""

from rlframe.tools.explain_gap.command import main

__all__ = ["main"]
