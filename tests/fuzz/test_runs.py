"""Random graphs, models, stages, chunks, orders and callbacks: the oracle holds.

`GNNPIPE_FUZZ` is the number of runs (default 5): `GNNPIPE_FUZZ=500 pytest tests/fuzz`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_gnnpipe import StalenessMonitor
from tests.helpers.graphs import GraphCase, case_of
from tests.helpers.launch import SEED, run_fit
from tests.helpers.modules import NETS, ReferenceModule
from tests.helpers.orders import order_of_step
from tests.helpers.record import assert_steps_equal
from tests.helpers.training import Refresh, train_with_oracle
from tests.promises.test_p2_stale_gradient import Scale, callbacks_of, method, scale_of

NUM_RUNS = int(os.environ.get("GNNPIPE_FUZZ", "5"))
NUM_EPOCHS = 4


@st.composite
def graphs(draw: st.DrawFn) -> GraphCase:
    """Up to 14 nodes in up to 5 chunks, any directed edges, loops and repetitions included."""
    num_chunks = draw(st.integers(1, 5))
    rest = draw(st.lists(st.integers(0, num_chunks - 1), max_size=9))
    partition = draw(st.permutations([*range(num_chunks), *rest]))
    node = st.integers(0, len(partition) - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=40))
    return case_of("any", edges, partition)


refreshes = st.builds(
    Refresh,
    num_exact_epochs=st.sampled_from([1, 1, 2, NUM_EPOCHS]),
    every_n_epochs=st.sampled_from([0, 0, 1, 2, 3]),
    how=st.sampled_from(["snapshot", "exact"]),
)


@settings(
    max_examples=NUM_RUNS,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    case=graphs(),
    name=st.sampled_from(sorted(NETS)),
    optimizer=st.sampled_from(["sgd", "momentum"]),
    num_stages=st.sampled_from([1, 1, 1, 2, 3]),
    scale=st.sampled_from([0.0, 1.0, 2.0, "drift"]),
    refresh=refreshes,
    recompute=st.booleans(),
    validate=st.booleans(),
    watches=st.booleans(),
    balance=st.sampled_from(["measured", "uniform"]),
)
def test_any_run_equals_the_oracle(
    case: GraphCase,
    name: str,
    optimizer: str,
    num_stages: int,
    scale: Scale,
    refresh: Refresh,
    recompute: bool,
    validate: bool,
    watches: bool,
    balance: str,
) -> None:
    options = {"optimizer": optimizer, "lr": 0.05, "weight_decay": 0.01}
    oracle = ReferenceModule(name, **options)
    expected = train_with_oracle(
        oracle,
        case.data,
        case.partition,
        orders=lambda epoch: order_of_step(case.num_chunks, epoch, SEED),
        refresh=refresh,
        num_epochs=NUM_EPOCHS,
        cross_chunk_grad_scale=scale_of(scale, name, case),
        follows_drift=scale == "drift",
    )
    with tempfile.TemporaryDirectory() as folder:
        fit = run_fit(
            ReferenceModule(name, **options),
            case.data,
            num_stages=num_stages,
            num_chunks=case.num_chunks,
            partition=case.partition,
            callbacks=[*([StalenessMonitor()] if watches else []), *callbacks_of(refresh)],
            max_epochs=NUM_EPOCHS,
            tmp_path=Path(folder),
            trainer_kwargs={"limit_val_batches": 1.0 if validate else 0},
            strategy_kwargs={"recompute": recompute, "balance": balance},
            method=method(scale),
        )
    assert_steps_equal(fit.steps, expected)
    for key, value in oracle.state_dict().items():
        torch.testing.assert_close(fit.state_dict[key], value, rtol=1e-10, atol=1e-10)
