"""Files of tensors and arrays are read without running code, and refused before anything is allocated."""

from __future__ import annotations

import _codecs
import io
import os
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.errors import UnreadableFile
from pipeline.serialization.npz_files import load_arrays
from pipeline.serialization.torch_files import load_tensors
from tests.support.hostile import Call, Stored, Tensor, absurd_arrays, compressed, repacked, save_hostile

MEGABYTE = 1 << 20


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    """A file as torch.save writes it."""
    torch.save({"weight": torch.arange(6.0).reshape(2, 3)}, tmp_path / "some.pt")
    return tmp_path / "some.pt"


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """A file as numpy.savez writes it."""
    np.savez(tmp_path / "some.npz", x=np.arange(3), y=np.ones((2, 2)))
    return tmp_path / "some.npz"


def refusal(load: Callable[[Path], Any], path: Path) -> str:
    """Return the one sentence with which a file is refused."""
    with pytest.raises(UnreadableFile) as raised:
        load(path)
    text = str(raised.value)
    assert str(path) in text
    assert "\n" not in text
    return text


ORDINARY: dict[str, Any] = {
    "module": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict(),
    "parameter": {"p": nn.Parameter(torch.ones(2))},
    "plain values": {"a": [1, -2, 2**70], "b": (None, True, 0.5), "c": "ü", "d": b"\xff", "e": {1}, "f": 1j},
    "dicts": {"ordered": OrderedDict(a=1), "counted": Counter([1, 1])},
    "dtypes": {str(one): torch.zeros(3).to(one) for one in (torch.bfloat16, torch.float8_e5m2, torch.uint16)},
    "views": {"part": torch.arange(10)[3:7:2], "repeated": torch.ones(1).expand(5), "turned": torch.ones(2, 3).T},
    "empty and scalar": {"empty": torch.empty(0, 3), "scalar": torch.tensor(7)},
    "sparse": {"s": torch.eye(3).to_sparse()},
    "many small values": {"bytes": [b"%d" % n for n in range(99)], "sets": [{n} for n in range(99)]},
    "words of torch": {"size": torch.Size([1, 2]), "dtype": torch.float32, "device": torch.device("cpu")},
}


@pytest.mark.parametrize("value", ORDINARY.values(), ids=ORDINARY.keys())
def test_what_torch_saves_is_read(tmp_path: Path, value: Any) -> None:
    """Every kind of value that a checkpoint may hold comes back as torch itself gives it."""
    torch.save(value, tmp_path / "x.pt")
    assert repr(load_tensors(tmp_path / "x.pt")) == repr(torch.load(tmp_path / "x.pt", weights_only=True))


def test_optimizer_with_state_is_read(tmp_path: Path) -> None:
    """The state of an optimizer after a step is an ordinary file."""
    module = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "x.pt")
    assert load_tensors(tmp_path / "x.pt")["state"].keys() == {0, 1}


def test_what_an_author_makes_torch_trust_is_read(tmp_path: Path) -> None:
    """torch's own way to allow a class works here as well."""
    torch.save({"kind": Trusted(4)}, tmp_path / "x.pt")
    assert "run code" in refusal(load_tensors, tmp_path / "x.pt")
    with torch.serialization.safe_globals([Trusted]):
        assert load_tensors(tmp_path / "x.pt")["kind"].number == 4


