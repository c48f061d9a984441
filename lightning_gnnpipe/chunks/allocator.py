"""What glibc does with memory that layers free: by default it keeps pieces of up to 32 MiB."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_LEAST_BYTES = 2**20
LARGE_BYTES = 2**25  # pieces of more go back to the system, which clears them for the next use


def is_glibc() -> bool:
    """Whether malloc is glibc's, and not tcmalloc's, which keeps large pieces as well."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return False
    return hasattr(library, "gnu_get_libc_version") and not hasattr(library, "tc_malloc")


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
