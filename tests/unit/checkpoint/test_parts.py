"""The table of persisted parts: what is kept in memory to be written, and in how many segments steps are written."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import nn

from pipeline.checkpoint.parts import Moment, PersistedParts, RunValue, TensorPart
from pipeline.checkpoint.snapshots import Snapshots


def parts_of(records: SimpleNamespace, components: Any = None) -> PersistedParts:
    training = SimpleNamespace(checkpoint_in_background=components is not None, shards_modules=False)
    settings = SimpleNamespace(training=training, register_names=())
    experiment = SimpleNamespace(components=components, settings=settings, optimizers={}, schedulers={})
    return PersistedParts(experiment, records)  # type: ignore[arg-type]


def test_copies_of_frozen_weights_go_with_the_first_commit() -> None:
    """What never changes is written once; a second copy of a large frozen module is not kept in memory."""
    policy = SimpleNamespace(save=print)
    policies = dict.fromkeys(("early_stopper", "checkpoint_saver", "loss_weighter"), policy)
    modules = {"frozen_modules": {"f": nn.Linear(2, 2)}, "changing_modules": {"t": nn.Linear(2, 2)}}
    components = SimpleNamespace(data_counters={}, averages={}, modules={}, hooks={}, **modules, **policies)
    taken: list[ref[torch.Tensor]] = []
    parts = parts_of(SimpleNamespace(epoch_files=lambda split: {}), components)
    changes = parts.initial_state()
    for writer in changes.files.values():
        (held,) = writer.args  # type: ignore[attr-defined]
        taken += [ref(tensor) for tensor in held.values()]
    del changes, writer, held
    assert [tensor() is None for tensor in taken] == [True, True, False, False]


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


def test_two_modules_of_one_name_have_copies_of_their_own() -> None:
    """An average of a module's weights has the same keys and shapes, and both go into one commit."""
    snapshots = Snapshots(copies=True)
    module, average = nn.Linear(2, 2), nn.Linear(2, 2)
    writers = [snapshots.take("module net", owner)[0] for owner in (module, average)]
    for writer, owner in zip(writers, (module, average), strict=True):
        file = io.BytesIO()
        writer(file)
        file.seek(0)
        assert torch.equal(torch.load(file)["weight"], owner.weight)


def test_tensors_that_follow_an_evaluation_are_part_of_its_commit() -> None:
    """A row that is written after evaluations is committed there, restored by a resume and compared over ranks."""
    module = nn.Linear(2, 2)
    policies = dict.fromkeys(("early_stopper", "checkpoint_saver"), SimpleNamespace(save=print))
    weighter = SimpleNamespace(save=print, get_loss_weight=lambda name: 1.0)
    modules = {"frozen_modules": {}, "changing_modules": {}, "all_modules": {}}
    components = SimpleNamespace(data_counters={}, averages={}, hooks={}, loss_weighter=weighter, **modules, **policies)
    records = SimpleNamespace(losses={"val": {}}, epoch_files=lambda split: {})
    parts = parts_of(records, components)
    path = "module_ckps/swa/net.pt"
    parts._tensor_parts.append(TensorPart(path, module, frozenset({Moment.AFTER_EVALUATION}), has_default=True))
    changes = parts.evaluated_epoch(1, [], [])
    assert list(changes.files) == [path]
    assert not changes.is_partial
    assert parts.is_needed(path)
    assert parts.modules() == {path: module}


def test_value_that_earlier_commits_lack_is_loaded_as_what_they_meant() -> None:
    """Results from before a value was committed are judged by it all the same."""
    loaded = list[int]()
    parts = parts_of(SimpleNamespace())
    parts.run_values = [RunValue("plan_version", int, loaded.append, missing=1)]
    parts.load_run_values({})
    parts.load_run_values({"plan_version": 2})
    assert loaded == [1, 2]
