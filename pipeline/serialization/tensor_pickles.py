"""What a checkpoint's pickle asks for, found out without doing any of it.

torch's safe reader runs no foreign code, but a file can still make it allocate an array of any size. Here the same
instructions are followed over names and numbers alone, so that a file is refused before anything is allocated.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Bytes per element of the storage classes that torch.save names.
_ITEM_BYTES = {
    **dict.fromkeys(("ComplexDoubleStorage",), 16),
    **dict.fromkeys(("DoubleStorage", "LongStorage", "ComplexFloatStorage"), 8),
    **dict.fromkeys(("FloatStorage", "IntStorage", "QInt32Storage"), 4),
    **dict.fromkeys(("HalfStorage", "BFloat16Storage", "ShortStorage"), 2),
    **dict.fromkeys(("CharStorage", "ByteStorage", "BoolStorage", "QInt8Storage", "QUInt8Storage"), 1),
    **dict.fromkeys(("QUInt4x2Storage", "QUInt2x4Storage", "UntypedStorage"), 1),
}
_TENSOR_MAKERS = {
    f"torch._utils {name}"
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor")
}
_SUBCLASS_MAKER = "torch._tensor _rebuild_from_type_v2"
_DICTS = {"collections OrderedDict", "collections Counter"}
# What else a file of weights calls: all of it makes no more than it is given.
_HARMLESS = _DICTS | {
    "torch Size",
    "torch device",
    "torch.serialization _get_layout",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_parameter_with_state",
    "torch._utils _rebuild_sparse_tensor",
    "_codecs encode",
    *(f"{module} {name}" for module in ("builtins", "__builtin__") for name in ("set", "complex")),
}
_NUMBERS_AND_TEXTS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING"}
_FRESH: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_MADE = {"EMPTY_LIST": "list", "EMPTY_DICT": "dict", "EMPTY_SET": "set"}
# A tensor may repeat the elements of its storage, but not so often that using it fills the memory.
_MAX_REPEATED = 1 << 20
_MAX_DIMENSIONS = 64


@dataclass(frozen=True)
class _Name:
    """Something importable, as 'module name'."""

    name: str


@dataclass(frozen=True)
class _Made:
    """The outcome of a call, of which only the callee matters."""

    by: str


@dataclass(frozen=True)
class _Storage:
    num_bytes: int
    item_bytes: int


def check_pickle(content: bytes, storages: Mapping[str, int]) -> None:
    """Raise ValueError unless a pickle makes nothing but plain values, and tensors that fit their storages.

    ``storages`` are the sizes in bytes of the storages that the file holds, by key.
    """
    machine = _Machine(storages)
    try:
        for operation, argument, _ in pickletools.genops(content):
            machine.follow(operation.name, argument)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError("its pickle is damaged") from error


class _Machine:
    """Follows the operations that torch's safe reader knows, over stand-ins for what they would make."""

    def __init__(self, storages: Mapping[str, int]) -> None:
        self._storages = storages
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._vouched = _vouched_names()

    def follow(self, operation: str, argument: Any) -> None:
        if operation in _NUMBERS_AND_TEXTS:
            self._stack.append(argument)
        elif operation in _FRESH:
            self._stack.append(_FRESH[operation])
        elif operation in _MADE:
            self._stack.append(_Made(_MADE[operation]))
        else:
            # A method per operation, as the set of operations is not ours to choose.
            action = getattr(self, f"_{operation.lower()}", None)
            if action is None:
                raise ValueError(f"its pickle uses {operation}, which torch.save never writes")
            action(argument)

    def _proto(self, argument: int) -> None:
        """The version of the pickle says nothing that matters here."""

    def _stop(self, argument: None) -> None:
        self._stack.pop()

    def _mark(self, argument: None) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_marked(self) -> list[Any]:
        items = self._stack
        self._stack = self._marked.pop()
        return items

    def _tuple(self, argument: None) -> None:
        items = self._pop_marked()
        self._stack.append(tuple(items))

    def _tuple1(self, argument: None) -> None:
        self._gather(1)

    def _tuple2(self, argument: None) -> None:
        self._gather(2)

    def _tuple3(self, argument: None) -> None:
        self._gather(3)

    def _gather(self, count: int) -> None:
        items = tuple(self._stack.pop() for _ in range(count))
        self._stack.append(items[::-1])

    def _append(self, argument: None) -> None:
        self._stack.pop()

    def _appends(self, argument: None) -> None:
        self._pop_marked()

    def _setitem(self, argument: None) -> None:
        self._gather(2)
        self._stack.pop()

    def _setitems(self, argument: None) -> None:
        self._pop_marked()

    def _binput(self, argument: int) -> None:
        self._memo[argument] = self._stack[-1]

    def _binget(self, argument: int) -> None:
        self._stack.append(self._memo[argument])

    _long_binput = _binput
    _long_binget = _binget

    def _global(self, argument: str) -> None:
        self._stack.append(_Name(argument))

    def _binpersid(self, argument: None) -> None:
        _, kind, key, _, num_items = self._stack.pop()
        module, _, name = kind.name.partition(" ")
        if not module.startswith("torch") or name not in _ITEM_BYTES:
            raise ValueError(f"it has a storage of an unknown kind, {kind.name!r}")
        if key not in self._storages:
            raise ValueError(f"it has no storage {key!r}")
        if type(num_items) is not int or num_items * _ITEM_BYTES[name] != self._storages[key]:
            found = f"{self._storages[key]} bytes"
            raise ValueError(f"storage {key!r} is said to have {num_items} elements, but has {found}")
        self._stack.append(_Storage(self._storages[key], _ITEM_BYTES[name]))

    def _reduce(self, argument: None) -> None:
        arguments = self._stack.pop()
        callee = self._stack.pop()
        self._stack.append(self._call(callee, arguments))

    def _newobj(self, argument: None) -> None:
        arguments = self._stack.pop()
        kind = self._stack.pop()
        if not isinstance(kind, _Name) or kind.name not in self._vouched:
            raise ValueError(_would_call(kind))
        self._stack.append(self._call(kind, arguments))

    def _build(self, argument: None) -> None:
        self._stack.pop()
        made = self._stack[-1]
        if not isinstance(made, _Made) or made.by not in _DICTS | self._vouched:
            raise ValueError("its pickle changes the inside of an object")

    def _call(self, callee: Any, arguments: Any) -> _Made:
        name = callee.name if isinstance(callee, _Name) else None
        if name == _SUBCLASS_MAKER:
            return self._call(arguments[0], arguments[2])
        if name in _TENSOR_MAKERS:
            storage, offset, size, stride = arguments[:4]
            item_bytes = _item_bytes(arguments[6]) if str(name).endswith("_v3") else storage.item_bytes
            _check_tensor(storage.num_bytes, item_bytes, offset, (size, stride))
        elif name not in _HARMLESS and name not in self._vouched:
            raise ValueError(_would_call(callee))
        return _Made(str(name))


