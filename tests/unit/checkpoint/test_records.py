"""Records survive as files and come back with the same bits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint.records import Records, npz_writer
from pipeline.experiment.settings.settings import LossRegister
from pipeline.system.disk import Writer

REGISTERS = (LossRegister("loss"), LossRegister("error", optimize=False, direction="max"))
RATES = {"main": {"trunk": 0.1, "head": 0.2}}


def add_step(records: Records, total: float, *, skipped: bool = False) -> None:
    """Record one step of two registers with three and four items."""
    records.add_step_rates({"main": {"trunk": total / 7, "head": 0.2}}, {"main": math.sqrt(total + 1)}, skipped)
    records.add_step_losses(np.asarray([total, total / 3]), [3, 4])


def recorded(*totals: float) -> Records:
    """Return records with one step per total."""
    records = Records(REGISTERS, RATES)
    for total in totals:
        add_step(records, total)
    return records


def write(folder: Path, files: dict[str, Writer]) -> None:
    """Write files as a commit would."""
    for name, writer in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            writer(file)


def steps_of(records: Records) -> dict[str, list[float]]:
    """Return every per-step column as plain numbers."""
    columns = {**records._columns(), **records._loss_columns()}
    return {name: values.tolist() for name, values in columns.items()}


def test_step_files_come_back_with_the_same_bits(tmp_path: Path) -> None:
    """Losses, items, rates and gradient norms of a finished epoch are what they were."""
    records, loaded = recorded(0.1, 2 / 3, 1e-300), Records(REGISTERS, RATES)
    write(tmp_path, records.step_files(4))
    loaded.load_step_files(tmp_path, 4)
    assert steps_of(loaded) == steps_of(records)


def test_step_files_open_with_numpy_alone(tmp_path: Path) -> None:
    """The files have the names and arrays that the documentation promises."""
    write(tmp_path, recorded(1.0, 2.0).step_files(7))
    with np.load(tmp_path / "loss_reg_data/train/loss/step_data_7.npz") as found:
        assert found["steps"].tolist() == [1, 2]
        assert found["totals"].tolist() == [1.0, 2.0]
        assert found["items"].tolist() == [3, 3]
    with np.load(tmp_path / "lr_data/main/step_data_7.npz") as found:
        assert set(found.files) == {"steps", "grad_norms", "lr_trunk", "lr_head"}


def test_epoch_files_come_back_with_the_same_bits(tmp_path: Path) -> None:
    """Every finished epoch of both splits survives."""
    records, loaded = recorded(0.1, 0.7), Records(REGISTERS, RATES)
    records.finish_train_epoch(1)
    for epoch in (0, 1):
        for record in records.losses["val"].values():
            record.add_epoch(epoch, math.pi / (epoch + 1), 5)
    write(tmp_path, records.epoch_files("train") | records.epoch_files("val"))
    loaded.load_epochs(tmp_path)
    records.forget_steps()
    assert loaded.losses == records.losses


def test_segments_together_are_the_running_epoch(tmp_path: Path) -> None:
    """Steps committed in pieces come back as one series, each step once."""
    records, loaded = recorded(1.0, 2.0), Records(REGISTERS, RATES)
    write(tmp_path, {"first.npz": records.segment(0)})
    add_step(records, 3.0)
    write(tmp_path, {"second.npz": records.segment(2)})
    for name in ("first.npz", "second.npz"):
        loaded.load_segment(tmp_path / name)
    assert loaded.num_steps == 3
    assert steps_of(loaded) == steps_of(records)


def test_skipped_step_survives_in_a_segment(tmp_path: Path) -> None:
    """A resumed epoch still knows which of its steps do not count."""
    records, loaded = recorded(1.0), Records(REGISTERS, RATES)
    add_step(records, math.inf, skipped=True)
    write(tmp_path, {"segment.npz": records.segment(0)})
    loaded.load_segment(tmp_path / "segment.npz")
    loaded.finish_train_epoch(1)
    assert loaded.losses["train"]["loss"].epoch_totals == [1.0]


def test_skipped_step_does_not_count_in_the_epoch() -> None:
    """The epoch's mean, total and items are those of the steps that were taken."""
    records = recorded(1.0)
    add_step(records, 100.0, skipped=True)
    add_step(records, 3.0)
    records.finish_train_epoch(1)
    record = records.losses["train"]["loss"]
    assert (record.epoch_totals, record.epoch_items) == ([4.0], [6])
    assert record.epoch_means == [pytest.approx(4 / 6)]