class Trusted:
    """A class of the author's own."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_what_numpy_saves_is_read(arrays: Path) -> None:
    """All arrays come back under their names, also such that differ in the case of a letter only."""
    assert {name: value.tolist() for name, value in load_arrays(arrays).items()} == {"x": [0, 1, 2], "y": [[1, 1]] * 2}
    np.savez(arrays, **{"lr/a": np.ones(1), "lr/A": np.zeros(0), "skipped": np.ones(2, bool)})
    assert list(load_arrays(arrays)) == ["lr/a", "lr/A", "skipped"]


@pytest.mark.parametrize("load", [load_tensors, load_arrays])
@pytest.mark.parametrize("kind", ["pipe", "device", "endless device", "folder", "dangling link", "loop", "nothing"])
def test_anything_but_a_file_is_refused_without_a_hang(tmp_path: Path, load: Callable[[Path], Any], kind: str) -> None:
    """Pipes, devices, folders and links to nowhere are never opened."""
    path = tmp_path / "special"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind != "nothing":
        path.symlink_to({"device": "/dev/null", "endless device": "/dev/zero", "loop": path}.get(kind, "nowhere"))
    refusal(load, path)


@pytest.mark.parametrize("load", [load_tensors, load_arrays])
@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04", b"PK\x03\x04" + b"\0" * 200, b"hello", b"\x93NUMPY"])
def test_other_content_is_refused(tmp_path: Path, load: Callable[[Path], Any], content: bytes) -> None:
    """The message says that the file is not an archive."""
    (tmp_path / "x").write_bytes(content)
    assert "it is" in refusal(load, tmp_path / "x")


def test_link_to_a_file_is_followed(tensors: Path) -> None:
    """Large weights often lie elsewhere, behind a link."""
    (tensors.parent / "link.pt").symlink_to(tensors)
    assert load_tensors(tensors.parent / "link.pt").keys() == {"weight"}


def test_old_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Files of the first torch versions are streams of pickles; the message says how to convert one."""
    torch.save(torch.ones(3), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    assert "save it again" in refusal(load_tensors, tmp_path / "x.pt")


def test_bare_pickle_is_refused(tmp_path: Path) -> None:
    """A pickle under the name of a checkpoint is not even looked into."""
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"weight": 1}))
    assert "old format" in refusal(load_tensors, tmp_path / "x.pt")


@pytest.mark.parametrize(("load", "fixture"), [(load_tensors, "tensors"), (load_arrays, "arrays")])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("/etc/x", 0), ("../x", 0), ("a/../../x", 0), ("a\\b", 0), ("link", 0o120777), ("folder/", 0o040755)],
)
def test_odd_entries_are_refused(
    load: Callable[[Path], Any], fixture: str, name: str, mode: int, request: pytest.FixtureRequest
) -> None:
    """Entries that would leave the archive's folder if it were unpacked, links and folders have no place in it."""
    path = request.getfixturevalue(fixture)
    entry = zipfile.ZipInfo(name)
    entry.external_attr = mode << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(entry, b"")
    assert "not a plain file" in refusal(load, path)


@pytest.mark.parametrize(("load", "fixture"), [(load_tensors, "tensors"), (load_arrays, "arrays")])
def test_compressed_entries_are_refused(
    load: Callable[[Path], Any], fixture: str, request: pytest.FixtureRequest
) -> None:
    """A small file must not unfold to a large one; neither torch nor numpy compress what we save."""
    path = request.getfixturevalue(fixture)
    compressed(path)
    assert "compressed" in refusal(load, path)


@pytest.mark.parametrize(("load", "fixture"), [(load_tensors, "tensors"), (load_arrays, "arrays")])
def test_entries_that_share_bytes_are_refused(
    load: Callable[[Path], Any], fixture: str, request: pytest.FixtureRequest
) -> None:
    """Many entries over the same bytes claim more than the file has."""
    path = request.getfixturevalue(fixture)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/large.npy", b"\0" * MEGABYTE)
        large = archive.infolist()[-1]
        for number in range(3):
            copy = zipfile.ZipInfo(f"archive/{number}.npy")
            copy.header_offset, copy.CRC = large.header_offset, large.CRC
            copy.file_size = copy.compress_size = large.file_size
            archive.filelist.append(copy)
    assert "more than the" in refusal(load, path)


@pytest.mark.parametrize(("load", "fixture"), [(load_tensors, "tensors"), (load_arrays, "arrays")])
@pytest.mark.parametrize("how", ["before", "behind", "comment", "twice"])
def test_archive_in_disguise_is_refused(
    load: Callable[[Path], Any], fixture: str, how: str, request: pytest.FixtureRequest
) -> None:
    """A file in which two readers could see two lists of entries is refused."""
    path = request.getfixturevalue(fixture)
    content = path.read_bytes()
    changed = {
        "before": b"PK\x03\x04" + content,
        "behind": content + b"\0",
        "comment": content[:-2] + struct.pack("<H", 3) + b"abc",
        "twice": content + content,
    }
    path.write_bytes(changed[how])
    refusal(load, path)


@pytest.mark.parametrize("at", range(0, 1200, 40))
def test_torn_files_are_refused(tensors: Path, at: int) -> None:
    """A file that breaks off anywhere is refused."""
    tensors.write_bytes(tensors.read_bytes()[:at])
    refusal(load_tensors, tensors)


