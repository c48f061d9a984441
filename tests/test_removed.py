"""Names that are gone: whoever gives one is told what to write instead."""

from __future__ import annotations

from importlib import import_module
from typing import get_args

import pytest

import lightning_gnnpipe
from lightning_gnnpipe.removed import CLASSES, VALUES, advice_on
from lightning_gnnpipe.staleness import METHODS
from lightning_gnnpipe.types import CodecName, OrderName, StalenessName


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_that_is_gone_says_what_takes_its_place(name: str) -> None:
    assert name not in lightning_gnnpipe.__all__
    with pytest.raises(ImportError, match=f"lightning_gnnpipe.{name} was removed. (Leave|Use) "):
        getattr(import_module("lightning_gnnpipe"), name)


def test_other_names_are_as_unknown_as_ever() -> None:
    assert not hasattr(lightning_gnnpipe, "NoSuchName")
    with pytest.raises(ImportError, match="cannot import name 'NoSuchName'"):
        exec("from lightning_gnnpipe import NoSuchName")


def test_values_that_are_gone_are_not_taken() -> None:
    taken = {*get_args(CodecName), *get_args(OrderName), *get_args(StalenessName)}
    assert set(get_args(StalenessName)) == set(METHODS)
    assert not taken & VALUES.keys()


def test_a_pair_has_the_advice_on_both() -> None:
    assert advice_on(("fp16", "drive")) == f"{VALUES['fp16']} {VALUES['drive']}"
    assert advice_on(("int4", "int2")) == VALUES["int4"]  # said once
    assert advice_on(("int1", "bf16")) is None and advice_on(None) is None
