"""`python -m engram`, also installed as the command `engram`."""

import sys

from engram.cli import main

if __name__ == "__main__":
    sys.exit(main())
