"""Runs a program of verl in an environment newer than the one it was released with.

    python verl_run.py verl.trainer.main_ppo key=value ...

README.md beside this says what is patched and why.
"""

import runpy
import sys

if __name__ == "__main__":
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
