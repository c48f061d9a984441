"""What glibc does with memory that layers free: by default it keeps pieces of up to 32 MiB."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_LEAST_BYTES = 2**20
LARGE_BYTES = 2**25  # larger pieces go back to the system, which clears them for the next use


def uses_glibc_malloc() -> bool:
    """Whether memory comes from glibc, and not from a library in its place, such as tcmalloc."""
    try:
        used, glibcs = (ctypes.CDLL(name).malloc for name in (None, "libc.so.6"))
    except (AttributeError, OSError, TypeError):
        return False
    return _address(used) == _address(glibcs)


def return_freed_memory() -> None:
    """Return what is free now to the system."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def return_memory_at_once() -> None:
    """Return tensors of 1 MiB and more whenever they are freed, which takes time."""
    return_freed_memory()
    with suppress(AttributeError, OSError, TypeError):
        for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, _LEAST_BYTES)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