def test_skipped_step_is_shown_as_not_a_number() -> None:
    """A skipped step keeps its place in the series, without a value."""
    records = Records(REGISTERS, RATES)
    add_step(records, 100.0, skipped=True)
    assert math.isnan(records.losses["train"]["loss"].step_means[0])
    assert records.losses["train"]["loss"].step_items.tolist() == [3]


def test_epoch_of_skipped_steps_has_no_mean() -> None:
    """If nothing counted there is no value, rather than zero."""
    records = Records(REGISTERS, RATES)
    add_step(records, 1.0, skipped=True)
    records.finish_train_epoch(1)
    assert math.isnan(records.losses["train"]["loss"].epoch_means[0])
    assert records.losses["train"]["loss"].epoch_items == [0]


def test_forgetting_steps_keeps_epochs() -> None:
    """A new epoch begins with no steps and all earlier epochs."""
    records = recorded(1.0, 2.0)
    records.finish_train_epoch(1)
    records.forget_steps()
    assert records.num_steps == 0
    assert all(values == [] for values in steps_of(records).values())
    assert records.losses["train"]["loss"].epochs == [1]


def test_direction_and_purpose_of_a_register_are_kept() -> None:
    """Records tell which registers are optimised and which way is better."""
    record = Records(REGISTERS, RATES).losses["val"]["error"]
    assert (record.optimize, record.direction) == (False, "max")


def test_file_shows_the_moment_its_writer_was_made(tmp_path: Path) -> None:
    """A commit written in the background is not changed by later steps."""
    values = np.asarray([1.0, 2.0])
    writer = npz_writer({"x": values})
    values[0] = 9.0
    write(tmp_path, {"x.npz": writer})
    with np.load(tmp_path / "x.npz") as found:
        assert found["x"].tolist() == [1.0, 2.0]


def test_group_that_is_added_has_a_column_from_then_on(tmp_path: Path) -> None:
    """Steps before have NaN; segments, also such as begin before it, and step files bring the same columns back."""
    records, loaded = recorded(0.1), Records(REGISTERS, RATES)
    write(tmp_path, {"1.npz": records.segment(0)})
    for rate in (0.3, 0.4):
        records.add_step_rates({"main": {"trunk": 0.1, "head": 0.2, "late": rate}}, {"main": 1.0}, False)
        records.add_step_losses(np.asarray([1.0, 2.0]), [3, 4])
    write(tmp_path, {"2.npz": records.segment(1), **records.step_files(2)})
    for name in ("1.npz", "2.npz"):
        loaded.load_segment(tmp_path / name)
    expected = steps_of(records)
    np.testing.assert_array_equal(expected["lr/main/late"], [math.nan, 0.3, 0.4])
    assert list(steps_of(loaded)) == list(expected)
    np.testing.assert_equal(steps_of(loaded), expected)
    resumed = Records(REGISTERS, RATES)
    resumed.load_step_files(tmp_path, 2)
    np.testing.assert_equal(steps_of(resumed), expected)


def test_epoch_before_a_group_was_added_can_be_read_again(tmp_path: Path) -> None:
    """Its steps have no rate of the group, in records that know it."""
    records = recorded(0.1, 0.2)
    write(tmp_path, records.step_files(1))
    records.forget_steps()
    records.add_step_rates({"main": {"trunk": 0.1, "head": 0.2, "late": 0.3}}, {"main": 1.0}, False)
    earlier = Records(REGISTERS, RATES)
    earlier.rates = records.rates
    earlier.forget_steps()
    earlier.load_step_files(tmp_path, 1)
    assert np.isnan(earlier.rates["main"]["late"]).tolist() == [True, True]
