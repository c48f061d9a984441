"""Masks of dropout, which a rank draws while it waits for other ranks.

What a segment draws on a chunk follows from a seed, whenever it is drawn. So a rank that waits can
draw for chunks to come, of this training step and of the next: the numbers stay the same. A segment
that also draws otherwise, as attention layers do, or whose dropouts change, draws all when it runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from lightning_gnnpipe.passing.matrix import RUNNING

# Of one dropout: p, shape, dtype, and whether its input is contiguous and stays as it is.
Draw = tuple[float, torch.Size, torch.dtype, bool]
Place = tuple[int, int]  # segment, chunk
_OF_IDLE = 0.9  # share of the last waits in which masks are drawn; the rest is for messages
_MOST = 0.5  # share of a step's masks that may be drawn ahead: they take memory until they are used


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Like `torch.nn.functional.dropout`, which it stands for in traced segments."""
    context = RUNNING.get()
    masks = None if context is None else context.masks
    if masks is None or not training or not 0.0 < p < 1.0 or input.is_cuda:
        return functional.dropout(input, p, training, inplace)
    return masks.drop(input, p, inplace)


class Masks:
    """What each segment of a stage draws on each chunk, and the masks that are drawn ahead."""

    def __init__(self) -> None:
        self._known: dict[Place, tuple[Draw, ...]] = {}  # empty if it draws otherwise, too
        self._ahead: dict[int, list[Tensor]] = {}  # by seed
        self._now, self._next = list[tuple[Place, int]](), list[tuple[Place, int]]()
        self._waits_s: dict[str, tuple[float, ...]] = {}  # the last two, by what is waited for
        self._place, self._seed = (0, 0), 0
        self._generator = torch.Generator()
        self._noted: list[Draw] = []
        self._taken: list[Tensor] = []  # of the running segment

    def begin_step(
        self, now: Sequence[tuple[Place, int]], later: Sequence[tuple[Place, int]]
    ) -> None:
        """Start a step with these places and seeds, in order; `later`: of the next step."""
        self._now, self._next = list(now), list(later)
        self._ahead = {seed: self._ahead[seed] for _, seed in now if seed in self._ahead}

    def start(self, place: Place, seed: int) -> None:
        """Seed the random numbers of a segment on a chunk."""
        self._place, self._seed, self._noted = place, seed, []
        self._taken = self._ahead.pop(seed, [])
        # What is drawn beside masks that are taken, against expectation, must not repeat them.
        torch.default_generator.manual_seed(seed ^ bool(self._taken))

    def drop(self, rows: Tensor, p: float, inplace: bool) -> Tensor:
        """Return `rows` after a dropout, by the next mask."""
        is_usual = rows.is_contiguous() and not inplace
        number, draw = len(self._noted), (p, rows.shape, rows.dtype, is_usual)
        self._noted.append(draw)
        if self._taken:
            if self._known[self._place][number : number + 1] == (draw,):
                return rows * self._taken[number]
            self._taken = []  # the network has changed
            _draw_all(self._noted[:-1], torch.default_generator.manual_seed(self._seed))
        return functional.dropout(rows, p, True, inplace)

    def stop(self) -> None:
        """Note what the segment has drawn, if it is new or has changed."""
        noted, known = tuple(self._noted), self._known.get(self._place)
        if self._taken:
            is_all = self._has_drawn(())
        elif known is None:
            is_all = self._has_drawn(noted)
        else:
            is_all = known == () or known == noted
        if not is_all:
            self._known[self._place] = ()
        elif known != ():
            self._known[self._place] = noted
        self._taken = []

    def _has_drawn(self, draws: Sequence[Draw]) -> bool:
        """Whether the running segment has drawn `draws` from its seed, and nothing else."""
        self._generator.manual_seed(self._seed ^ bool(self._taken))
        _draw_all(draws, self._generator)
        is_usual = all(one[-1] for one in draws)
        return is_usual and torch.equal(
            self._generator.get_state(), torch.default_generator.get_state()
        )

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Draw masks for nearly as long as the last waits took; then wait within the block."""
        start = time.perf_counter()
        self._draw_until(start + _OF_IDLE * min(self._waits_s.get(name, (0.0,))), name)
        yield
        self._waits_s[name] = (*self._waits_s.get(name, ())[-1:], time.perf_counter() - start)

    def _draw_until(self, end_s: float, name: str) -> None:
        for place, seed in self._now if name == "forward" else self._next:
            if time.perf_counter() > end_s or len(self._ahead) > _MOST * len(self._now):
                return
            draws = self._known.get(place)
            if draws and seed not in self._ahead:
                self._ahead[seed] = _draw_all(draws, self._generator.manual_seed(seed))


def _draw_all(draws: Sequence[Draw], generator: torch.Generator) -> list[Tensor]:
    """Return masks, scaled by 1 / (1 - p), as `torch.dropout` draws them on the CPU."""
    return [
        torch.empty(shape, dtype=dtype).bernoulli_(1 - p, generator=generator).div_(1 - p)
        for p, shape, dtype, _ in draws
    ]
