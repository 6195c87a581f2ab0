"""Runs the program."""

from rlframe.tools.doctor import main
from rlframe.utils.arguments import run_tool

run_tool(main)
