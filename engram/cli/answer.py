"""How a command answers: by text and exit status, or with --json by one JSON object."""

import json
import math
import os
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from typing import Any, NoReturn

from engram.cli.errors import UsageError

Answer = tuple[int, dict[str, Any]]  # exit status and record


class Parser(ArgumentParser):
    """Raises UsageError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def answer(program: str, run: Callable[[], Answer], *, as_json: bool) -> int:
    """Run a command; returns the exit status: its own (0 good, 1 failed), 2 wrong usage, 130 after Ctrl-C.

    With `as_json` its record is all that stdout gets, as one line, and what it prints goes to stderr; an error is
    {"error": message}. Of several ranks the first one has the word.
    """
    as_json = as_json and os.environ.get("RANK", "0") == "0"
    record: dict[str, Any]
    try:
        try:
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                status, record = run()
        except UsageError as error:
            print(f"{program}: error: {error}", file=sys.stderr)
            status, record = 2, {"error": str(error)}
        except KeyboardInterrupt:
            print(f"{program}: interrupted", file=sys.stderr)
            status, record = 130, {"error": "interrupted"}
        except BrokenPipeError:
            raise
        except Exception as error:
            if not as_json:
                raise
            traceback.print_exc()
            status, record = 1, {"error": f"{type(error).__name__}: {error}"}
        if as_json:
            print(json.dumps(finite(record), allow_nan=False), flush=True)
        return status
    except BrokenPipeError:  # the reader of a pipe has gone (`engram report | head -1`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def finite(value: Any) -> Any:
    """`value` with None for numbers that are not finite, which JSON has not."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
