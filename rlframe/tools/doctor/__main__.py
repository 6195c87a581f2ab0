"""Runs the program."""

import sys

from rlframe.tools.doctor import main

sys.exit(main())
