"""`engram bench`: the benchmarks, which are in the source tree and not in the installed package."""

import sys
from collections.abc import Sequence
from pathlib import Path

import engram
from engram.cli.answer import Answer, answer
from engram.cli.errors import UsageError


def main(argv: Sequence[str]) -> int:
    """Run `benchmarks.run`, with its own options (`engram bench --help`), and return its exit status; 2 where this
    engram was not installed from a source tree with `pip install -e`."""
    root = Path(engram.__file__).parents[1]
    if not (root / "benchmarks" / "run.py").is_file():
        return answer("engram", _missing, as_json="--json" in argv)
    sys.path.insert(0, str(root))
    from benchmarks import run

    status: int = run.main(argv, prog="engram bench")
    return status


def _missing() -> Answer:
    raise UsageError("the benchmarks are in the source tree: run `pip install -e .` in a clone, then this")
