"""Starts the program beside it: Python compiles the file that it is given at every start, an imported one once."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])

from runner import main  # type: ignore[import-not-found]

sys.exit(main(sys.argv[1:]))
