"""What is left on the disk after ten epochs whose best, last and periodic weights are kept."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.driver import PEERS, PIPELINE, Contender, table
from benchmarks.rows import Row
from benchmarks.turns import Job

_NUM_EPOCHS = 10


def measure(rounds: int) -> list[Row]:
    """Return the rows of bytes; one round tells it all."""
    return [_row("each one", 1, "≤ 0.40"), _row("every second", 2, "")]


def _row(which: str, period: int, goal: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Job("pools", name, folder, _NUM_EPOCHS, pool_period=period) for name in (PIPELINE, *PEERS)]
        with table(jobs) as contenders:
            used = {name: _bytes_left(contender) for name, contender in contenders.items()}
    of = used.get("lightning", used[PIPELINE])
    label = f"g  bytes on disk after ten epochs, best and {which} kept, of Lightning's"
    cells = {name: f"{one / of:.2f}" for name, one in used.items()}
    return Row(label, goal, cells, {"MB": {name: round(one / 1e6, 1) for name, one in used.items()}})


def _bytes_left(contender: Contender) -> int:
    for _ in range(_NUM_EPOCHS):
        contender.take_turn()
    contender.wait()
    job = contender.job
    top = job.saved if job.name != PIPELINE else Path(job.folder) / "experiment_results" / job.name
    # A file with two names is there once.
    sizes = {one.stat().st_ino: one.stat().st_blocks * 512 for one in top.rglob("*") if one.is_file()}
    return sum(sizes.values())
