"""When the engine takes the module's forward over: once a loop starts, not before.

Until then every rank holds the whole module. What runs it earlier, such as a model summary with an
example input or a logger that draws the model, on one rank alone, gets its own forward.
"""

from __future__ import annotations

from lightning_gnnpipe.checkpoints import PipeCheckpoints


class PipeLoops(PipeCheckpoints):
    """Puts the engine behind the pipelined module's forward at the start of each loop."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self._take_over()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._take_over()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._take_over()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._take_over()

    def _take_over(self) -> None:
        if "forward" not in self.engine.model.module.__dict__:
            self.engine.attach()
