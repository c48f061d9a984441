"""What tests of layers share."""

from __future__ import annotations

import pytest
from torch_geometric.nn.conv import spline_conv

from tests.helpers.splines import spline_basis, spline_weighting


@pytest.fixture
def splines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give SplineConv the functions of a library that pip does not bring."""
    monkeypatch.setattr(spline_conv, "spline_basis", spline_basis)
    monkeypatch.setattr(spline_conv, "spline_weighting", spline_weighting)
