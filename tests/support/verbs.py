"""Calling helper verbs the way a shell does, and runs for them to look at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.__main__ import main
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import RunLock


def call(home: Path, *words: str) -> int:
    """Run a verb in this process and return its exit code; ``--data-home`` goes before what stands behind ``--``."""
    own, dashes, flags = _parted(list(words))
    return main([*own, "--data-home", str(home), *dashes, *flags])


def _parted(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    if "--" not in words:
        return words, [], []
    place = words.index("--")
    return words[:place], ["--"], words[place + 1 :]


@contextmanager
def held(paths: ExperimentPaths, meanwhile: Callable[[], None]) -> Iterator[None]:
    """Hold an experiment as a live run does, until ``meanwhile`` returns."""
    is_held = threading.Event()

    def live() -> None:
        # A lock belongs to the thread that took it.
        lock = RunLock(paths)
        lock.acquire()
        is_held.set()
        meanwhile()
        lock.release()

    thread = threading.Thread(target=live)
    thread.start()
    is_held.wait()
    yield
    thread.join()
