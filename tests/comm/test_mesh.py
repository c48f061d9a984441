"""Every rank has a place of its own on the mesh, and neighbours are those of one stage."""

from __future__ import annotations

from itertools import product

from lightning_gnnpipe.comm import Mesh


def test_ranks_are_dealt_out_to_replicas_then_stages_then_shards() -> None:
    """Three replicas of two stages of two shards."""
    places = list(product(range(3), range(2), range(2)))
    for rank, (replica, stage, shard) in enumerate(places):
        mesh = Mesh(rank, num_stages=2, num_shards=2, num_replicas=3)
        assert (mesh.replica, mesh.stage, mesh.shard) == (replica, stage, shard)
        assert (mesh.is_first, mesh.is_last) == (stage == 0, stage == 1)
        assert mesh.rank_of(1 - stage) == places.index((replica, 1 - stage, shard))
        assert mesh.rank_of(stage, 1 - shard) == places.index((replica, stage, 1 - shard))
