"""Starts `runner.py` beside it: Python compiles the file that it is given at every start, an imported one once."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])

import runner  # type: ignore[import-not-found]

sys.exit(runner.main(sys.argv[1:]))
