"""What fits on a terminal."""

from __future__ import annotations

import pytest

from pipeline.system.formatting import clipped, table

ROWS = [("", "first", "second", "third"), ("a long name", "1", "2", "3")]


def test_output_that_nobody_reads_on_a_terminal_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets every character."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert clipped("x" * 500) == "x" * 500


def test_line_is_clipped_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that would wrap ends in an ellipsis."""
    monkeypatch.setenv("COLUMNS", "10")
    assert clipped("abcdefghijkl") == "abcdefghi…"


def test_table_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns stand below their headers."""
    monkeypatch.setenv("COLUMNS", "80")
    assert list(table(ROWS)) == ["             first  second  third", "a long name  1      2       3"]


def test_columns_that_do_not_fit_follow_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow terminal shows the same table in parts, each with the names of the rows."""
    monkeypatch.setenv("COLUMNS", "24")
    first, second, third = (
        [f"{'':13}{word}", f"a long name  {row}"] for word, row in zip(ROWS[0][1:], "123", strict=False)
    )
    assert list(table(ROWS)) == [*first, "", *second, "", *third]
