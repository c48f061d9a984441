"""Codecs of messages: full precision, bfloat16, low-bit rows."""

from lightning_gnnpipe.codecs.codec import get_codecs
from lightning_gnnpipe.codecs.payload import Codec, Codecs, Parcel
