"""TensorBoard shows one clean series however often a run was killed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.results.comparison import read_any
from tests.crash.campaign import survive_kills
from tests.crash.experiment import NUM_EPOCHS as EPOCHS
from tests.crash.experiment import NUM_STEPS as STEPS
from tests.crash.experiment import prepare


@pytest.mark.slow
def test_killed_runs_leave_no_point_twice_and_none_out(tmp_path: Path) -> None:
    """After several kills, every step and epoch is there once, with the values that were recorded."""
    prepare(tmp_path)
    settings = tmp_path / "experiment_settings/tiny/settings/logging.json"
    settings.write_text('{"progress_bar": {"enabled": false}, "tensorboard": {"enabled": true}}')
    assert len(list(survive_kills(tmp_path, 1, 2, seed=8))) == 2
    events = EventAccumulator(str(tmp_path / "experiment_logs/tiny/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    data = tmp_path / "experiment_results/tiny/data"
    steps = [event.step for event in events.Scalars("train_steps/loss_a")]
    assert steps == list(range(1, STEPS * EPOCHS + 1))
    recorded = [read_any(data / f"loss_reg_data/train/loss_a/step_data_{n}.npz")["means"] for n in range(1, EPOCHS + 1)]
    shown = [event.value for event in events.Scalars("train_steps/loss_a")]
    np.testing.assert_array_equal(np.float32(shown), np.float32(np.concatenate(recorded)))
    assert [event.step for event in events.Scalars("val/loss_a")] == [STEPS * epoch for epoch in range(EPOCHS + 1)]
    assert len(events.Scalars("lr/trunk/trunk")) == len(events.Scalars("grad_norm/trunk")) == STEPS * EPOCHS
