"""The table of persisted parts: steps of a long epoch are kept in few segments, each written seldom."""

from __future__ import annotations

from types import SimpleNamespace

from pipeline.experiment.persisted import PersistedParts


def parts_of(records: SimpleNamespace) -> PersistedParts:
    training = SimpleNamespace(checkpoint_in_background=False, parallelism="ddp")
    experiment = SimpleNamespace(components=None, settings=SimpleNamespace(training=training))
    return PersistedParts(experiment, records)  # type: ignore[arg-type]


def test_long_epoch_has_few_segments_that_cover_all_steps() -> None:
    """After ten thousand commits there are some ten segments, without gap or overlap."""
    records = SimpleNamespace(num_steps=0)
    parts, present, written = parts_of(records), dict[int, int](), 0
    for _ in range(10_000):
        records.num_steps += 3
        first, removed = parts._next_segment()
        for path in removed:
            del present[int(path.removeprefix("running/steps_").removesuffix(".npz"))]
        present[first] = records.num_steps - first
        written += present[first]
        starts = sorted(present)
        assert starts[0] == 0
        assert all(
            one + present[one] == other for one, other in zip(starts, [*starts[1:], records.num_steps], strict=True)
        )
    assert len(present) <= 15
    assert written < 16 * records.num_steps
