"""What a feature costs here and in a hand-written loop: each with and without it, training in turn."""

from __future__ import annotations

import tempfile

from benchmarks.driver import FUSED_WITH, PIPELINE, PIPELINE_WITH, Facts, play, table
from benchmarks.rows import Row, Spread
from benchmarks.turns import FUSED, Job

_LABELS = {
    "tokens": "j  cost of means over tokens that the data counts",
    "metrics": "k  cost of three metrics in an evaluation",
    "turns": "n  cost of two turns over the same batches (GAN)",
    "average": "l  cost of an EMA, convolutions",
    "rows": "m  cost of a loss over all rows of a step, convolutions",
}
FEATURES = tuple(_LABELS)
# A process may be a tenth faster than another that does the same, for all its life: each is started several times.
_NUM_TABLES = 3


def measure(kind: str, rounds: int) -> list[Row]:
    """Return the row of one feature: its cost here, in units of its cost in the hand-written loop."""
    names = [FUSED, FUSED_WITH, PIPELINE, PIPELINE_WITH]
    facts: dict[str, Facts] = {name: [] for name in names}
    for _ in range(_NUM_TABLES):
        found = _measure_once(kind, names, max(2, rounds // _NUM_TABLES))
        for name in names:
            facts[name] += found[name]
    rows = []
    for column, unit in {"seconds": "", "cpu": ", CPU time"}.items():
        by_hand = _cost(facts[FUSED_WITH], facts[FUSED], column)
        ours = _cost(facts[PIPELINE_WITH], facts[PIPELINE], column)
        ratio = Spread.of(one / other for one, other in zip(ours, by_hand, strict=True))
        cells = {PIPELINE: ratio, FUSED: f"with / without: {Spread.of(by_hand)}; ours: {Spread.of(ours)}"}
        rows.append(Row(f"{_LABELS[kind]}{unit}", "≤ 1.05", cells))
    return rows


def _measure_once(kind: str, names: list[str], rounds: int) -> dict[str, Facts]:
    """Return what each contender reports of some epochs, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Job(kind, name, folder, num_epochs=rounds + 2) for name in names]
        with table(jobs) as contenders:
            # What one commits behind its epoch must not be paid for by the next.
            return play(contenders, rounds, settles=True)


def _cost(with_it: Facts, without_it: Facts, column: str) -> list[float]:
    return [one[column] / other[column] for one, other in zip(with_it, without_it, strict=True)]
