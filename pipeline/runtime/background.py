"""Threads behind the training."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

_STEPS_BACK, _LEAST = 10, 19


def behind(name: str) -> ThreadPoolExecutor:
    """Return a thread for work behind the training, which gives way to it where there are not enough cores."""
    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_give_way)


def _give_way() -> None:
    # Elsewhere a thread has no priority of its own. Where it may not be changed, the work is done all the same.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, own, min(_LEAST, os.getpriority(os.PRIO_PROCESS, own) + _STEPS_BACK))
