"""The picture of a learning-rate range test: one self-contained SVG."""

import math
from collections.abc import Sequence
from html import escape

from paceline.lr_find.rule import Advice, Point

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 24, 64, 56
_INK, _FAINT, _LINE, _MARK = "#1f2933", "#d5dbe1", "#1769aa", "#c2410c"


def draw(points: Sequence[Point], advice: Advice | None, title: str) -> str:
    """Raw losses as dots, smoothed ones as a line, over the learning rate on a logarithmic axis; the advice as a mark."""
    lows, highs = _bounds(points)
    begin, end = math.log10(points[0].lr), math.log10(points[-1].lr)

    def x(lr: float) -> float:
        return _LEFT + (math.log10(lr) - begin) / max(end - begin, 1e-9) * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        part = (min(loss, highs + (highs - lows)) - lows) / (highs - lows)  # anything higher is out of sight
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)

    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        ' font-family="system-ui, sans-serif" font-size="13">',
        f'<clipPath id="inside"><rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}"'
        f' height="{_HEIGHT - _TOP - _BOTTOM}"/></clipPath>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 22, "Learning-rate range test", size=16, weight=600),
        _text(_LEFT, 42, title, color="#52606d"),
    ]
    for tick in _ticks(lows, highs):
        shapes.append(f'<path d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}" stroke="{_FAINT}"/>')
        shapes.append(_text(_LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end"))
    for power in range(math.ceil(begin - 1e-9), math.floor(end + 1e-9) + 1):
        at = x(10.0**power)
        shapes.append(f'<path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{_FAINT}"/>')
        shapes.append(_text(at, _HEIGHT - _BOTTOM + 18, f"{10.0**power:g}", anchor="middle"))
    shapes.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, "learning rate", anchor="middle"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    turned = f'<text transform="translate(18 {middle}) rotate(-90)" text-anchor="middle" fill="{_INK}">'
    shapes.append(f"{turned}training loss</text>")
    finite = [point for point in points if math.isfinite(point.loss) and point.loss <= highs]
    shapes += [f'<circle cx="{x(p.lr):.1f}" cy="{y(p.loss):.1f}" r="2.2" fill="{_LINE}" opacity="0.35"/>' for p in finite]
    line = [f"{x(p.lr):.1f} {y(p.smoothed):.1f}" for p in points if math.isfinite(p.smoothed)]
    shapes.append(f'<path d="M{" L".join(line)}" fill="none" stroke="{_LINE}" stroke-width="2.2" clip-path="url(#inside)"/>')
    if advice is not None:
        if advice.lr >= points[0].lr:
            shapes += _mark(x(advice.lr), f"recommended {advice.lr:.2g}", _MARK, left=x(advice.lr) > _WIDTH / 4)
        shapes += _mark(
            x(advice.minimum_lr), f"lowest {advice.minimum_lr:.2g}", "#52606d", left=x(advice.minimum_lr) > _WIDTH * 0.8
        )
    return "\n".join([*shapes, "</svg>"]) + "\n"


def _mark(at: float, text: str, color: str, *, left: bool) -> list[str]:
    """A dashed vertical line with a label on its left or right."""
    dashed = f'<path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{color}" stroke-width="1.6" stroke-dasharray="5 4"/>'
    place, anchor = (at - 6, "end") if left else (at + 6, "start")
    return [dashed, _text(place, _TOP + 14, text, color=color, anchor=anchor, weight=600)]


def _bounds(points: Sequence[Point]) -> tuple[float, float]:
    """The losses to show: from the lowest to somewhat above the start. The explosion leaves the picture at the top."""
    finite = [point for point in points if math.isfinite(point.loss) and math.isfinite(point.smoothed)]
    if not finite:
        return 0.0, 1.0
    low = min(min(point.loss, point.smoothed) for point in finite)
    start = max(max(point.loss, point.smoothed) for point in finite[: max(1, len(finite) // 4)])
    room = 0.05 * (start - low) or 0.5
    return low - room, start + 6 * room


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers in this range."""
    unit = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(unit * factor for factor in (1, 2, 5, 10) if (high - low) / (unit * factor) <= 6)
    return [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _text(x: float, y: float, text: str, *, color: str = _INK, anchor: str = "start", size: int = 13, weight: int = 400) -> str:
    about = f'fill="{color}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {about}>{escape(text)}</text>'
