"""A few shapes as SVG text, for the pictures of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK, MUTED, IDLE, PAPER = "#22262b", "#6a737d", "#d9dce0", "#ffffff"
FORWARD, BACKWARD = "#4477aa", "#c8553d"  # as in the timelines that the package draws
CHUNKS = ("#4477aa", "#ee8866", "#44aa77", "#aa5599")
STALE = "#f2d7a6"
LETTERS = "#fff"  # on a colour; the same in the dark
DARK = {  # what stands in place of a colour on a dark page
    INK: "#e3e6ea",
    MUTED: "#a3acb6",
    IDLE: "#454c57",
    PAPER: "#1e2129",  # the ground of the pages themselves
    FORWARD: "#5d93c9",
    BACKWARD: "#d9705a",
    STALE: "#6e5728",
}

Point = tuple[float, float]


class Picture:
    """Shapes on white paper, or on dark paper for those who read in the dark.

    Args:
        width: In pixels.
        height: In pixels.
        title: What the picture shows, for those who do not see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.size = width, height
        self.title = title
        self.shapes: list[str] = []

    def box(
        self, corner: Point, size: Point, fill: str, stroke: str = "none", radius: float = 3
    ) -> None:
        """Add a rectangle."""
        (x, y), (width, height) = corner, size
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def dot(self, centre: Point, radius: float, fill: str, stroke: str = PAPER) -> None:
        """Add a circle."""
        self.shapes.append(
            f'<circle cx="{centre[0]:g}" cy="{centre[1]:g}" r="{radius:g}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="1.5"/>'
        )

    def line(
        self,
        points: Sequence[Point],
        stroke: str = MUTED,
        width: float = 1.5,
        *,
        is_arrow: bool = False,
        is_dashed: bool = False,
    ) -> None:
        """Add a line through `points`."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        marks = ' marker-end="url(#arrow)"' if is_arrow else ""
        marks += ' stroke-dasharray="4 3"' if is_dashed else ""
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" '
            f'stroke-width="{width:g}"{marks}/>'
        )

    def text(
        self,
        place: Point,
        text: str,
        size: float = 13,
        fill: str = INK,
        anchor: str = "middle",
        *,
        is_bold: bool = False,
    ) -> None:
        """Add a line of text whose middle is at the height of `place`."""
        weight = ' font-weight="bold"' if is_bold else ""
        self.shapes.append(
            f'<text x="{place[0]:g}" y="{place[1] + 0.35 * size:g}" font-size="{size:g}" '
            f'fill="{fill}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def __str__(self) -> str:
        width, height = self.size
        rules = "".join(
            f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}'
            for light, dark in DARK.items()
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img" '
            'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>",
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
            'markerHeight="6" orient="auto-start-reverse">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{MUTED}"/></marker></defs>',
            f'<rect width="{width:g}" height="{height:g}" rx="6" fill="{PAPER}"/>',
        )
        return "\n".join([*head, *self.shapes, "</svg>", ""])
