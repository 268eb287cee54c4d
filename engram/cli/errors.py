"""What goes wrong by the user's hand."""

import importlib


class UsageError(Exception):
    """A request that cannot be served, said in one sentence: printed without a traceback, exit status 2."""


def require(*modules: str) -> None:
    """Import optional dependencies. Raises UsageError with the command that installs them where one is missing."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise UsageError(f"{name} is not installed; run: python -m pip install {name}") from None
