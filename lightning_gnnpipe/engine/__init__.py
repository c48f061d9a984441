"""The engine: one forward of the pipelined module, from the user's call to its outputs."""

from lightning_gnnpipe.engine.engine import PipelineEngine
from lightning_gnnpipe.engine.resume import RankHistories, RunState, SavedRun
