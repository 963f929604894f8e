"""Fingerprints of values: the same bits give the same fingerprint, in any process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from pipeline.serialization.shard_index import local_part

_MAX_DEPTH = 12


def fingerprint(value: object) -> str:
    """Return a digest of nested containers, arrays, tensors, generators and plain values.

    The order of dicts and sets counts, because it decides what a program does with them. Of other objects only
    the type counts: they may hold addresses that differ in every process.
    """
    sha = hashlib.sha256()
    for part in _parts(value, 0):
        sha.update(part)
    return sha.hexdigest()[:32]


def _parts(value: object, depth: int) -> Iterator[bytes]:
    kind = type(value).__name__.encode()
    if depth > _MAX_DEPTH:
        yield b"deep"
    elif isinstance(value, torch.Tensor):
        yield kind + repr((str(value.dtype), tuple(value.shape))).encode()
        tensor = local_part(value)
        # Sparse and meta tensors have no bytes that could be read here.
        if tensor.layout is torch.strided and not tensor.is_meta:
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        yield kind + repr((array.dtype.str, array.shape)).encode()
        # The bytes of an array of objects are addresses.
        yield from _parts(array.tolist(), depth + 1) if array.dtype.hasobject else [array.tobytes()]
    elif isinstance(value, dict):
        yield kind + b"{"
        for key, child in value.items():
            yield from _parts(key, depth + 1)
            yield from _parts(child, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield kind + b"["
        for child in value:
            yield from _parts(child, depth + 1)
        yield b"]"
    else:
        yield kind + _plain_bytes(value)


def _plain_bytes(value: object) -> bytes:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, range, slice, type(Ellipsis))):
        return repr(value).encode()
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False)).encode()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    return b""
