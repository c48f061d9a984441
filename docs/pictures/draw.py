"""Draw the pictures of the documentation beside this file: `python docs/pictures/draw.py`."""

from __future__ import annotations

from pathlib import Path

from svg import (
    BACKWARD,
    CHUNKS,
    FORWARD,
    IDLE,
    INK,
    LETTERS,
    MUTED,
    PAPER,
    STALE,
    Picture,
    Point,
)

FOLDER = Path(__file__).parent
ORDER = (2, 0, 3, 1)


def main() -> None:
    for name, picture in draw_all().items():
        (FOLDER / name).write_text(str(picture))


def draw_all() -> dict[str, Picture]:
    """Return the pictures, by the names of their files."""
    return {
        "idea.svg": draw_idea(),
        "schedule.svg": draw_schedule(3, ORDER),
        "history.svg": draw_history(),
        "bubble.svg": draw_bubble(),
    }


# What is cut: the graph, or the network. ------------------------------------------------------


def draw_idea() -> Picture:
    picture = Picture(760, 330, "Graph parallelism cuts the graph, the pipeline cuts the network")
    picture.text((185, 24), "Graph parallelism", 16, is_bold=True)
    picture.text((185, 45), "a device has all layers, for a part of the nodes", 12, MUTED)
    picture.text((570, 24), "Layer pipeline", 16, is_bold=True)
    picture.text((570, 45), "a device has some layers, for all nodes", 12, MUTED)
    picture.line([(380, 15), (380, 315)], IDLE, 1.5)
    for layer in range(4):
        y = 255 - 56 * layer
        picture.text((20, y), f"layer {layer + 1}", 12, MUTED, "start")
        for device, x in enumerate((80, 230)):
            _layer(picture, (x, y), (130, 34), CHUNKS[device])
        picture.line([(212, y - 5), (228, y - 5)], is_arrow=True)
        picture.line([(228, y + 5), (212, y + 5)], is_arrow=True)
    for device, x in enumerate((145, 295)):
        picture.text((x, 297), f"device {device}", 13, CHUNKS[device], is_bold=True)
    picture.text((220, 317), "neighbours cross in every layer", 12, MUTED)
    for layer in range(4):
        y = 255 - 56 * layer
        _layer(picture, (430, y), (280, 34), CHUNKS[layer // 2])
        if layer:
            is_cut = layer == 2
            picture.line(
                [(570, y + 37), (570, y + 20)], INK if is_cut else IDLE, 1.5, is_arrow=is_cut
            )
    picture.line([(418, 171), (560, 171)], MUTED, 1.5, is_dashed=True)
    picture.line([(580, 171), (722, 171)], MUTED, 1.5, is_dashed=True)
    picture.text((722, 115), "device 1", 13, CHUNKS[1], "end", is_bold=True)
    picture.text((722, 227), "device 0", 13, CHUNKS[0], "end", is_bold=True)
    picture.text((570, 297), "activations cross once a cut, in chunks", 12, MUTED)
    picture.text((570, 317), "however deep the network, however the graph is cut", 12, MUTED)
    return picture


def _layer(picture: Picture, left: Point, size: Point, colour: str) -> None:
    """Add a layer, with a dot for each of its nodes."""
    x, y = left
    width, height = size
    picture.box((x, y - height / 2), size, PAPER, colour, 5)
    count = round(width / 28)
    for node in range(count):
        picture.dot((x + width * (node + 0.5) / count, y), 6, colour)


# A training step. -----------------------------------------------------------------------------


def draw_schedule(num_stages: int, order: tuple[int, ...]) -> Picture:
    """Return the chunks' computations of a step in unit time, idle time in grey."""
    cell, left, top, height, gap = 42.0, 90.0, 58.0, 36.0, 70.0
    half = len(order) + num_stages - 1  # time units of a phase
    span = 2 * half
    width = left + cell * span + gap + 20
    picture = Picture(width, top + 48 * num_stages + 50, "A training step of the pipeline")

    def x_of(time: float) -> float:
        return left + cell * time + (gap if time >= half else 0)

    picture.text((left, 24), "forward", 14, FORWARD, "start", is_bold=True)
    picture.text(
        (x_of(half), 24), "backward, in reverse order", 14, BACKWARD, "start", is_bold=True
    )
    for stage in range(num_stages):
        y = top + 48 * (num_stages - 1 - stage)
        picture.text((left - 12, y + height / 2), f"stage {stage}", 13, INK, "end")
        for start in (0.0, float(half)):
            picture.box((x_of(start), y), (cell * half, height), IDLE)
        for place, chunk in enumerate(order):
            start = place + stage
            for x, colour in ((x_of(start), FORWARD), (x_of(span - 1 - start), BACKWARD)):
                picture.box((x + 1, y), (cell - 2, height), colour)
                picture.text((x + cell / 2, y + height / 2), str(chunk), 15, LETTERS)
    bottom = top + 48 * num_stages - 12
    middle = left + cell * half + gap / 2
    picture.text((middle, (top + bottom) / 2 - 9), "your", 12, MUTED)
    picture.text((middle, (top + bottom) / 2 + 8), "loss", 12, MUTED)
    picture.line([(left, bottom + 18), (width - 20, bottom + 18)], is_arrow=True)
    picture.text((width - 20, bottom + 36), "time", 12, MUTED, "end")
    picture.box((left, bottom + 30), (14, 14), IDLE)
    share = f"{(num_stages - 1) / half:.0%}"
    legend = f"idle: (S - 1) / (K + S - 1) = {share}; a number is a chunk"
    picture.text((left + 22, bottom + 37), legend, 12, MUTED, "start")
    return picture


# Push and pull. -------------------------------------------------------------------------------


def draw_history() -> Picture:
    """Return a history while the third of four chunks is computed."""
    done, now = ORDER[:2], ORDER[2]
    picture = Picture(760, 300, "A history while a chunk pushes its embeddings and pulls others")
    picture.text((110, 26), f"chunk {now} arrives", 14, is_bold=True)
    picture.text((110, 46), "third in the order 2, 0, 3, 1", 12, MUTED)
    picture.text((385, 26), "history of this layer", 14, is_bold=True)
    picture.text((385, 46), "one embedding per node", 12, MUTED)
    picture.text((650, 26), "what the layer computes", 14, is_bold=True)
    picture.text((650, 46), "only the chunk's nodes", 12, MUTED)
    rows = {chunk: 66 + 54 * chunk for chunk in range(4)}
    notes = {True: "fresh: this epoch", False: "stale: the last epoch"}
    for chunk, y in rows.items():
        is_now, is_fresh = chunk == now, chunk in done
        picture.box((300, y), (170, 46), CHUNKS[chunk] if is_now or is_fresh else STALE, INK)
        ink = LETTERS if is_now or is_fresh else INK
        picture.text((385, y + 15), f"chunk {chunk}", 13, ink, is_bold=True)
        picture.text((385, y + 33), "written now" if is_now else notes[is_fresh], 11, ink)
    y = rows[now]
    picture.box((40, y), (140, 46), CHUNKS[now], INK)
    picture.text((110, y + 23), f"chunk {now}", 13, LETTERS)
    picture.line([(184, y + 23), (296, y + 23)], INK, 2, is_arrow=True)
    picture.text((240, y + 11), "push", 12, INK)
    picture.box((580, y - 54), (140, 46), PAPER, CHUNKS[now])
    picture.text((650, y - 31), f"chunk {now}, next layer", 12)
    for chunk, start in rows.items():
        target = (576, y - 46 + 10 * chunk)
        is_stale = chunk != now and chunk not in done
        picture.line([(474, start + 23), target], MUTED, 1.5, is_arrow=True, is_dashed=is_stale)
    picture.text((536, 118), "pull", 12, INK)
    picture.text((650, y + 12), "neighbours in chunks 0 and 2", 11, MUTED)
    picture.text((650, y + 28), "are fresh, those in chunk 1", 11, MUTED)
    picture.text((650, y + 44), "are an epoch old", 11, MUTED)
    return picture


# The bubble. ----------------------------------------------------------------------------------


def draw_bubble() -> Picture:
    """Return the idle share over the chunks a stage, for some numbers of stages."""
    left, top, width, height = 70.0, 40.0, 500.0, 220.0
    most_chunks, most_share = 64, 0.5
    picture = Picture(700, 330, "Idle share of a step over the number of chunks")
    picture.text(
        (left, 20), "idle share of a step, (S - 1) / (K + S - 1)", 14, INK, "start", is_bold=True
    )

    def place(chunks: float, share: float) -> Point:
        return left + width * chunks / most_chunks, top + height * (1 - share / most_share)

    for percent in range(0, 51, 10):
        y = place(0, percent / 100)[1]
        picture.line([(left, y), (left + width, y)], IDLE, 1)
        picture.text((left - 8, y), f"{percent} %", 12, MUTED, "end")
    for chunks in (1, 8, 16, 32, 48, 64):
        x = place(chunks, 0)[0]
        picture.line([(x, top + height), (x, top + height + 5)], MUTED, 1)
        picture.text((x, top + height + 18), str(chunks), 12, MUTED)
    picture.text((left + width / 2, top + height + 42), "chunks of the graph, K", 13, INK)
    for stages, colour in zip((2, 4, 8), (FORWARD, CHUNKS[2], BACKWARD), strict=True):
        shares = {k: (stages - 1) / (k + stages - 1) for k in range(stages - 1, most_chunks + 1)}
        picture.line([place(k, share) for k, share in shares.items()], colour, 2.5)
        usual = 4 * stages
        picture.dot(place(usual, shares[usual]), 5, colour)
        end = place(most_chunks, shares[most_chunks])
        picture.text((end[0] + 10, end[1]), f"S = {stages}", 13, colour, "start", is_bold=True)
    picture.dot((left + 330, top + 14), 5, MUTED)
    picture.text((left + 342, top + 14), "K = 4 S", 12, MUTED, "start")
    return picture


if __name__ == "__main__":
    main()
