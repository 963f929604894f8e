"""Randomness without history: every draw is a function of a key.

Generators are seeded from (seed, what, epoch, …) wherever random numbers may be drawn, so a resumed
run has nothing to restore, and neither the number of processes nor of loader workers changes a draw.
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
    """Set the global generators of python, numpy and torch to the state that belongs to ``key``."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=20).digest()
    torch_seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(int.from_bytes(digest[8:16], "little"))
    np.random.seed(int.from_bytes(digest[16:], "little"))
    # torch.manual_seed also asks every accelerator library whether it is there, which costs 100 times as much.
    torch.default_generator.manual_seed(torch_seed)
    seed_accelerator(torch_seed)


def keyed_permutation(size: int, *key: Hashable) -> np.ndarray:
    """Return the permutation of ``range(size)`` that belongs to ``key``, touching no global generator."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).permutation(size)


def set_deterministic() -> None:
    """Make torch choose deterministic kernels, or say which operation has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
