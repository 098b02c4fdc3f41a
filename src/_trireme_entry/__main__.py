"""Runs the module that the command line names, with the words behind it, as `python -m` does."""

import sys
from runpy import run_module

del sys.argv[0]
run_module(sys.argv[0], run_name="__main__", alter_sys=True)
