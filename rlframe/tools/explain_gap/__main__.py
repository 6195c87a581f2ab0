"""Runs the program."""

import sys

from rlframe.tools.explain_gap import main

sys.exit(main())
