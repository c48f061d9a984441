"""Checkpoints under the strategy: whole ones, in the names of the user's module."""

from __future__ import annotations

import logging
from typing import Any

from torch.optim import Optimizer

from lightning_gnnpipe.engine import PipelineEngine, full_state_dict, merge_optimizer_states
from lightning_gnnpipe.errors import ConfigError, explain
from lightning_gnnpipe.processes import PipeProcesses

log = logging.getLogger(__name__)


class PipeCheckpoints(PipeProcesses):
    """Puts the stages' weights and optimizer states together, and takes whole ones apart.

    Args:
        args: Of `PipeProcesses`, as are `kwargs`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engine: PipelineEngine | None = None
        self._prefix = ""

    @property
    def engine(self) -> PipelineEngine:
        """The engine, while a fit, validate, test or predict runs.

        Raises:
            ConfigError: Outside of a run.
        """
        if self._engine is None:
            raise ConfigError(
                explain(
                    expected="the engine to be asked for while the Trainer runs",
                    found="no run in progress",
                    remedy="Ask in a hook such as on_train_epoch_end.",
                )
            )
        return self._engine

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if self._is_split:
            self.engine.model.restore()
        super().load_model_state_dict(checkpoint, strict)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        if not self._is_split or self._is_interrupted:
            return self.lightning_module.state_dict()
        return full_state_dict(self.lightning_module, self._prefix, self.engine.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if not self._has_peers or self._is_interrupted:
            return state
        return merge_optimizer_states(self._pipe, state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if self._is_split and self._is_interrupted:
            log.warning("No checkpoint was written to %s: other stages may have failed.", filepath)
            return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    def _is_split(self) -> bool:
        """Whether this rank holds only its stage's parameters."""
        return self._has_peers and self._engine is not None and self._engine.model.is_split

    @property
    def _is_interrupted(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.interrupted