ABSURD = {
    "more elements than the storage has": (Tensor(Stored(2**50), (4,)), "torch refuses it: record size (16 bytes)"),
    "fewer elements than the storage has": (Tensor(Stored(1), (1,)), "torch refuses it: record size (16 bytes)"),
    "negative number of elements": (Tensor(Stored(-4), (4,)), "said to have"),
    "unknown storage": (
        Tensor(Stored(4, key="9"), (4,)),
        "failed locating file data/9",
    ),
    "shape beyond the storage": (Tensor(Stored(4), (2**40,)), "too large for its storage of 16 bytes"),
    "shape just beyond the storage": (Tensor(Stored(4), (5,)), "torch refuses it: Trying to resize storage"),
    "offset beyond the storage": (Tensor(Stored(4), (1,), offset=4), "torch refuses it: Trying to resize storage"),
    "stride beyond the storage": (Tensor(Stored(4), (2,), (4,)), "torch refuses it: Trying to resize storage"),
    "one element shown endlessly": (Tensor(Stored(4), (2**40,), (0,)), "too large for its storage of 16 bytes"),
    "second mention of a storage that claims more": (
        [Tensor(Stored(4), (4,)), Tensor(Stored(2**50), (2**45,), (0,))],
        "too large for its storage of 16 bytes",
    ),
    "negative length": (Tensor(Stored(4), (-1,)), "proper size"),
    "more strides than lengths": (Tensor(Stored(4), (1,), (1, 1)), "proper size"),
    "endless shape": (Tensor(Stored(4), (1,) * 100, (1,) * 100), "proper size"),
}


@pytest.mark.parametrize(("value", "what"), ABSURD.values(), ids=ABSURD.keys())
def test_absurd_tensors_are_refused(tmp_path: Path, value: Any, what: str) -> None:
    """A tensor must fit the bytes that the file has for it; torch refuses some of the lies by itself."""
    save_hostile(tmp_path / "x.pt", value)
    assert what in refusal(load_tensors, tmp_path / "x.pt")


def test_proper_tensor_written_in_the_same_way_is_read(tmp_path: Path) -> None:
    """The function that writes the files above writes good ones as well."""
    save_hostile(tmp_path / "x.pt", Tensor(Stored(4), (2, 2), (2, 1)))
    assert load_tensors(tmp_path / "x.pt")["weight"].shape == (2, 2)


CALLS = {
    "code": (os.mkdir, ("canary",)),
    "eval": (eval, ("1",)),
    "endless bytes": (bytearray, (2**50,)),
    "endless tensor": (torch.FloatTensor, (2**40,)),
    "endless storage": (torch.UntypedStorage, (2**40,)),
}


@pytest.mark.parametrize(("callee", "arguments"), CALLS.values(), ids=CALLS.keys())
def test_calls_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callee: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Neither foreign code nor a constructor that takes a size is called, however it is wrapped."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"plain": Call(callee, arguments), "first": [Call(callee, arguments), 1]}.items():
        save_hostile(tmp_path / f"{name}.pt", value)
        assert "would run code" in refusal(load_tensors, tmp_path / f"{name}.pt")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "value", [Call(bytearray, (2**20,)), Call(torch.FloatTensor, (2**20,)), Tensor(Stored(4), (2**40,), (0,))]
)
def test_what_is_checked_here_is_what_torch_lets_pass(tmp_path: Path, value: Any) -> None:
    """torch's safe reader allocates whatever a file asks for; should it refuse that one day, our check can go."""
    save_hostile(tmp_path / "x.pt", value)
    assert "weight" in torch.load(tmp_path / "x.pt", weights_only=True)
    refusal(load_tensors, tmp_path / "x.pt")


def test_copies_of_copies_are_refused(tmp_path: Path) -> None:
    """A few bytes of pickle copy a value; neither many copies of a long one nor copies that double may add up."""
    text = "x" * 1000
    save_hostile(tmp_path / "x.pt", [Call(_codecs.encode, (text, "latin1")) for _ in range(1000)])
    assert "copies the same values" in refusal(load_tensors, tmp_path / "x.pt")
    doubled: Any = Call(_codecs.encode, ("x", "latin1"))
    for _ in range(40):
        doubled = Call(_codecs.encode, (doubled, "hex"))
    save_hostile(tmp_path / "x.pt", doubled)
    assert "copies the same values" in refusal(load_tensors, tmp_path / "x.pt")


def test_call_inside_a_subclass_is_refused(tmp_path: Path) -> None:
    """The function that rebuilds subclasses of tensors calls another one, which is checked as well."""
    inner = Call(torch._tensor._rebuild_from_type_v2, (bytearray, torch.Tensor, (2**50,), {}))
    save_hostile(tmp_path / "x.pt", inner)
    assert "calls" in refusal(load_tensors, tmp_path / "x.pt")


