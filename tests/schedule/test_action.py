from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gnnpipe.errors import ScheduleError
from lightning_gnnpipe.schedule import Action, Op

actions = st.builds(Action, st.integers(0, 99), st.sampled_from(Op), st.integers(0, 9999))
transfers = actions.filter(lambda action: not action.op.is_compute)


@given(actions)
def test_what_is_printed_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["2F0", "0B12", "10SEND_F3", "1RECV_F0", "1SEND_B0", "0RECV_B7"])
def test_what_is_parsed_prints_back(text: str) -> None:
    assert str(Action.parse(text)) == repr(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2f0", " 2F0", "2F0 ", "-1F0", "02F0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"Expected an action.*Write it like '2F0'"):
        Action.parse(text)


def test_actions_are_ordered_by_stage_and_hashable() -> None:
    texts = ["1F0", "0F1", "0F0", "0F1"]
    assert [str(each) for each in sorted(map(Action.parse, texts))] == ["0F0", "0F1", "0F1", "1F0"]
    assert len(set(map(Action.parse, texts))) == 3


def test_ops_know_their_phase_and_kind() -> None:
    assert [op.value for op in Op if op.is_backward] == ["B", "SEND_B", "RECV_B"]
    assert [op.value for op in Op if op.is_compute] == ["F", "B"]


@pytest.mark.parametrize(("one", "other"), [("0SEND_F3", "1RECV_F3"), ("1SEND_B3", "0RECV_B3")])
def test_partners_are_the_two_ends_of_a_transfer(one: str, other: str) -> None:
    assert str(Action.parse(one).partner) == other
    assert str(Action.parse(other).partner) == one


@pytest.mark.parametrize("text", ["2SEND_F0", "2RECV_F0", "2F0"])
def test_transfers_serve_a_compute_action(text: str) -> None:
    assert str(Action.parse(text).served) == "2F0"
    assert str(Action.parse(text.replace("F", "B")).served) == "2B0"


@given(transfers)
def test_the_partner_of_the_partner_is_the_action(action: Action) -> None:
    assert action.partner.partner == action


@pytest.mark.parametrize("text", ["2F0", "2B0"])
def test_compute_actions_have_no_partner(text: str) -> None:
    with pytest.raises(ScheduleError, match=rf"Expected a send or a receive \(got {text}\)"):
        _ = Action.parse(text).partner
