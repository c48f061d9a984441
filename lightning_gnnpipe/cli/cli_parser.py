"""A parser for LightningCLI with short errors; errors of the classes that it builds pass through.

jsonargparse joins the errors of all members of a union into one `ValueError`, which hides whether
an option was refused or had a wrong type.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser


class _Raised(BaseException):
    """Carries an error past `except Exception`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class TransparentErrorParser(LightningArgumentParser):
    """Within `raising`, passes on errors of the classes it builds; prints its own without usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print `message` without the usage page, and exit with status 2."""
        is_command = " [options]" in self.prog
        name = self.prog.replace(" [options]", "")
        listed = f"{name} --help" if is_command else f"{name} COMMAND --help"
        self.exit(2, f"{name}: {message}\nAll options: {listed}\n")

    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Register `instantiator` for a class; its errors pass through jsonargparse."""

        @wraps(instantiator)  # jsonargparse reads the signature
        def build(*args: Any, **kwargs: Any) -> Any:
            try:
                return instantiator(*args, **kwargs)
            except Exception as error:
                raise _Raised(error) from None

        with warnings.catch_warnings():  # Lightning uses a function that is deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            super().add_instantiator(build, *args, **kwargs)


@contextmanager
def raising(parser: TransparentErrorParser) -> Iterator[None]:
    """Raise, unchanged, errors of classes that `parser` builds in the block."""
    parser.add_instantiator(_build, object, subclasses=True)
    try:
        yield
    except _Raised as raised:
        raise raised.error from None


def _build(class_type: type, *args: Any, **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)
