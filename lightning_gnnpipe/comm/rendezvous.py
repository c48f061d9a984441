"""Where ranks find each other.

torchrun with its static rendezvous (the default on one node) keeps one store over restarts. Ranks
would find there the addresses of those that have ended, and wait for them.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store


def restart_store(address: str, port: int, timeout: timedelta) -> Store | None:
    """Return a store for this restart of torchrun alone; None where there is no need for one.

    Restarts are counted by node. So this is for one node; on several, torchrun's own rendezvous
    (``--rdzv-backend=c10d``) makes a new store each time.

    Args:
        address: Of the store's host.
        port: Of the store.
        timeout: Longest wait for an answer of the store.
    """
    world_size = os.environ.get("WORLD_SIZE", "")
    is_one_node = world_size == os.environ.get("LOCAL_WORLD_SIZE")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_one_node:
        return None
    store = TCPStore(address, port, int(world_size), is_master=False, timeout=timeout)
    return PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
