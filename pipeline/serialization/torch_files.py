"""Files of tensors, wherever they come from: read without running code or filling the memory.

``torch.load(weights_only=True)`` runs no foreign code and refuses tensors and storages that lie about their size. What
it still does is allocate: for ``bytearray(2**40)``, for ``FloatTensor(2**40)``, and later for a tensor of stride 0 that
shows one element a trillion times. ``_Rehearsal`` refuses such a file before torch sees it.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, ClassVar

import torch

from pipeline.errors import UsageError
from pipeline.serialization.npz_files import opened_archive, reported_as_unreadable
from pipeline.system.files import regular_size

SAFETENSORS = ".safetensors"
# A tensor may repeat the elements of its storage, but not so often that using it fills the memory.
_MAX_REPEATED_ITEMS = 1 << 20
_MAX_DIMENSIONS = 64
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# The operations that torch's safe reader knows. Others have no place in the file, and some allocate.
_OPERATIONS = (
    pickle.PROTO + pickle.STOP + pickle.MARK + pickle.GLOBAL + pickle.REDUCE + pickle.NEWOBJ + pickle.BUILD
    + pickle.BINPERSID + pickle.BINPUT + pickle.LONG_BINPUT + pickle.BINGET + pickle.LONG_BINGET
    + pickle.NONE + pickle.NEWTRUE + pickle.NEWFALSE + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG1
    + pickle.BINFLOAT + pickle.BINUNICODE + pickle.SHORT_BINSTRING + pickle.EMPTY_LIST + pickle.EMPTY_DICT
    + pickle.EMPTY_SET + pickle.EMPTY_TUPLE + pickle.TUPLE + pickle.TUPLE1 + pickle.TUPLE2 + pickle.TUPLE3
    + pickle.APPEND + pickle.APPENDS + pickle.SETITEM + pickle.SETITEMS
)  # fmt: skip
_TENSOR_MAKERS = {
    f"torch._utils.{name}"
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
}
_SUBCLASS_MAKER = "torch._tensor._rebuild_from_type_v2"
_DICTS = {"collections.OrderedDict", "collections.Counter"}
# These copy their first argument.
_COPIERS = _DICTS | {"builtins.set", "torch.Size", "_codecs.encode"}
# What else a file of weights calls: all of it makes no more than it is given.
_HARMLESS = {
    "builtins.complex",
    "torch.device",
    "torch.serialization._get_layout",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_sparse_tensor",
}


def load_weights(path: Path) -> Any:
    """Read a file of weights of either kind; safetensors files hold nothing but tensors by name."""
    return load_safetensors(path) if path.suffix == SAFETENSORS else load_tensors(path)


def load_tensors(path: Path, opened: BinaryIO | None = None) -> Any:
    """Read a file of tensors and plain values on the CPU; raise UnreadableFile for one that is not safe to read.

    ``opened`` is the same file where it is open already: its name may lead elsewhere by now.
    """
    with opened_archive(path, "tensors written by torch.save", opened) as (file, archive):
        _check_pickle(archive)
        file.seek(0)
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except RuntimeError as error:
            raise ValueError(f"torch refuses it: {error}") from error


def put_together(constant: Mapping[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Return the whole state of a module from two files, of which the second has the newer values."""
    # A copy of the second keeps what hangs on a state dict besides its items, such as versions of its layers.
    state = copy.copy(rest)
    for name, value in constant.items():
        state.setdefault(name, value)
    return state


