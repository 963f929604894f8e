"""Settings files are read strictly, and what is wrong is shown with its place."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidExperiment, Problem
from pipeline.experiment.settings.json_source import read_document


def problem_of(tmp_path: Path, content: str | bytes) -> Problem:
    """Return the one problem that reading a file gives."""
    path = tmp_path / "some.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidExperiment) as raised:
        read_document(path)
    (problem,) = raised.value.problems
    assert problem.where.startswith(str(path))
    return problem


BROKEN = {
    "comment with slashes": ('{\n  "a": 1, // why\n  "b": 2\n}', ":2:11", "no comments"),
    "comment with hash": ('{\n  # why\n  "a": 1\n}', ":2:3", "no comments"),
    "comment at the start": ('// why\n{"a": 1}', ":1:1", "no comments"),
    "NaN": ('{"a": NaN}', ":1:7", "NaN is not JSON"),
    "Infinity": ('{"a": Infinity}', ":1:7", "Infinity is not JSON"),
    "number out of range": ('{"a":\n -1e999}', ":2:2", "Number out of range"),
    "minus Infinity": ('{"a": -Infinity}', ":1:7", "-Infinity is not JSON"),
    "duplicate key": ('{"a": 1,\n "b": 2,\n "a": 3}', ":3:2", "Duplicate key 'a', which stands in line 1"),
    "nested duplicate key": ('{"x": {"a": 1, "a": 1}}', ":1:16", "Duplicate key 'a'"),
    "single quotes": ("{'a': 1}", ":1:2", "double quotes"),
    "python True": ('{"a": True}', ":1:7", "true, in lower case"),
    "python None": ('{"a": None}', ":1:7", "write null"),
    "trailing comma": ('{"a": 1,}', ":1:9", "comma"),
    "trailing comma in list": ('{"a": [1, ]}', ":1:11", "comma"),
    "missing comma": ('{"a": 1\n "b": 2}', ":2:2", "Expected ','"),
    "missing colon": ('{"a" 1}', ":1:6", "Expected ':'"),
    "missing value": ('{"a": }', ":1:7", "value is missing"),
    "never closed": ('{"a": [1, 2\n\n', ":1:12", "the file ends before its brackets are closed"),
    "number without a digit": ('{"a": .5}', ":1:7", "begin with a digit"),
    "text after the end": ('{"a": 1}\n{"b": 2}', ":2:1", "after the end"),
    "newline in string": ('{"a": "x\ny"}', ":1:9", "closing quote"),
    "string never closed": ('{"a": "x', ":1:7", "Unterminated string"),
    "lone word": ("hello", ":1:1", "Expected a value"),
}


@pytest.mark.parametrize(("text", "place", "cause"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_syntax_is_told_with_line_column_and_cause(tmp_path: Path, text: str, place: str, cause: str) -> None:
    """What is wrong is named at its line and column, with the likely cause."""
    problem = problem_of(tmp_path, text)
    assert problem.where.endswith(f"some.json{place}")
    assert cause.lower() in problem.what.lower()


def test_caret_stands_below_the_mistake(tmp_path: Path) -> None:
    """The line is shown, and the caret below it points at the character."""
    _, line, caret = problem_of(tmp_path, '{\n  "seed": NaN\n}').what.splitlines()
    assert line[caret.index("^")] == "N"


def test_caret_line_of_a_huge_line_is_cut(tmp_path: Path) -> None:
    """A file on one endless line does not flood the terminal."""
    problem = problem_of(tmp_path, '{"a": "' + "x" * 5000 + '" 1}')
    assert all(len(line) < 250 for line in problem.what.splitlines())


@pytest.mark.parametrize("content", ["", " \n\t", "\ufeff"], ids=["nothing", "spaces", "only a BOM"])
def test_empty_file_is_called_empty(tmp_path: Path, content: str) -> None:
    """An empty file is told as such, not as a syntax error."""
    assert "empty" in problem_of(tmp_path, content).what


def test_missing_file_is_told(tmp_path: Path) -> None:
    """A file that is not there is named with its whole path."""
    with pytest.raises(InvalidExperiment, match=r"none\.json: must be a file"):
        read_document(tmp_path / "none.json")


def test_folder_is_not_a_file(tmp_path: Path) -> None:
    """A folder in place of a file is refused, not read."""
    (tmp_path / "x.json").mkdir()
    with pytest.raises(InvalidExperiment, match="must be a file"):
        read_document(tmp_path / "x.json")


@pytest.mark.parametrize("content", [b'{"a": "\xff"}', '{"a": 1}'.encode("utf-16")], ids=["latin", "utf-16"])
def test_other_encoding_is_told(tmp_path: Path, content: bytes) -> None:
    """Bytes that are not UTF-8 are named with how to mend it."""
    problem = problem_of(tmp_path, content)
    assert "UTF-8" in problem.what
    assert "UTF-8" in problem.fix


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    """Some editors begin files with a BOM; it means nothing."""
    path = tmp_path / "some.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_document(path).value == {"a": 1}


def test_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A file of many megabytes is no settings file."""
    problem = problem_of(tmp_path, " " * (2 << 20) + "{}")
    assert "at most" in problem.what
    assert str((2 << 20) + 2) in problem.what


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_deep_nesting_is_refused(tmp_path: Path, text: str) -> None:
    """Nesting beyond all sense ends in a message, not in a crash."""
    assert "Nested too deeply" in problem_of(tmp_path, text).what


