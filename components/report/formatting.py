"""Formats of the report's figures and long texts, for the gate, the page and the terminal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from components.shared.progress import brief

MODELS = {"base": "base", "sft": "SFT", "grpo": "GRPO"}
"""Names of the models that a run compares."""
MODEL_COLORS = {"base": "#8b93a1", "sft": "#4a8fd4", "grpo": "#e0803a"}
_MINUS = "\N{MINUS SIGN}"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def points(fraction: float) -> str:
    """Return a difference of accuracies in percentage points with its sign, such as `+22.0`."""
    text = f"{100 * fraction:+.1f}"
    return "0.0" if text in {"+0.0", "-0.0"} else text.replace("-", _MINUS)


def interval(bounds: Sequence[float]) -> str:
    """Return the interval of an accuracy in percent, such as `79.1 to 85.3`."""
    return f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"


def points_interval(bounds: Sequence[float]) -> str:
    """Return the interval of a difference in percentage points, such as `+17.2 to +26.6`."""
    return f"{points(bounds[0])} to {points(bounds[1])}"


def probability(p_value: float) -> str:
    """Return a p-value: three decimals, or a power of ten if it is tiny."""
    if p_value == 0:
        return "0"
    if p_value >= 0.001:
        return f"{p_value:.3f}"
    mantissa, exponent = f"{p_value:.0e}".split("e")
    power = str(int(exponent)).translate(_SUPERSCRIPTS)
    return f"{mantissa}\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}\N{NO-BREAK SPACE}10{power}"


def test_set_use(use: Mapping[str, Any]) -> str:
    """Return how many policies were judged on the test problems, and the chance that one passes by luck.

    `use` is `looks` of a verdict; its `number` includes the policy of this run.
    """
    number, chance = use["number"], f"{100 * use['false_promotion']:.3g}"
    if number == 1:
        return "no other policy was judged on these test problems before"
    return (
        f"{number:,} policies, including this one, were judged on these test problems; the chance that one of them "
        f"passes without being better than SFT is up to {chance}\N{NO-BREAK SPACE}%"
    )


def value_range(values: Sequence[float], to_text: Callable[[float], str] = brief) -> str:
    """Return the range of a curve, such as `0.125 to 0.5`, or `constant 0.5`."""
    low, high = to_text(min(values)), to_text(max(values))
    return f"constant {low}" if low == high else f"{low} to {high}"


def shorten(text: str, characters: int) -> str:
    """Return the text, truncated to a number of characters."""
    return text if len(text) <= characters else text[:characters].rstrip() + " …"


def hours(number: float, unit: str) -> str:
    """Return an amount of processor time, such as `1.2 GPU-hours` or `3.4 core-minutes`."""
    return f"{number:,.1f} {unit}-hours" if number >= 1 else f"{60 * number:.1f} {unit}-minutes"


def duration(seconds: float) -> str:
    """Return a time span in the units that suit it: `40 ms`, `3.2 s`, `4 min 05 s`, `7 h 30 min`."""
    if seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
