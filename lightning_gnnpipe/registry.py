"""The strategy's names, for `Trainer(strategy="gnnpipe")`."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gnnpipe.strategy import GNNPipeStrategy

START_METHODS = {
    "gnnpipe": "popen",
    "gnnpipe_spawn": "spawn",
    "gnnpipe_fork": "fork",
    "gnnpipe_notebook": "fork",
}


def register_strategies() -> None:
    """Make the names known to Lightning."""
    for name, start_method in START_METHODS.items():
        StrategyRegistry.register(
            name,
            GNNPipeStrategy,
            description=f"GNNPipe, processes started by {start_method}",
            override=True,
            start_method=start_method,
        )