def test_tensor_that_is_rebuilt_twice_is_refused(tmp_path: Path) -> None:
    """A state set on a finished tensor could give it any shape."""
    save_hostile(tmp_path / "x.pt", Tensor(Stored(4), (4,), state=(Stored(4), 0, (2**40,), (1,))))
    assert "inside of an object" in refusal(load_tensors, tmp_path / "x.pt")


# The id of a storage of 16 bytes, as torch.save writes it.
STORAGE_ID = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"


def test_storage_that_is_given_another_size_is_refused(tensors: Path) -> None:
    """A state set on a storage could make it as large as a tensor of any shape needs."""
    claim = b"}X\x09\x00\x00\x00num_bytes\x8a\x08" + (2**60).to_bytes(8, "little") + b"sb"
    shape = b"\x8a\x06" + (2**42).to_bytes(6, "little") + b"\x85K\x00\x85\x89)Rtq\x00R."
    build = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE_ID + claim + b"K\x00" + shape
    repacked(tensors, {"data.pkl": build})
    assert "inside of an object" in refusal(load_tensors, tensors)


@pytest.mark.parametrize("protocol", [0, 1, 4, 5])
def test_pickles_of_other_protocols_are_refused(tensors: Path, protocol: int) -> None:
    """torch.save writes protocol 2; a pickle with other operations was made by something else."""
    repacked(tensors, {"data.pkl": pickle.dumps({"a": bytearray(9), "b": OrderedDict(x=1)}, protocol)})
    refusal(load_tensors, tensors)


@pytest.mark.parametrize("content", [b"", b".", b"\x80\x02", b"\x80\x02h\x05.", b"\x80\x02}R.", b"\x80\x02Nb.", b"t."])
def test_damaged_pickles_are_refused(tensors: Path, content: bytes) -> None:
    """Operations that find nothing to work on are refused like any damage."""
    repacked(tensors, {"data.pkl": content})
    refusal(load_tensors, tensors)


ABSURD_ARRAYS = {
    "larger than its bytes": ("'<f8'", (2**40,), "cannot have"),
    "smaller than its bytes": ("'<f8'", (1,), "cannot have"),
    "negative": ("'<f8'", (-4,), "cannot have"),
    "objects": ("'|O'", (4,), "must hold numbers"),
    "texts without length": ("'<U0'", (2**60,), "must hold numbers"),
    "endless rows of nothing": ("'<f8'", (2**62, 0), "cannot have"),
}


@pytest.mark.parametrize(("dtype", "shape", "what"), ABSURD_ARRAYS.values(), ids=ABSURD_ARRAYS.keys())
def test_absurd_arrays_are_refused(tmp_path: Path, dtype: str, shape: tuple[int, ...], what: str) -> None:
    """An array's header must say what the bytes behind it are."""
    absurd_arrays(tmp_path / "x.npz", ["x"], dtype, shape)
    assert what in refusal(load_arrays, tmp_path / "x.npz")


def test_array_of_objects_runs_no_code(tmp_path: Path) -> None:
    """numpy keeps objects as pickles; they are never opened."""
    canary = tmp_path / "canary"
    np.savez(tmp_path / "x.npz", x=np.array([Call(os.mkdir, (str(canary),))], dtype=object))
    assert "must hold numbers" in refusal(load_arrays, tmp_path / "x.npz")
    assert not canary.exists()


@pytest.mark.parametrize("header", ["{" * 300, "[" * 9000, "__import__('os')", "{'descr': 1}", "x" * 20000, ""])
def test_damaged_array_headers_are_refused(tmp_path: Path, header: str) -> None:
    """The header is a Python literal; anything else is refused."""
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", content)
    refusal(load_arrays, tmp_path / "x.npz")


def test_checking_reads_no_more_than_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of the check does not grow with the weights: of a large file only a few kilobytes are read."""
    torch.save({str(number): torch.zeros(MEGABYTE) for number in range(8)}, tmp_path / "x.pt")
    read: list[int] = []

    class Counting(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            content = super().read(size)
            read.append(len(content))
            return content

    monkeypatch.setattr(Path, "open", lambda path, mode: Counting(path, mode))
    monkeypatch.setattr(torch, "load", lambda *words, **more: None)
    load_tensors(tmp_path / "x.pt")
    assert sum(read) < 20_000
