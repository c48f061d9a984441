from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import Action, Op


@given(st.builds(Action, st.integers(0, 99), st.sampled_from(Op), st.integers(0, 9999)))
def test_what_is_printed_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == Action.parse(repr(action)) == action
    if not action.op.is_compute:
        assert action.partner.partner == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", " 2F0", "2F0 ", "-1F0", "02F0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"Expected an action.*Write it like '2F0'"):
        Action.parse(text)


@pytest.mark.parametrize(("one", "other"), [("0SEND_F3", "1RECV_F3"), ("1SEND_B3", "0RECV_B3")])
def test_partners_are_the_two_ends_of_a_transfer(one: str, other: str) -> None:
    assert str(Action.parse(one).partner) == other
    for text in (one, other):
        assert str(Action.parse(text).served) == text.replace("SEND_", "").replace("RECV_", "")
        served = Action.parse(text).served
        with pytest.raises(ScheduleError, match=rf"Expected a send or a receive \(got {served}\)"):
            _ = served.partner