def load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file on the CPU; raise UnreadableFile for one that is not safe to read."""
    read = safetensors_package(path).load_file
    with reported_as_unreadable(path, "tensors written by safetensors"):
        # safetensors compares the header with the file before it allocates anything. It would wait for a pipe.
        regular_size(path)
        tensors: dict[str, torch.Tensor] = read(path, device="cpu")
        return tensors


def safetensors_package(path: Path) -> ModuleType:
    """Return the optional package that reads and writes safetensors files."""
    try:
        return import_module("safetensors.torch")
    except ImportError:
        raise UsageError(
            f"{path} needs the package safetensors, which is not installed.",
            "pip install 'training-pipeline[safetensors]'",
        ) from None


def _check_pickle(archive: zipfile.ZipFile) -> None:
    """Raise ValueError unless the archive's pickle makes nothing but plain values, and tensors of the file's bytes."""
    # torch takes the folder of the first entry for the folder of all, and finds entries in any case of letters.
    names = archive.namelist()
    folder = names[0].split("/")[0]
    if [name for name in names if name.lower() == f"{folder}/data.pkl".lower()] != [f"{folder}/data.pkl"]:
        raise ValueError("it is not such a file")
    prefix = f"{folder}/data/"
    entries = [entry for entry in archive.infolist() if entry.filename.startswith(prefix)]
    storage_bytes = {entry.filename.removeprefix(prefix): entry.file_size for entry in entries}
    try:
        _Rehearsal(archive.read(f"{folder}/data.pkl"), storage_bytes).load()
    except ValueError:
        raise
    except Exception as error:
        # Operations that find nothing to work on make the reader raise almost anything.
        raise ValueError("its pickle is damaged") from error


class _Rehearsal(pickle._Unpickler):
    """Follows a pickle with stand-ins for all that it names, so that nothing is imported, called or allocated.

    This is the reader of the standard library that is written in Python. The one written in C allocates a list as long
    as the largest number that a pickle gives to one of its values.
    """

    dispatch: ClassVar[dict[int, Callable[[pickle.Unpickler], None]]] = {
        code: pickle._Unpickler.dispatch[code] for code in _OPERATIONS
    }
    # NEWOBJ makes an object without calling its constructor. It is checked as a call.
    dispatch[pickle.NEWOBJ[0]] = dispatch[pickle.REDUCE[0]]

    def load_build(self) -> None:
        """Give the state on top of the stack to the object below it, which may be a stand-in of a call only."""
        state = self.stack.pop()  # type: ignore[attr-defined]
        made = self.stack[-1]  # type: ignore[attr-defined]
        # The reader's own way would write into any object, also into what a storage says of its size.
        if not isinstance(made, _Named):
            raise ValueError("its pickle changes the inside of an object")
        made.__setstate__(state)

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]

    def __init__(self, content: bytes, storage_bytes: Mapping[str, int]) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._storage_bytes = storage_bytes
        self._num_items_to_copy = len(content)
        self.trusted = {
            entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
            for entry in torch.serialization.get_safe_globals()
        }

    def find_class(self, module: str, name: str) -> _Named:
        # torch.save writes the module names of Python 2.
        return _Named(f"{'builtins' if module == '__builtin__' else module}.{name}", self)

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, num_items = pid
        if type(num_items) is not int or num_items < 0:
            raise ValueError(f"storage {key!r} is said to have {num_items} elements")
        # The size comes from the file: torch compares num_items with it only at the first mention of a key.
        return _Storage(self._storage_bytes.get(key, 0), kind)

    def check_call(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Refuse a call that would run code, or make more than the file holds."""
        if name in _TENSOR_MAKERS:
            storage, offset, size, stride = arguments[:4]
            kind = arguments[6] if name.endswith("_v3") else storage.kind
            if len(size) != len(stride) or len(size) > _MAX_DIMENSIONS:
                raise ValueError("it has a tensor without a proper size or stride")
            if any(type(number) is not int or number < 0 for number in (offset, *size, *stride)):
                raise ValueError("it has a tensor without a proper size or stride")
            if math.prod(size) > max(storage.num_bytes // kind.item_bytes, _MAX_REPEATED_ITEMS):
                raise ValueError(f"a tensor of shape {size} is too large for its storage of {storage.num_bytes} bytes")
        elif name in _COPIERS:
            # torch.save writes each value next to the call that copies it, so all copies together are not larger than
            # the pickle. A hostile file could name one large value, or the copy of a copy, again and again.
            values = [value for value in arguments[:1] if isinstance(value, (str, tuple, list, dict))]
            self._num_items_to_copy -= sum(map(len, values))
            if len(values) < len(arguments[:1]) or self._num_items_to_copy < 0:
                raise ValueError(f"it copies the same values again and again with {name}")
        elif name not in _HARMLESS and name not in self.trusted:
            raise ValueError(f"it would run code when loaded: it calls {name}")


class _Named:
    """Stands for something that a pickle names, and for what a call of it makes."""

    def __init__(self, name: str, rehearsal: _Rehearsal) -> None:
        self.name = name
        self._rehearsal = rehearsal

    def __call__(self, *arguments: Any) -> _Named:
        if self.name == _SUBCLASS_MAKER:
            # This function calls the one that it is given.
            made: _Named = arguments[0](*arguments[2])
            return made
        self._rehearsal.check_call(self.name, arguments)
        return self

    def __setitem__(self, key: object, value: object) -> None:
        """Take an item, as a dict does."""

    def __setstate__(self, state: object) -> None:
        # The state of a finished tensor would give it another shape.
        if self.name not in _DICTS | self._rehearsal.trusted:
            raise ValueError("its pickle changes the inside of an object")

    @property
    def item_bytes(self) -> int:
        """The bytes of an element, of a dtype or of a class of storages; an untyped storage counts bytes."""
        name = self.name.rpartition(".")[2]
        if name == "UntypedStorage":
            return 1
        # Not by getattr, which would import what a file names; and to ask a class of storages itself would log that it
        # is deprecated.
        dtype = _DTYPES[name] if name in _DTYPES else torch.serialization.StorageType(name).dtype
        return int(dtype.itemsize)


@dataclass(frozen=True)
class _Storage:
    """Stands for a storage of the file."""

    num_bytes: int
    kind: _Named
