"""The first example does what it promises."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.__main__ import main
from tests.support.running import run_process


def test_digits_learns_to_over_95_percent(tmp_path: Path) -> None:
    """Written by `new` and trained with two processes, the example finishes with over 95 % validation accuracy."""
    assert main(["new", "digits", "--data-home", str(tmp_path)]) == 0
    done = run_process(tmp_path, name="digits", nproc=2)
    assert done.returncode == 0, done.stderr
    status = json.loads((tmp_path / "experiment_results/digits/status.json").read_text())
    assert status["state"] == "finished"
    assert status["best"]["values"]["digit_accuracy"] > 0.95
    assert "weights: " in done.stdout