def _would_call(callee: Any) -> str:
    name = callee.name.replace(" ", ".") if isinstance(callee, _Name) else type(callee).__name__
    return f"it would run code when loaded: it calls {name}"


def _vouched_names() -> set[str]:
    """Return what an experiment's own code has made torch trust."""
    named = [one if isinstance(one, tuple) else (one, None) for one in torch.serialization.get_safe_globals()]
    return {" ".join(name.rsplit(".", 1)) if name else f"{one.__module__} {one.__name__}" for one, name in named}


def _item_bytes(dtype: _Name) -> int:
    return int(getattr(torch, dtype.name.removeprefix("torch ")).itemsize)


def _check_tensor(num_bytes: int, item_bytes: int, offset: Any, geometry: tuple[Any, Any]) -> None:
    """Refuse a tensor that reaches beyond its storage, or repeats it beyond all sense."""
    size, stride = geometry
    is_known = all(_are_lengths(one) for one in (size, stride, (offset,)))
    if not is_known or len(size) != len(stride) or len(size) > _MAX_DIMENSIONS:
        raise ValueError("it has a tensor without a proper size or stride")
    num_items = math.prod(size)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if num_items and (last + 1) * item_bytes > num_bytes:
        raise ValueError(f"a tensor of shape {size} does not fit its storage of {num_bytes} bytes")
    if num_items > max(num_bytes // item_bytes, _MAX_REPEATED):
        raise ValueError(f"a tensor of shape {size} repeats its storage of {num_bytes} bytes too often")


def _are_lengths(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(one) is int and one >= 0 for one in value)
