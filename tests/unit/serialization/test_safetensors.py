"""Safetensors files are read whole, and refused before anything is allocated."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import UnreadableFile
from pipeline.serialization.torch_files import load_safetensors, load_weights

_WHOLE = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write(path: Path, header: Any, num_bytes: int = 24, length: int | None = None) -> Path:
    """Write a file with any header, which may lie about its own length."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + bytes(num_bytes))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_what_safetensors_saves_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """Tensors of every kind, empty ones and scalars too, come back as they were."""
    tensors = {"a": torch.ones(2, 3).to(dtype), "b": torch.zeros(0, 4).to(dtype), "c": torch.ones(()).to(dtype)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"by": "someone"})
    found = load_weights(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == dtype for name in tensors)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": {**_WHOLE, "shape": [2**40, 2**40]}}, "overflow computing buffer size"),
        ({"a": {**_WHOLE, "shape": [2**40], "data_offsets": [0, 2**42]}}, "file not fully covered"),
        ({"a": {**_WHOLE, "shape": [2, -3]}}, "invalid JSON in header"),
        ({"a": {**_WHOLE, "shape": [1] * 99}}, "invalid shape"),
        ({"a": {**_WHOLE, "data_offsets": [24, 0]}}, "invalid offset"),
        ({"a": {**_WHOLE, "dtype": "OBJECT"}}, "unknown variant `OBJECT`"),
        ({"a": {**_WHOLE, "dtype": ["F32"]}}, "invalid JSON in header"),
        ({"a": {"shape": [6]}}, "missing field `dtype`"),
        ({"a": _WHOLE, "b": _WHOLE}, "invalid offset"),
        ({"a": {**_WHOLE, "shape": [5], "data_offsets": [4, 24]}}, "invalid offset"),
        ({}, "file not fully covered"),
        ([], "invalid JSON in header"),
        (b'{"a": 1, "a": 2}', "invalid JSON in header"),
        (b"[" * 100_000, "invalid JSON in header"),
        (b"\xff\xfe", "invalid UTF-8 in header"),
    ],
)
def test_header_that_lies_is_refused(tmp_path: Path, header: Any, said: str) -> None:
    """What the header claims must be what the file holds; the package looks before it allocates."""
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(UnreadableFile, match="must be a file of tensors written by safetensors") as raised:
        load_safetensors(path)
    assert said in str(raised.value)


@pytest.mark.parametrize("length", [2**63, 2**31, 101_000_000])
def test_header_of_absurd_length_is_refused(tmp_path: Path, length: int) -> None:
    """The length of the header is compared with the file before it is read."""
    with pytest.raises(UnreadableFile, match="header too large"):
        load_safetensors(write(tmp_path / "x.safetensors", {"a": _WHOLE}, length=length))


@pytest.mark.parametrize("size", [0, 7, 8, 60])
def test_torn_file_is_refused(tmp_path: Path, size: int) -> None:
    """A download that broke off anywhere is refused."""
    path = write(tmp_path / "x.safetensors", {"a": _WHOLE})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UnreadableFile, match="must be a file of tensors"):
        load_safetensors(path)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.integers(0, 200), st.binary(min_size=1, max_size=4))
def test_changed_bytes_are_read_or_refused(place: int, change: bytes) -> None:
    """Wherever bytes are changed, the file is refused or still holds tensors that fit it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "x.safetensors"
        safetensors.torch.save_file({"a": torch.ones(2, 3), "b": torch.arange(4)}, path)
        content = bytearray(path.read_bytes())
        place %= len(content) - len(change)
        content[place : place + len(change)] = change
        path.write_bytes(content)
        try:
            found = load_safetensors(path)
        except UnreadableFile:
            return
        assert sum(one.numel() * one.element_size() for one in found.values()) <= len(content)
