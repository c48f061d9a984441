"""Options are checked at once: values, those that change nothing, and names that are gone."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any, get_args

import lightning as L
import pytest
import torch

import lightning_gnnpipe
from lightning_gnnpipe import (
    BoundedStaleness,
    EmbeddingRefresh,
    FullGraphDataModule,
    GNNPipeStrategy,
    PipelineMonitor,
    StalenessMonitor,
    StalenessWarmup,
    TimelineCallback,
)
from lightning_gnnpipe.errors import REMOVED_CLASSES, REMOVED_OPTIONS, REMOVED_VALUES, ConfigError
from lightning_gnnpipe.options import StrategyOptions
from lightning_gnnpipe.staleness import METHODS, StalenessMethod
from lightning_gnnpipe.types import CodecName, StalenessName
from tests.helpers.observed import fit

Options = dict[str, Any]


def test_defaults_are_those_of_the_strategy() -> None:
    assert GNNPipeStrategy().options == StrategyOptions()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_chunks": 0}, r"'num_chunks' to be between 1 and the number of nodes.*got 0"),
        ({"num_stages": -1}, "'num_stages' to be between 1"),
        ({"partition": "meetis"}, "'partition' to be one of metis, kaminpar, random, contiguous"),
        ({"balance": "fair"}, "'balance' to be one of"),
        ({"start_method": "spawn"}, "'start_method' to be one of.*Leave 'start_method' out"),
        ({"history_dtype": torch.int64}, "'history_dtype' to be a floating-point dtype"),
        ({"repeat_encoder": "always"}, "'repeat_encoder' to be True, False or 'auto'"),
        ({"repeat_encoder": 1}, "'repeat_encoder' to be True, False or 'auto'"),
        ({"history_device": "gpu"}, "'history_device' to be a device with memory"),
        ({"history_device": "meta"}, "'history_device' to be a device with memory"),
        ({"staleness": "fresh"}, "to be one of drift, constant, gnnpipe .*'fresh'"),
        ({"staleness": 2.0}, "'staleness' to be one of drift, constant, gnnpipe"),
        ({"staleness": "blocks"}, "got 'blocks'.*Leave 'staleness' out"),
        ({"staleness": StalenessMethod()}, "'staleness' to be one of drift, constant, gnnpipe"),
        ({"staleness": "lookahead"}, "got 'lookahead'.*its default, 'drift', takes its place"),
        ({"halo_codec": ("fp16", "drive")}, "Write 'bf16', .* Write 'int1'"),
        ({"halo_codec": ("int4", "int2")}, r"\)\. Write 'int8' [^W]*$"),  # said once
        ({"cut_codec": "int4"}, "one of fp32, bf16, int8, int1, .*got 'int4'.*Write 'int8'"),
        ({"graph_parallel": "auto"}, "got 'auto'.*run `gnnpipe plan --num_devices N`"),
        ({"graph_parallel": 0}, "'graph_parallel' to be at least 1"),
        ({"graph_parallel": 2, "history_device": "cpu"}, "'history_device' to be None"),
        ({"timeout": 10}, "'timeout' to be a positive datetime.timedelta"),
        ({"halo_codec": None}, "'halo_codec' to be one of fp32, .*, or a pair of them"),
        ({"cut_codec": ("bf16", "bf17")}, r"'cut_codec' to be one of .*got \('bf16', 'bf17'\)"),
        ({"partition": "mettis"}, r"got 'mettis'\)\. Did you mean 'metis'\?"),
        ({"history_dtype": "int8"}, r"'history_dtype' to be one of bfloat16, .*got 'int8'"),
        ({"data_parallel": 0}, "'data_parallel' to be at least 1"),
        ({"data_parallel": True}, "'data_parallel' to be at least 1"),
        ({"data_parallel": 2, "graph_parallel": 2}, "'graph_parallel' to be 1 with data_parallel"),
    ],
)
def test_options_are_checked_at_once(options: Options, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GNNPipeStrategy(**options)


def test_a_dtype_can_be_named() -> None:
    found, expected = (
        GNNPipeStrategy(history_dtype=one).options.histories for one in ("bfloat16", torch.bfloat16)
    )
    assert found == expected
    assert GNNPipeStrategy(history_dtype="float16").options.histories.dtype is torch.float16


SHARDS = {"graph_parallel": 2}
REFUSED: list[tuple[str, Options, Options]] = [
    # the option, the others, and the others of the remedy
    ("staleness", {"staleness": "constant", "data_parallel": 2}, {"data_parallel": 1}),
    ("partition", {"partition": "random", "data_parallel": 2}, {"data_parallel": 1}),
    ("plan_folder", {"plan_folder": "plans", "data_parallel": 2}, {"data_parallel": 1}),
    ("halo_codec", {"halo_codec": "int8"}, SHARDS),
    ("halo_codec", {"halo_codec": ("fp32", "int1")}, SHARDS),
    ("async_halo", {"async_halo": True, "num_stages": 2}, SHARDS),
    ("cuda_graphs", {"cuda_graphs": True, "recompute": True}, {"recompute": False}),
    ("cuda_graphs", {"cuda_graphs": True, **SHARDS}, {"graph_parallel": 1}),
    ("cut_codec", {"cut_codec": "bf16", "num_stages": 1}, {"num_stages": "auto"}),
    ("repeat_encoder", {"repeat_encoder": True, "num_stages": 1}, {"num_stages": "auto"}),
]


@pytest.mark.parametrize(("name", "options", "remedy"), REFUSED)
def test_an_idle_option_is_refused(name: str, options: Options, remedy: Options) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' to be left out with .*has no effect"):
        GNNPipeStrategy(**options)
    GNNPipeStrategy(**{key: value for key, value in options.items() if key != name})
    GNNPipeStrategy(**{**options, **remedy})


@pytest.mark.parametrize(
    "options",
    [
        {"cut_codec": "int8", "repeat_encoder": True, "start_method": "fork"},
        {"balance": "uniform", "num_stages": 1},
        {"self_check": False, "num_chunks": 1},
        {"repeat_encoder": False, "num_stages": 1},
        {"halo_codec": ("fp32", "fp32"), "num_chunks": 1},
        {"partition": torch.zeros(40, dtype=torch.int64), "num_chunks": 1},
        {**SHARDS, "async_halo": True, "num_chunks": 1, "staleness": "constant"},
        {**SHARDS, "recompute": True, "num_chunks": 1, "history_dtype": "bfloat16"},
    ],
)
def test_what_is_so_anyway_or_idle_on_these_devices_only_is_taken(options: Options) -> None:
    GNNPipeStrategy(**options)


def test_what_is_idle_with_one_chunk_is_named(caplog: pytest.LogCaptureFixture) -> None:
    options = {"partition": "random", "staleness": "constant"}
    fit(1, num_chunks=1, strategy=options)
    assert sum("no effect: partition, staleness." in one for one in caplog.messages) == 1


@pytest.mark.parametrize(
    ("callback", "options", "text"),
    [
        (BoundedStaleness(2), {}, "async_halo=True with BoundedStaleness"),
        (EmbeddingRefresh(2), {"data_parallel": 2}, "stale embeddings .* data_parallel=2"),
    ],
)
def test_an_idle_callback_is_refused(callback: L.Callback, options: Options, text: str) -> None:
    with pytest.raises(Exception, match=text):
        fit(options.get("data_parallel", 1), callback, strategy=options)


def test_statistics_over_replicas_that_nobody_makes_are_refused() -> None:
    options: Options = {"data_parallel": 2}
    with pytest.raises(Exception, match="Expected sync_batchnorm=False with data_parallel"):
        fit(2, strategy=options, sync_batchnorm=True)
    with pytest.raises(Exception, match="Expected batches of graphs for data_parallel"):
        fit(2, strategy=options)  # it comes further


def test_a_warm_up_where_every_step_is_exact_is_taken() -> None:
    fit(1, StalenessWarmup(2), num_chunks=1)


def test_processes_are_dealt_out_to_replicas_first() -> None:
    options = GNNPipeStrategy(data_parallel=2).options
    assert options.resolve_layout(2) == (1, 1)
    assert options.resolve_layout(6) == (3, 1)
    with pytest.raises(ConfigError, match="'data_parallel' to divide the number of processes, 3"):
        options.resolve_layout(3)
    with pytest.raises(
        ConfigError,
        match=r"'num_stages' to be 3 for 6 processes .* data_parallel=2 \(got 2\). "
        r"Use Trainer\(devices=4\)",
    ):
        GNNPipeStrategy(data_parallel=2, num_stages=2).options.resolve_layout(6)


@pytest.mark.parametrize("name", REMOVED_CLASSES)
def test_a_class_that_is_gone_says_what_takes_its_place(name: str) -> None:
    assert name not in lightning_gnnpipe.__all__
    with pytest.raises(ImportError, match=f"lightning_gnnpipe.{name} was removed. (Leave|Use) "):
        getattr(import_module("lightning_gnnpipe"), name)


@pytest.mark.parametrize("name", REMOVED_OPTIONS)
def test_an_option_that_is_gone_says_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^The option '{name}' was removed. .*[Ll]eave '{name}'"):
        GNNPipeStrategy(**{name: "any"})


def test_an_option_that_never_was_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_orders'"):
        GNNPipeStrategy(chunk_orders="fixed")
    with pytest.raises(TypeError, match=r"argument 'num_chunk'\. Did you mean 'num_chunks'\?$"):
        GNNPipeStrategy(num_chunk=4)
    with pytest.raises(TypeError, match=r"argument 'remove'$"):
        GNNPipeStrategy(remove=4)
    with pytest.raises(
        TypeError, match=r"takes each option by its name, such as num_stages=\.\.\.;"
    ):
        GNNPipeStrategy(4)
    assert not any("removed" in name for name in signature(GNNPipeStrategy).parameters)


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        (FullGraphDataModule, "sed", "seed"),
        (StalenessWarmup, "epochs", "num_epochs"),
        (EmbeddingRefresh, "every_n_epoch", "every_n_epochs"),
        (BoundedStaleness, "sync_every", "sync_every_n_epochs"),
        (StalenessMonitor, "every_epochs", "every_n_epochs"),
        (PipelineMonitor, "every_epochs", "every_n_epochs"),
        (TimelineCallback, "epochs", "epoch"),
    ],
)
def test_a_misspelled_option_says_which_was_meant(kind: Any, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"argument '{wrong}'\. Did you mean '{right}'\?$"):
        kind(**{wrong: 1})


def test_other_names_are_as_unknown_as_ever() -> None:
    assert not hasattr(lightning_gnnpipe, "NoSuchName")
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName'"):
        exec("from lightning_gnnpipe import NoSuchName")


def test_values_that_are_gone_are_not_taken() -> None:
    taken = {*get_args(CodecName), *get_args(StalenessName)}
    assert set(get_args(StalenessName)) == set(METHODS)
    assert not taken & REMOVED_VALUES.keys()
