"""Pieces of SVG pictures that are written by hand: the same bytes whatever matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence


def document(width: float, height: float, parts: Sequence[str]) -> str:
    """A picture on white, of these elements."""
    box = f"0 0 {width:.0f} {height:.0f}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "start", *, size: int = 12, color: str) -> str:
    """Args: anchor, what of the words is at x: start, middle or end."""
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, color: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}"/>'
