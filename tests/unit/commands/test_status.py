"""The verb `status`."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path

import pytest

from pipeline.commands.status import EXIT_CODES
from pipeline.monitoring.journal import END, Journal
from pipeline.paths import ExperimentPaths
from pipeline.store.lock import RunLock
from tests.support.experiments import tree, write_experiment
from tests.support.running import run_inside
from tests.support.verbs import call, held


def test_status_follows_an_experiment(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """New, unfinished and finished are told in words and by exit code."""
    assert call(home, "status", "--exit-code") == EXIT_CODES["new"]
    run_inside(home, "--stop-after-epoch", "1")
    assert call(home, "status", "tiny", "--exit-code") == EXIT_CODES["unfinished"]
    assert "epoch 2, training, step 0" in capsys.readouterr().out
    run_inside(home, "--resume")
    assert call(home, "status", "tiny", "--exit-code") == 0
    assert "best (epoch 3)" in capsys.readouterr().out


def test_status_as_json_is_for_scripts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON holds state, committed place and latest values."""
    run_inside(home, "--stop-after-epoch", "0")
    capsys.readouterr()
    call(home, "status", "--json")
    found = json.loads(capsys.readouterr().out)["tiny"]
    assert found["state"] == "unfinished"
    assert found["committed"] == {"epoch": 1, "stage": "training", "step": 0}
    assert set(found["last"]) == {"loss_a", "loss_b", "error"}


def test_status_leaves_everything_alone(home: Path) -> None:
    """Looking changes no byte and no time stamp."""
    run_inside(home, "--stop-after-epoch", "0")
    before = tree(home)
    call(home, "status", "tiny")
    assert tree(home) == before


@pytest.fixture
def paths(begun: Path) -> ExperimentPaths:
    """The tiny experiment, stopped after one epoch."""
    return ExperimentPaths(begun, "tiny")


def test_status_shows_the_course_of_every_register(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Each register has its last value, a sparkline and its value in the best epoch."""
    capsys.readouterr()
    call(paths.home, "status", "tiny")
    text = capsys.readouterr().out
    assert "last" in text
    assert "best (epoch" in text
    line = next(line for line in text.splitlines() if line.startswith("  loss_a"))
    assert len(line.split()[2]) == 2
    assert "stopped: epoch 1 is complete" in text


def test_status_of_a_live_run_tells_owner_and_sign_of_life(
    paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """While someone holds the experiment, status says who and since when, and that it lives."""
    lock = RunLock(paths)
    lock.acquire()
    capsys.readouterr()
    assert call(paths.home, "status", "tiny", "--exit-code") == EXIT_CODES["running"]
    text = capsys.readouterr().out
    assert "running    pid" in text
    assert "last heartbeat 0 s ago" in text
    lock.release()


def test_run_on_another_machine_is_seen_by_its_signs_of_life(paths: ExperimentPaths) -> None:
    """Where the lock of another machine is not seen, a fresh heartbeat tells that a run is alive."""
    claim = paths.temp_data / "claim_elsewhere"
    claim.mkdir()
    (claim / "beat").write_text("000000000001")
    paths.lock_file.write_text(json.dumps({"host": "elsewhere", "pid": 7}))
    assert call(paths.home, "status", "tiny", "--exit-code") == EXIT_CODES["running"]


def test_watch_ends_with_the_run(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Watching shows the run again and again, and ends once none is alive."""
    capsys.readouterr()
    with held(paths, partial(time.sleep, 1)):
        assert call(paths.home, "status", "tiny", "--watch", "0.1", "--exit-code") == EXIT_CODES["unfinished"]
    text = capsys.readouterr().out
    assert text.count("tiny: running") >= 2
    assert text.count("tiny: stopped since ") == 1


@pytest.mark.parametrize("columns", [80, 120])
def test_status_fits_the_terminal(
    paths: ExperimentPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """No line wraps, and nothing moves a cursor or changes a colour."""
    monkeypatch.setenv("COLUMNS", str(columns))
    capsys.readouterr()
    call(paths.home, "status", "tiny")
    call(paths.home, "status")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert not {"\r", "\033"} & set(text)


def test_damaged_files_do_not_keep_status_from_answering(
    paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    """A status file, journal or list of starts that cannot be read is left out, not a reason to fail."""
    paths.status_file.write_text("{")
    paths.journal_file.write_text("}{\n[]\n")
    next(paths.generations.rglob("val/*/epoch_data.npz")).write_bytes(b"no archive")
    assert call(paths.home, "status", "tiny") == 0
    assert "ended      unknown" in capsys.readouterr().out


def test_unknown_experiment_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt name ends with exit code 2 and the nearest match."""
    assert call(home, "status", "tinny") == 2
    assert "Did you mean 'tiny'?" in capsys.readouterr().err


def test_list_tells_how_runs_have_ended(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped, failed, killed and finished are told apart, with since when; --failed and --sort choose and order."""
    broken: dict[str, str | None] = {"pymodules/module_transforms/b.py": FAILING}
    for name, files in (("failed", broken), ("stopped", {}), ("done", {})):
        write_experiment(home, name, files=files)
    run_inside(home, "--stop-after-epoch", "1", name="stopped")
    run_inside(home, name="done")
    with pytest.raises(ValueError, match="boom"):
        run_inside(home, name="failed")
    capsys.readouterr()
    assert call(home, "status") == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert {name: lines[name][1] for name in ("done", "failed", "stopped", "tiny")} == {
        "done": "finished",
        "failed": "failed",
        "stopped": "stopped",
        "tiny": "new",
    }
    assert re.fullmatch(r"\d\d-\d\d", lines["failed"][2])
    assert call(home, "status", "--failed") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["experiment", "failed"]
    assert call(home, "status", "--sort", "error") == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    best = [json.loads((home / f"experiment_results/{name}/status.json").read_text())["best"] for name in names[:-1]]
    errors = [epoch["values"]["error"] for epoch in best]
    # The lowest error first; what has none yet comes last.
    assert errors == sorted(errors)
    assert names[-1] == "tiny"


FAILING = """
    from . import a

    loss_registers = ["loss_b", "error"]


    class ModuleTransform(a.ModuleTransform):
        head = "head_b"
        register = "loss_b"

        def __call__(self, batch, modules):
            if modules["trunk"].training:
                raise ValueError("boom")
            return super().__call__(batch, modules)
"""


def test_failed_run_is_shown_by_its_reason(paths: ExperimentPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback says at its end what happened, a message of ours at its beginning; the log is shown without them."""
    with paths.log_file.open("a") as log:
        log.write("2026-01-01 00:00:00,000 - tiny - ERROR - rank 0 failed:\nTraceback:\n    ^^^^\nValueError: boom\n")
    for error, reason in (
        ('  File "a.py", line 1, in x\n    y\nValueError: boom\n', "ValueError: boom"),
        ("4 steps in a row are bad.\n  fix: try\n    training-pipeline train tiny", "4 steps in a row are bad."),
    ):
        paths.journal_file.unlink()
        journal = Journal(paths.journal_file, 0)
        journal.start = 1
        journal.note(END, outcome="failed", error=error)
        capsys.readouterr()
        assert call(paths.home, "status", "tiny") == 0
        shown = capsys.readouterr().out
        assert f"  ended      failed: {reason}\n" in shown
        assert "rank 0 failed:" in shown
        assert "^^^^" not in shown
