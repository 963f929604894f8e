"""The first and the last lines of a run tell what a person wants to know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.components import LossRecord
from pipeline.distributed.processes import Processes
from pipeline.errors import StateConflict
from pipeline.experiment.assembly import assemble, read_checked_contents
from pipeline.experiment.settings.settings import parse_settings
from pipeline.paths import ExperimentPaths
from pipeline.progress import FINISHED, TRAINING, Progress
from pipeline.system.disk import Disk
from pipeline.system.formatting import shown_values
from pipeline.tracking.startup_summary import WARNING_MARK, change_lines, first_block, latest_values, next_line
from tests.support.experiments import write_experiment
from tests.support.running import run_inside

GPU = torch.device("cuda", 0)


def test_first_lines_introduce_the_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Version, processes, data home, state, modules, rates, disk, steps and exactness are told."""
    run_inside(home, "--stop-after-epoch", "0")
    text = capsys.readouterr().out
    expected = (
        "training pipeline",
        "processes: 1 on cpu",
        f"data home: {home}",
        "state: new run",
        "learning rates of heads: heads 2.000e-02",
        "dataset a: train 40, val 10 points, batches of 4",
    )
    for words in (*expected, "module stem: 54 parameters, 0 trained", "disk:", "steps:", "resume: bit-exact"):
        assert words in text


def block(home: Path, processes: Processes, doubt: str = "", **training: object) -> list[str]:
    """Return the first lines of the tiny experiment on processes that need not exist."""
    write_experiment(home, training=training)
    paths = ExperimentPaths(home, "tiny")
    paths.results.mkdir(parents=True, exist_ok=True)
    settings = parse_settings(read_checked_contents(paths.settings, ()))
    experiment = assemble(paths.settings / "pymodules", settings, torch.device("cpu"))
    return list(first_block(paths, processes, experiment, "new run", doubt))


@pytest.mark.parametrize(
    ("processes", "training", "expected"),
    [
        (Processes(), {}, "bit-exact with 1 process × 1 thread; otherwise equal up to rounding"),
        (Processes(), {"gradient_reduction": "exact"}, "bit-exact with any number of processes × 1 thread"),
        (
            Processes(device=GPU),
            {},
            "equal up to rounding; set deterministic: true for bit-exact resumes on a GPU",
        ),
        (
            Processes(device=GPU),
            {"deterministic": True},
            "bit-exact with 1 process × 1 thread; otherwise equal up to rounding",
        ),
        (Processes(device=GPU), {"gradient_reduction": "exact"}, "bit-exact with any number of processes × 1 thread"),
    ],
    ids=["fast", "exact", "GPU", "deterministic GPU", "exact GPU"],
)
def test_resume_line_claims_what_holds(
    tmp_path: Path,
    processes: Processes,
    training: dict[str, object],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, bits are promised only with deterministic kernels."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert block(tmp_path, processes, **training)[-1] == f"resume: {expected}"


def test_resume_line_says_what_stands_against_the_claim(tmp_path: Path) -> None:
    """A doubt replaces the claim, on a CPU and on a GPU with deterministic kernels."""
    doubt = "not bit-exact: threads 1 → 2 (first start → now); bits may differ from epoch 2, step 1 on"
    for processes in (Processes(), Processes(device=GPU)):
        assert block(tmp_path, processes, doubt, deterministic=True)[-1] == f"resume: {doubt}"


def test_implied_deterministic_kernels_are_said(tmp_path: Path) -> None:
    """Only where they were not asked for, because an operation without one then raises an error."""
    said = "deterministic kernels: on, implied by gradient_reduction: exact on a GPU"
    assert said in block(tmp_path, Processes(device=GPU), gradient_reduction="exact")
    assert said not in block(tmp_path, Processes(device=GPU), gradient_reduction="exact", deterministic=True)
    assert said not in block(tmp_path, Processes(), gradient_reduction="exact")


def test_change_that_bits_depend_on_is_one_warning() -> None:
    """It names both values and the first step that may differ."""
    lines = list(change_lines(["threads 1 → 2", "mkl a → b"], [], "not bit-exact: …", Progress(TRAINING, 2, 3)))
    assert lines == [
        f"{WARNING_MARK}Changed since the last start: threads 1 → 2, mkl a → b. Training continues; from epoch 2, "
        "step 4 on, bits may differ from those of an uninterrupted run, by rounding."
    ]


def test_change_without_influence_is_no_warning() -> None:
    """Processes of an exact run are one such; what a start ran on whose work is lost is another."""
    (line,) = change_lines([], ["world_size 1 → 2"], "", Progress(TRAINING, 2))
    assert line.startswith("Changed since the last start: world_size 1 → 2. This does not change any bits")
    (line,) = change_lines(["threads 2 → 1"], [], "", Progress(TRAINING, 2))
    assert line.startswith("Changed since the last start: threads 2 → 1. No bits depend on it")


def test_disk_that_may_fill_up_is_a_warning_at_the_start(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Less free space than the estimate is told with both numbers and the folder, before any training."""
    monkeypatch.setattr(Disk, "free_bytes", lambda self, path: 3000)
    monkeypatch.setattr(Disk, "check_room", lambda self, path, num_bytes: None)
    run_inside(home, "--stop-after-epoch", "0")
    said = f"WARNING - {home / 'experiment_results/tiny'} may fill its disk: about 3.6 kB are needed and 3.0 kB"
    text = capsys.readouterr().out
    assert text.index(said) < text.index("Epoch(val) [0]")


def test_last_lines_tell_where_everything_is(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outcome, best epoch, weights, log and what to do next are told."""
    run_inside(home)
    text = capsys.readouterr().out
    for words in ("finished after", "best: epoch", "module_ckps/best", "train.log", "new VARIANT --from tiny"):
        assert words in text


def test_stopped_run_tells_why_and_how_to_continue(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason, the place and the command are told."""
    run_inside(home, "--stop-after-epoch", "1")
    text = capsys.readouterr().out
    assert "stopped at epoch 2, training, step 0 (epoch 1 is complete)" in text
    assert f"training_pipeline.py tiny --data-home {home} --resume" in text


def test_unfinished_results_are_refused_with_both_commands(home: Path) -> None:
    """The refusal tells where the experiment stands."""
    run_inside(home, "--stop-after-epoch", "1")
    with pytest.raises(StateConflict, match="epoch 2, training, step 0") as raised:
        run_inside(home)
    assert f"tiny --data-home {home} --resume" in str(raised.value)
    assert f"tiny --data-home {home} --reset" in str(raised.value)


def test_next_command_fits_the_outcome() -> None:
    """A finished experiment is varied, an unfinished one continued."""
    paths = ExperimentPaths(Path("/home"), "tiny")
    assert "--from tiny" in next_line(paths, Progress(FINISHED, 3))
    assert "--resume" in next_line(paths, Progress(TRAINING, 3, 7))


def test_values_that_json_cannot_hold_become_null() -> None:
    """The status file stays JSON whatever the losses are."""
    losses = {"train": {}, "val": {"a": LossRecord(), "b": LossRecord(), "c": LossRecord()}}
    losses["val"]["a"].add_epoch(0, 1.0, 2)
    losses["val"]["b"].add_epoch(0, float("inf"), 2)
    found = latest_values(losses, "val")
    assert found == {"a": 0.5, "b": None}
    assert shown_values(found) == "a: 0.5000, b: nan"
