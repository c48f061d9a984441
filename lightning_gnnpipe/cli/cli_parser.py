"""A parser of LightningCLI's with short errors, and those of the classes it builds as they are.

jsonargparse tries the members of a union one after the other and turns what any of them raises into
the text of one long `ValueError`, so that a refused option could not be told from a wrong type.
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
    """Builds classes inside of `raising` without hiding their errors; says what is wrong alone."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print `message` without the page of usage before it, and end with status 2."""
        is_command = " [options]" in self.prog
        name = self.prog.replace(" [options]", "")
        listed = f"{name} --help" if is_command else f"{name} COMMAND --help"
        self.exit(2, f"{name}: {message}\nAll options: {listed}\n")

    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Register `instantiator` for a class, as jsonargparse does; its errors pass through."""

        @wraps(instantiator)  # jsonargparse reads the signature
        def build(*args: Any, **kwargs: Any) -> Any:
            try:
                return instantiator(*args, **kwargs)
            except Exception as error:
                raise _Raised(error) from None

        with warnings.catch_warnings():  # Lightning calls what newer jsonargparse deprecates
            warnings.simplefilter("ignore", DeprecationWarning)
            super().add_instantiator(build, *args, **kwargs)


@contextmanager
def raising(parser: TransparentErrorParser) -> Iterator[None]:
    """Raise what a class raises that `parser` builds inside."""
    parser.add_instantiator(_build, object, subclasses=True)
    try:
        yield
    except _Raised as raised:
        raise raised.error from None


def _build(class_type: type, *args: Any, **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)
