"""Steps per second and memory, with all contenders alive and training in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from benchmarks.driver import AGAIN, EXACT, HAND_WRITTEN, PEERS, PIPELINE, Facts, play, table
from benchmarks.rows import Row, Spread, ratios
from benchmarks.turns import FUSED, Job
from benchmarks.work import KINDS

_LABELS = {
    "tiny": ("a  steps/s, tiny model", "≥ 0.95, ahead of all"),
    "convolutions": ("b  steps/s, convolutions", "≥ 0.99"),
    "compute": ("b  steps/s, 13 million weights", "≥ 0.99"),
    "many": ("c  steps/s, 8 datasets, 4 modules, 3 optimizers, 12 registers", "≥ 0.95"),
    "loading": ("d  steps/s, two loader workers at their limit", "≥ 0.97"),
}
KINDS_OF_WORK = tuple(_LABELS)


def measure(kind: str, rounds: int) -> list[Row]:
    """Return the rows of one kind of work."""
    names = [HAND_WRITTEN, PIPELINE, AGAIN, *((EXACT,) if kind != "loading" else ())]
    names += [] if kind == "many" else [FUSED, *PEERS]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Job(kind, name, folder, num_epochs=rounds + 2) for name in names]
        with table(jobs) as contenders:
            facts = play(contenders, rounds)
    return [_speed(kind, facts), _memory(kind, facts)]


def _speed(kind: str, facts: dict[str, Facts]) -> Row:
    label, goal = _LABELS[kind]
    by_hand = facts[HAND_WRITTEN]
    others = {name: own for name, own in facts.items() if name != HAND_WRITTEN}
    cells = {name: ratios(_column(by_hand, "seconds"), _column(own, "seconds")) for name, own in others.items()}
    by_cpu = {name: ratios(_column(by_hand, "cpu"), _column(own, "cpu")) for name, own in others.items()}
    steps = KINDS[kind].steps
    per_second = {name: Spread.of(steps / one["seconds"] for one in own).median for name, own in facts.items()}
    return Row(label, goal, cells, {"steps per second": per_second, "by CPU time": by_cpu})


def _memory(kind: str, facts: dict[str, Facts]) -> Row:
    by_hand = _column(facts[HAND_WRITTEN], "memory")
    cells = {name: ratios(_column(own, "memory"), by_hand) for name, own in facts.items() if name != HAND_WRITTEN}
    peaks = {name: Spread.of(_column(own, "memory")).median for name, own in facts.items()}
    return Row(f"h  peak memory, {kind}", "≤ 1.05", cells, {"MB": peaks})


def _column(facts: Facts, name: str) -> Sequence[float]:
    return [one[name] for one in facts]
