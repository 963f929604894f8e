"""Nested values as JSON knows them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def as_json(value: Any) -> Any:
    """Return a value in which whatever JSON has no word for is null; a complex number is a pair."""
    if isinstance(value, dict):
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_json(inner) for inner in value]
    if isinstance(value, complex):
        return as_json([value.real, value.imag])
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value by its dotted name; a list is one value, and so is an empty object."""
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for key, inner in value.items():
        yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
