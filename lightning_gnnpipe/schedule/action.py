"""The vocabulary of a schedule: one `Action` is one thing that is done to one chunk at one stage.

Schedules are data: they are printed, compared, rewritten and checked as text (`2F0` is stage 2,
forward, chunk 0) before any device sees them, and the engine is a table from `Op` to method.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from lightning_gnnpipe.errors import ScheduleError, explain


class Op(str, Enum):
    """What is done. A transfer bears its phase: `_F` carries activations, `_B` gradients."""

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
        """Whether the operation belongs to the backward phase."""
        return self in (Op.B, Op.SEND_B, Op.RECV_B)

    @property
    def is_compute(self) -> bool:
        """Whether the operation occupies the stage; the others move data."""
        return self in (Op.F, Op.B)


@dataclass(frozen=True, slots=True, order=True, repr=False)
class Action:
    """One operation of one stage on one chunk; prints as `2F0` and parses back.

    Attributes:
        stage: The stage that acts, from 0. Which rank holds it is for the schedule to say.
        op: What it does.
        chunk: The chunk, or micro-batch, it does it to, from 0.
    """

    stage: int
    op: Op
    chunk: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as `text`.

        Raises:
            ScheduleError: If no action prints so.
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
        """The compute action that a transfer serves: of `2SEND_F0` and of `2RECV_F0` it is `2F0`.

        Of a compute action, the action itself.
        """
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
        """Return the text that `parse` reads."""
        return f"{self.stage}{self.op.value}{self.chunk}"

    __repr__ = __str__
