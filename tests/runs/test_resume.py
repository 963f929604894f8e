"""Kill it anywhere, run it again, and it ends with the same bits."""

from __future__ import annotations

from pathlib import Path

from pipeline.store.compare import first_difference
from tests.support.experiments import write_experiment
from tests.support.running import run_inside


def test_stopping_after_each_epoch_gives_the_same_bits(tmp_path: Path) -> None:
    """An experiment stopped after every epoch and resumed ends like one that never stopped."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for home in (whole, parts):
        write_experiment(home)
    assert run_inside(whole).is_finished
    assert not run_inside(parts, "--stop-after-epoch", "0").is_finished
    assert not run_inside(parts, "--resume", "--stop-after-epoch", "1").is_finished
    assert run_inside(parts, "--resume").is_finished
    results = "experiment_results/tiny/data"
    assert first_difference(whole / results, parts / results) is None


def test_modules_may_be_used_first_in_a_later_step(home: Path) -> None:
    """Steps of one dataset alone leave the modules of others without gradients, and momentum without a beginning."""
    assert run_inside(home, "--set", "data_loading.step_min_items=4").is_finished
