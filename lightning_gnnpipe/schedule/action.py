"""Actions of a schedule; they print and parse as text: `2F0` is stage 2, forward, chunk 0."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from lightning_gnnpipe.errors import ScheduleError, explain


class Op(str, Enum):
    """Operation of an action; `_F` transfers carry activations, `_B` transfers gradients."""

    F = "F"
    """Roughly: take the chunk's rows from the previous stage (or the batch),
    run the stage's code on them, keep what the backward needs."""

    B = "B"
    """Roughly: take the gradient of the chunk's output from the next stage (or the loss),
    run the stage's backward, free what the forward kept."""

    SEND_F = "SEND_F"
    """Roughly: start sending the chunk's output to the next stage;
    go on without waiting for it to arrive."""

    RECV_F = "RECV_F"
    """Roughly: post a buffer for the chunk's input from the previous stage;
    go on, the `F` of the chunk waits for it."""

    SEND_B = "SEND_B"
    """Roughly: start sending the gradient of the chunk's input to the previous stage;
    go on without waiting for it to arrive."""

    RECV_B = "RECV_B"
    """Roughly: post a buffer for the gradient of the chunk's output from the next stage;
    go on, the `B` of the chunk waits for it."""

    @property
    def is_backward(self) -> bool:
        return self in (Op.B, Op.SEND_B, Op.RECV_B)

    @property
    def is_compute(self) -> bool:
        """Whether the operation occupies the rank; transfers run beside it."""
        return self in (Op.F, Op.B)


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
                explain(
                    expected="an action: stage, operation, chunk",
                    found=repr(text),
                    remedy=f"Write it like '2F0' or '2SEND_F0'; the operations are {names}.",
                )
            )
        return cls(int(match[1]), Op(match[2]), int(match[3]))

    @property
    def served(self) -> Action:
        """The compute action of a transfer: `2F0` for `2SEND_F0` and `2RECV_F0`."""
        return Action(self.stage, Op.B if self.op.is_backward else Op.F, self.chunk)

    @property
    def partner(self) -> Action:
        """The other end of a transfer: `0SEND_F3` and `1RECV_F3` are partners of each other.

        Raises:
            ScheduleError: If the action is a compute action.
        """
        match self.op:
            case Op.SEND_F:
                return Action(self.stage + 1, Op.RECV_F, self.chunk)
            case Op.RECV_F:
                return Action(self.stage - 1, Op.SEND_F, self.chunk)
            case Op.SEND_B:
                return Action(self.stage - 1, Op.RECV_B, self.chunk)
            case Op.RECV_B:
                return Action(self.stage + 1, Op.SEND_B, self.chunk)
        raise ScheduleError(
            explain(
                expected="a send or a receive",
                found=str(self),
                remedy="Only transfers have a partner; ask 'action.op.is_compute' first.",
            )
        )

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.chunk}"

    __repr__ = __str__
