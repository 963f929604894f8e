"""Seeding: every random draw is a function of a key, not of earlier draws.

Generators are seeded from ``(seed, purpose, epoch, …)`` wherever random numbers may be drawn. A resumed run therefore
has no generator to restore, and neither the number of processes nor of loader workers changes a draw.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Hashable

import numpy as np
import torch

from pipeline.system.accelerators import seed_accelerator


def seed_generators(*key: Hashable) -> None:
    """Seed the global generators of python, numpy and torch from ``key``."""
    # This derivation must never change: a resumed experiment must draw what its first start would have drawn. ``repr``
    # keeps 1 and "1" apart. A hash keeps neighbouring epochs uncorrelated.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=20).digest()
    # Each library gets bytes of its own, so that their draws are unrelated. 63 bits fit into a signed integer.
    torch_seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(int.from_bytes(digest[8:16], "little"))
    # numpy's global generator takes 32 bits.
    np.random.seed(int.from_bytes(digest[16:], "little"))
    # Not torch.manual_seed: it also asks every accelerator library whether it is there, which takes 100 times as long.
    torch.default_generator.manual_seed(torch_seed)
    seed_accelerator(torch_seed)


def keyed_permutation(size: int, *key: Hashable) -> np.ndarray:
    """Return the permutation of ``range(size)`` that belongs to ``key``, without using a global generator."""
    # As above, this must never change: it decides the order of the points in an epoch.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).permutation(size)


def set_deterministic() -> None:
    """Make torch use deterministic kernels, and raise for an operation that has none."""
    # cuBLAS is deterministic only with a fixed workspace, and torch refuses to use it otherwise. The user's value wins.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Benchmarking chooses kernels by their time, which differs between runs.
    torch.backends.cudnn.benchmark = False
