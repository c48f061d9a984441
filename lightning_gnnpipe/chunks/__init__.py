"""One rank's part of a step: chunks forward, then backward; and the costs of layers."""

from lightning_gnnpipe.chunks.allocator import (
    LARGE_BYTES,
    return_freed_memory,
    return_memory_at_once,
    uses_glibc_malloc,
)
from lightning_gnnpipe.chunks.captured import CapturedChunks, SeedOf, can_capture
from lightning_gnnpipe.chunks.costs import LayerCost, StepCosts
from lightning_gnnpipe.chunks.exact import ExactStep, exact_context
from lightning_gnnpipe.chunks.inputs import BatchInputs, PassInputs, PlannedInputs
from lightning_gnnpipe.chunks.memory import (
    GIB,
    Setting,
    choose_setting,
    fit_memory,
    predict_peaks,
    settings_of,
    weight_bytes,
)
from lightning_gnnpipe.chunks.step import (
    PassSpec,
    Step,
    kept_buffers,
    make_seeds,
    own_random_stream,
    run_segments,
    unread_after,
)
from lightning_gnnpipe.chunks.step_trace import (
    PipelineStats,
    RankRecord,
    TraceEvent,
    merge_stats,
    peak_memory_bytes,
    phases,
)
from lightning_gnnpipe.chunks.threads import (
    DIVIDED_CORES,
    computing_with,
    num_cores,
    threads_of_stage,
)
from lightning_gnnpipe.chunks.timing import measure_costs, now