def test_deep_nesting_is_refused_at_its_line(tmp_path: Path) -> None:
    """Valid JSON that no settings file needs is refused where it becomes too deep."""
    problem = problem_of(tmp_path, "[\n" * 101 + "]" * 101)
    assert problem.where.endswith("some.json:101:1")
    assert "at most 100 brackets" in problem.what


def test_number_with_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    """Python refuses to read such integers, and the message says so at their place."""
    problem = problem_of(tmp_path, '{"a":\n ' + "9" * 10_000 + "}")
    assert "too many digits" in problem.what
    assert problem.where.endswith(":2:2")


def test_every_value_knows_its_line(tmp_path: Path) -> None:
    """Problems found later are still told with the line of the value."""
    path = tmp_path / "some.json"
    path.write_text('{\n  "a": {\n    "b": [\n 1,\n 2],\n "c": {}, "d": [],\n "e": [{"f": "{,"},\n {"g": 1}]\n  }\n}')
    document = read_document(path)
    assert document.place(("a", "e", 0, "f")) == f"{path}:7"
    assert document.place(("a", "e", 1, "g")) == f"{path}:8"
    assert document.place(("a", "b", 1)) == f"{path}:5"
    assert document.place(("a", "unknown", "deeper")) == f"{path}:2"


def parsed_or_refused(content: bytes) -> None:
    """Check that a file is read as json.loads would, or refused with a message."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        path.write_bytes(content)
        try:
            value = read_document(path).value
        except InvalidExperiment:
            return
    assert repr(value) == repr(json.loads(content.decode("utf-8-sig")))


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_every_json_value_is_read_as_the_standard_library_does(value: object, indent: object, ascii_only: bool) -> None:
    """Strictness refuses nothing that is JSON."""
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            assert repr(read_document(path).value) == repr(json.loads(text))
        except InvalidExperiment as error:
            assert "UTF-8" in str(error)  # noqa: PT017


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    """Nothing that is not JSON gets through, and nothing makes the reader crash."""
    parsed_or_refused(content)


@given(st.text(alphabet='{}[]",:-+.0123456789eEtruefalsnN\\/ \n\tI\ufeff', max_size=40))
def test_any_text_like_json_is_read_or_refused(text: str) -> None:
    """The same holds for text made of JSON's own characters."""
    parsed_or_refused(text.encode())


@given(VALUES, st.data())
def test_damaged_json_is_read_or_refused(value: object, data: st.DataObject) -> None:
    """A valid file with one character removed or doubled is still read or refused."""
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    parsed_or_refused((text[:at] + text[at + 1 :]).encode())
    parsed_or_refused((text[:at] + text[at : at + 1] + text[at:]).encode())
