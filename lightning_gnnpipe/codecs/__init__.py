"""Codecs of messages: full precision, bfloat16, low-bit rows."""

from __future__ import annotations

from lightning_gnnpipe.codecs.codec import Codecs, MessageOptions, get_codec, get_codecs
from lightning_gnnpipe.codecs.payload import Codec, Parcel

__all__ = [
    "Codec",
    "Codecs",
    "MessageOptions",
    "Parcel",
    "get_codec",
    "get_codecs",
]
