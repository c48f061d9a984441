"""An option that changes nothing as the others stand is refused; what only does so here is not."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from lightning_gnnpipe import BoundedStaleness, EmbeddingRefresh, GNNPipeStrategy, StalenessWarmup
from lightning_gnnpipe.errors import ConfigError
from lightning_gnnpipe.options import StrategyOptions
from tests.helpers.observed import make_data, make_module, make_trainer


def test_defaults_are_those_of_the_strategy() -> None:
    assert GNNPipeStrategy().options == StrategyOptions()


SHARDS = {"graph_parallel": 2}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # the option, the others, and the others of the remedy
    ("staleness", {"staleness": "constant", "data_parallel": 2}, {"data_parallel": 1}),
    ("partition", {"partition": "random", "schedule": "1f1b"}, {"schedule": "fill_drain"}),
    ("halo_codec", {"halo_codec": "int8"}, SHARDS),
    ("halo_codec", {"halo_codec": ("fp32", "int1")}, SHARDS),
    ("async_halo", {"async_halo": True, "num_stages": 2}, SHARDS),
    ("cut_codec", {"cut_codec": "bf16", "num_stages": 1}, {"num_stages": "auto"}),
    ("repeat_encoder", {"repeat_encoder": True, "num_stages": 1}, {"num_stages": "auto"}),
    ("num_virtual", {"num_virtual": 4}, {"schedule": "interleaved"}),
    ("num_virtual", {"num_virtual": 4, "schedule": "1f1b"}, {"schedule": "interleaved"}),
]


@pytest.mark.parametrize(("name", "options", "remedy"), REFUSED)
def test_an_option_that_changes_nothing_is_refused(
    name: str, options: dict[str, Any], remedy: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' to be left out with .*has no effect"):
        GNNPipeStrategy(**options)
    GNNPipeStrategy(**{key: value for key, value in options.items() if key != name})
    GNNPipeStrategy(**{**options, **remedy})


@pytest.mark.parametrize(
    "options",
    [
        {"cut_codec": "int8", "repeat_encoder": True, "start_method": "fork"},
        {"balance": "uniform", "num_stages": 1},
        {"guard": False, "self_check": False, "num_chunks": 1},
        {"repeat_encoder": False, "num_stages": 1},
        {"halo_codec": ("fp32", "fp32"), "chunk_order": "shuffled", "num_chunks": 1},
        {"partition": torch.zeros(40, dtype=torch.int64), "num_chunks": 1},
        {**SHARDS, "async_halo": True, "num_chunks": 1, "staleness": "constant"},
        {**SHARDS, "recompute": True, "num_chunks": 1, "history_dtype": "bfloat16"},
    ],
)
def test_what_is_so_anyway_or_idle_on_these_devices_only_is_taken(options: dict[str, Any]) -> None:
    GNNPipeStrategy(**options)


def test_what_is_idle_with_one_chunk_is_named(caplog: pytest.LogCaptureFixture) -> None:
    options = {"partition": "random", "staleness": "constant", "chunk_order": "shuffled"}
    trainer = make_trainer(1, 1, max_epochs=1, strategy=options)
    trainer.fit(make_module(), make_data())
    assert sum("no effect: partition, staleness." in one for one in caplog.messages) == 1


@pytest.mark.parametrize(
    ("callback", "options", "text", "remedy"),
    [
        (BoundedStaleness(2), {}, "async_halo=True with BoundedStaleness", {}),
        (EmbeddingRefresh(2), {"schedule": "1f1b"}, "stale rows .* schedule='1f1b'", {}),
        (EmbeddingRefresh(2, "snapshot"), {"schedule": "1f1b"}, "schedule='1f1b'", {}),
    ],
)
def test_a_callback_that_changes_nothing_is_refused(
    callback: L.Callback, options: dict[str, Any], text: str, remedy: dict[str, Any]
) -> None:
    def fit(options: dict[str, Any], *callbacks: L.Callback) -> None:
        trainer = make_trainer(1, 4, *callbacks, max_epochs=1, strategy=options)
        trainer.fit(make_module(), make_data())

    with pytest.raises(ConfigError, match=text):
        fit(options, callback)
    fit({})
    if remedy:
        fit(remedy, callback)


def test_statistics_over_replicas_that_nobody_makes_are_refused() -> None:
    def fit(**options: Any) -> None:
        trainer = make_trainer(2, 2, max_epochs=1, strategy={"data_parallel": 2}, **options)
        trainer.fit(make_module(), make_data())

    with pytest.raises(Exception, match="Expected sync_batchnorm=False with data_parallel"):
        fit(sync_batchnorm=True)
    with pytest.raises(Exception, match="Expected batches of graphs for data_parallel"):
        fit()  # it comes further


def test_a_warm_up_where_every_step_is_exact_is_taken() -> None:
    make_trainer(1, 1, StalenessWarmup(2), max_epochs=1).fit(make_module(), make_data())
