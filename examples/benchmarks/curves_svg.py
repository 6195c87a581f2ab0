"""Curves as an SVG file, without a plotting library: one line per name, the band of its runs behind it."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

Point = tuple[float, float, float, float]
"""x, mean, least, greatest."""
COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555", "#dd8833", "#117733", "#882255"]
"""Paul Tol's bright scheme, told apart by colour-blind readers too, and more after it."""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 40, 170, 50


def draw(file: Path, curves: dict[str, Sequence[Point]], *, title: str, x_label: str, y_label: str) -> None:
    """Write the picture of `curves`, by name, to `file`. Axes begin at 0 of x and go over all values of y."""
    points = [point for curve in curves.values() for point in curve]
    most_x = max(point[0] for point in points) or 1.0
    low, high = min(point[2] for point in points), max(point[3] for point in points)
    span = high - low or 1.0

    def place(x: float, y: float) -> str:
        column = LEFT + x / most_x * (WIDTH - LEFT - RIGHT)
        return f"{column:.1f},{HEIGHT - BOTTOM - (y - low) / span * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        text(WIDTH / 2, 20, title, anchor="middle", size=14),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, anchor="middle"),
        text(LEFT, TOP - 8, y_label),
    ]
    for tick in range(6):
        x, y = most_x * tick / 5, low + span * tick / 5
        column, row = place(x, low).split(",")[0], place(0, y).split(",")[1]
        parts += [
            f'<path d="M{LEFT},{row}H{WIDTH - RIGHT}" stroke="#dddddd"/>',
            text(LEFT - 6, float(row) + 4, f"{y:.3g}", anchor="end"),
            text(float(column), HEIGHT - BOTTOM + 18, number(x), anchor="middle"),
        ]
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        band = [place(x, least) for x, _, least, _ in curve] + [place(x, most) for x, _, _, most in reversed(curve)]
        line = " ".join(place(x, mean) for x, mean, _, _ in curve)
        row = TOP + 16 * index
        parts += [
            f'<polygon points="{" ".join(band)}" fill="{colour}" opacity="0.12"/>',
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<path d="M{WIDTH - RIGHT + 12},{row}h18" stroke="{colour}" stroke-width="3"/>',
            text(WIDTH - RIGHT + 36, row + 4, name),
        ]
    file.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    """A line of text."""
    escaped = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escaped}</text>'


def number(value: float) -> str:
    """A tick of the x axis."""
    return f"{value / 1000:.3g}k" if value >= 1000 else f"{value:.3g}"


def spread(values: list[float]) -> str:
    """Mean, and least to greatest."""
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
