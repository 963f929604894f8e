"""Every run leaves a page, however it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.__main__ import main
from tests.support.experiments import FILES, write_experiment
from tests.support.running import BackgroundRun, run_inside, run_process

FAILS_ON_RANK_ONE = """
    import os

    from . import a

    loss_registers = ["loss_b", "error"]


    class ModuleTransform(a.ModuleTransform):
        head = "head_b"
        register = "loss_b"

        def __call__(self, batch, modules):
            if os.environ.get("RANK") == "1":
                raise ValueError("<b>rank one is done</b>")
            return super().__call__(batch, modules)
"""
LONG = FILES["pymodules/early_stopper.py"].replace("max_epochs=3", "max_epochs=1000")


def told(home: Path) -> dict[str, Any]:
    text = (home / "experiment_logs/tiny/report.html").read_text()
    found = re.findall(r'<script id="stories" type="application/json">(.*?)</script>', text)
    story: dict[str, Any] = json.loads(found[0])["stories"][0]
    return story


def test_stopped_and_finished_runs_leave_a_page(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last lines name it, and it tells the end of the very run that wrote it."""
    run_inside(home, "--stop-after-epoch", "1")
    assert f"report: {home / 'experiment_logs/tiny/report.html'}" in capsys.readouterr().out
    assert told(home)["state"] == "stopped"
    run_inside(home, "--resume")
    assert told(home)["state"] == "finished"


def test_failed_run_leaves_a_page_with_the_cause(home: Path) -> None:
    """Whichever process failed, rank zero writes the page, and the cause stands first."""
    write_experiment(home, files={"pymodules/module_transforms/b.py": FAILS_ON_RANK_ONE})
    done = run_process(home, nproc=2)
    assert done.returncode != 0
    assert f"report: {home / 'experiment_logs/tiny/report.html'}" in done.stdout
    story = told(home)
    assert story["state"] == "failed"
    assert story["errors"][0]["rank"] == 1
    assert "ValueError: <b>rank one is done</b>" in story["errors"][0]["error"]


def test_live_and_killed_runs_are_told_apart(home: Path) -> None:
    """While a run is alive the verb tells where it is; after a kill, that it was killed."""
    write_experiment(home, files={"pymodules/early_stopper.py": LONG})
    with BackgroundRun(home) as run:
        run.wait_for(lambda: "Epoch(val) [2]" in run.text())
        assert main(["report", "tiny", "--data-home", str(home)]) == 0
        story = told(home)
        assert story["state"] == "running"
        assert story["now"]["owner"]["pid"] == run.process.pid
    assert main(["report", "tiny", "--data-home", str(home)]) == 0
    assert told(home)["state"] == "killed"
