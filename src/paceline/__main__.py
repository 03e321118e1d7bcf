"""`python -m paceline`: the command line. The launcher starts its workers this way."""

import os
import sys

# `python -m` puts the current folder first on the path, where a queue.py would replace the standard library's: remove it unless
# Paceline itself was found through it, in a source tree. Loading a task adds it behind the standard library (tasks.py).
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not sys.flags.safe_path and sys.path[0] == os.getcwd() != _ROOT:
    del sys.path[0]

from paceline.cli import main  # noqa: E402

main()
