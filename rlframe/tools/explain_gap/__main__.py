"""Runs the program."""

from rlframe.tools.explain_gap import main
from rlframe.utils.arguments import run_tool

run_tool(main)
