"""Style of the figures, and their conversion to SVG.

Figures are drawn in the colours of the light theme. In the page each of these colours becomes a CSS variable of the same name
(`style.css` gives it a second value for dark screens), and text stays text, in the font of the page. The same figure and data
give the same bytes.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from forgefield.report.markup import Html, significant, text

COLOURS = {
    "ink": "#414b5a",
    "strong": "#161c26",
    "line": "#a3adba",
    "grid": "#e4e8ee",
    "blue": "#0969ac",
    "orange": "#d2600a",
    "green": "#0a8a68",
    "purple": "#a5508f",
}
DENSITY = ("#a9cce9", "#8fbce1", "#72a9d6", "#5394c8", "#377db8", "#1f649f", "#0f4a7f", "#08305b")
"""From few to many points."""

_VARIABLES = {colour: f"var(--fig-{name}, {colour})" for name, colour in COLOURS.items()}
_VARIABLES |= {colour: f"var(--fig-density-{level}, {colour})" for level, colour in enumerate(DENSITY)}

_LOG_DIGITS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 4, 5, 6, 7, 8, 9))

_STYLE: dict[Any, Any] = {
    # Labels can contain text from the user's files, in which `$` does not start a formula.
    "text.parse_math": False,
    "text.usetex": False,
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 8.2,
    "axes.titlesize": 8.6,
    "axes.labelsize": 8.2,
    "xtick.labelsize": 7.6,
    "ytick.labelsize": 7.6,
    "legend.fontsize": 7.8,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["ink"],
    "axes.edgecolor": COLOURS["line"],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["ink"],
    "ytick.labelcolor": COLOURS["ink"],
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.handlelength": 1.3,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the style within a `with` block; matplotlib's settings are restored afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(width: float = 3.7, height: float = 2.9) -> Figure:
    """An empty figure; width and height in inches. pyplot and its global state are not used."""
    return Figure(figsize=(width, height), layout="constrained")


def log_ticks(axes: Axes, which: str = "y", most: int = 6) -> None:
    """Plain numbers on a logarithmic axis, also where it spans less than a decade; at most `most` of them."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    low, high = axes.get_ylim() if which == "y" else axes.get_xlim()
    axis.set_major_locator(FixedLocator(log_tick_values(low, high, most)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_locator(NullLocator())
    if which == "y":
        axes.set_ylim(low, high)
    else:
        axes.set_xlim(low, high)


def log_tick_values(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two positive limits: as many as fit, in steps of decades, 1-2-5 or all digits of each decade."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices = [[digit * 10.0**decade for decade in decades for digit in digits] for digits in _LOG_DIGITS]
    inside = [[tick for tick in ticks if low <= tick <= high] for ticks in choices]
    fitting = [ticks for ticks in inside if 2 <= len(ticks) <= most]
    if fitting:
        return max(fitting, key=len)
    fullest = inside[0] if len(inside[0]) > most else max(inside, key=len)
    step = max(math.ceil(len(fullest) / most), 1)
    return fullest[::step]


def linear_ticks(axes: Axes, which: str, number: int = 5, *, integers: bool = False) -> None:
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_locator(MaxNLocator(number, integer=integers))


def plain(value: float) -> str:
    """A tick label without needless zeros."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
    return f"{value:g}".replace("-", "−") if abs(value) < 1e4 else significant(value)


def to_svg(figure: Figure, name: str, description: str) -> Html:
    """The figure as an inline SVG element. name: unique in the page, makes the internal ids unique."""
    drawing = _draw(figure, name)
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>\s*", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'style="([^"<>]*)"', lambda match: f'style="{_themed(match[1])}"', drawing)
    drawing = _drop_group_ids(drawing)
    drawing = re.sub(r">\s*\n\s*<", ">\n<", drawing)
    box = re.search(r'viewBox="([\d. ]+)"', drawing)
    assert box is not None, "matplotlib writes a view box"
    label = text(description)
    opening = f'<svg class="figure" role="img" aria-label="{label}" viewBox="{box[1]}">'
    return Html(opening + drawing[drawing.index(">") + 1 :].strip())


def _draw(figure: Figure, name: str) -> str:
    """The SVG file that matplotlib writes."""
    buffer = io.StringIO()
    with house_style():
        matplotlib.rcParams["svg.hashsalt"] = name
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        _arrange(figure)
        figure.savefig(buffer, format="svg", metadata=metadata, transparent=True)
    return buffer.getvalue()


def _arrange(figure: Figure) -> None:
    """Compute the layout of a figure that is drawn as SVG, and keep it. Matplotlib would draw the whole figure for that, and
    then once more."""
    if (engine := figure.get_layout_engine()) is not None:
        FigureCanvasSVG(figure)
        engine.execute(figure)
        figure.set_layout_engine(None)


def _themed(style: str) -> str:
    """One style attribute with theme colours as variables and the page's font."""
    style = re.sub(r"#[0-9a-f]{6}", lambda match: _VARIABLES.get(match[0], match[0]), style)
    return re.sub(r"font: (?:[^;]*? )?([\d.]+px) [^;]*", r"font-size: \1", style)


def _drop_group_ids(drawing: str) -> str:
    """matplotlib numbers its groups alike in every figure: in one page these ids would collide."""
    return re.sub(r'<g id="[^"<>]*"', "<g", drawing)
