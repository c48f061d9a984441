"""The only place that talks to other ranks."""

from __future__ import annotations

from lightning_gnnpipe._compat_torch import set_group_timeout
from lightning_gnnpipe.comm.along_pipe import sum_along_pipe
from lightning_gnnpipe.comm.codec import Codecs, get_codec, get_codecs
from lightning_gnnpipe.comm.collect import share_tensors
from lightning_gnnpipe.comm.collectives import Collectives, cause_of, is_lost
from lightning_gnnpipe.comm.leaving import (
    abandon_groups,
    end_groups_at_exit,
    first_rank_tells,
)
from lightning_gnnpipe.comm.link import Link
from lightning_gnnpipe.comm.mesh import Members, Mesh, World
from lightning_gnnpipe.comm.meter import Meter
from lightning_gnnpipe.comm.options import MessageOptions
from lightning_gnnpipe.comm.payload import Codec
from lightning_gnnpipe.comm.rendezvous import restart_store
from lightning_gnnpipe.comm.shards import load_shards, save_shards
from lightning_gnnpipe.comm.transport import PLAIN, Exchange, Label, Transport
from lightning_gnnpipe.comm.wire import GPU_BACKEND, choose_wire

__all__ = [
    "GPU_BACKEND",
    "PLAIN",
    "Codec",
    "Codecs",
    "Collectives",
    "Exchange",
    "Label",
    "Link",
    "Members",
    "Mesh",
    "MessageOptions",
    "Meter",
    "Transport",
    "World",
    "abandon_groups",
    "cause_of",
    "choose_wire",
    "end_groups_at_exit",
    "first_rank_tells",
    "get_codec",
    "get_codecs",
    "is_lost",
    "load_shards",
    "restart_store",
    "save_shards",
    "set_group_timeout",
    "share_tensors",
    "sum_along_pipe",
]
