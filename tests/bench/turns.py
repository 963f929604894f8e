"""Turns: contenders stay alive and train one epoch each in turn, so that the machine's moods hit all alike."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path


class Turn:
    """This contender's place at the table; ``BENCH_FOLDER`` and ``BENCH_NAME`` say where and who."""

    def __init__(self) -> None:
        self._folder, self._name = Path(os.environ["BENCH_FOLDER"]), os.environ["BENCH_NAME"]
        self._is_rank_zero = os.environ.get("RANK", "0") == "0"

    def wait(self) -> None:
        """Return when it is this contender's turn."""
        if self._is_rank_zero:
            (self._folder / f"{self._name}.ready").touch()
        while self._current() != self._name:
            time.sleep(0.02)
        self._started, self._cpu = time.perf_counter(), time.process_time()

    def _current(self) -> str:
        try:
            return (self._folder / "turn").read_text()
        except FileNotFoundError:
            return ""

    def done(self) -> None:
        """Report this epoch's time."""
        if not self._is_rank_zero:
            time.sleep(0.01)
            return
        facts = {
            "seconds": time.perf_counter() - self._started,
            "cpu": time.process_time() - self._cpu,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
        (self._folder / "turn").unlink()
        with (self._folder / f"{self._name}.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")
