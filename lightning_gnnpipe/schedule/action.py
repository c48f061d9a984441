"""Actions of a schedule; they print and parse as text: `2F0` is stage 2, forward, chunk 0."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from lightning_gnnpipe.errors import ScheduleError


class Op(str, Enum):
    """Operation of an action; `_F` transfers carry activations, `_B` transfers gradients.

    F       run the stage's code on the chunk, and keep what its backward needs
    B       run the stage's backward on the chunk, and free what its F kept
    SEND_F  start sending the chunk's output to the next stage
    RECV_F  post a buffer for the chunk's input from the previous stage; its F waits for it
    SEND_B  start sending the gradient of the chunk's input to the previous stage
    RECV_B  post a buffer for the gradient from the next stage; the chunk's B waits for it
    """

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @cached_property
    def is_backward(self) -> bool:
        return self in (Op.B, Op.SEND_B, Op.RECV_B)

    @cached_property
    def is_compute(self) -> bool:
        """Whether the operation occupies the rank; transfers run beside it."""
        return self in (Op.F, Op.B)

    @cached_property
    def is_send(self) -> bool:
        return self in (Op.SEND_F, Op.SEND_B)


_PARTNERS = {  # the stage of the other end, from this stage, and its operation
    Op.SEND_F: (1, Op.RECV_F),
    Op.RECV_F: (-1, Op.SEND_F),
    Op.SEND_B: (-1, Op.RECV_B),
    Op.RECV_B: (1, Op.SEND_B),
}


@dataclass(frozen=True, slots=True, order=True, repr=False)
class Action:
    """One operation of one stage on one chunk (or micro-batch); prints as `2F0`, parses back."""

    stage: int
    op: Op
    chunk: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as `text`.

        Raises:
            ScheduleError: If `text` is not an action.
        """
        number, names = "(0|[1-9][0-9]*)", "|".join(op.value for op in Op)
        match = re.fullmatch(f"{number}({names}){number}", text)
        if match is None:
            raise ScheduleError(
                expected="an action: stage, operation, chunk",
                found=repr(text),
                remedy=f"Write it like '2F0' or '2SEND_F0'; the operations are {names}.",
            )
        return cls(int(match[1]), Op(match[2]), int(match[3]))

    @property
    def served(self) -> Action:
        """The compute action of a transfer: `2F0` for `2SEND_F0` and `2RECV_F0`."""
        return Action(self.stage, Op.B if self.op.is_backward else Op.F, self.chunk)

    @property
    def send(self) -> Action:
        """The send of the result of a compute action: `2SEND_F0` for `2F0`."""
        return Action(self.stage, Op.SEND_B if self.op.is_backward else Op.SEND_F, self.chunk)

    @property
    def partner(self) -> Action:
        """The other end of a transfer: `0SEND_F3` and `1RECV_F3` are partners of each other."""
        if self.op.is_compute:
            raise ScheduleError(
                expected="a send or a receive",
                found=str(self),
                remedy="F and B have no partner: check 'action.op.is_compute' first.",
            )
        step, op = _PARTNERS[self.op]
        return Action(self.stage + step, op, self.chunk)

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.chunk}"

    __repr__ = __str__
