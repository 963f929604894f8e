"""The first minutes of an experiment: crashes before anything was trained, quick tries, wrong folders, breakpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.errors import StateConflict, UsageError
from pipeline.store.compare import first_difference
from tests.support.experiments import FILES, tree, write_experiment
from tests.support.running import run_inside, run_process
from tests.support.verbs import call

RESULTS = Path("experiment_results/tiny")
TRANSFORM = "pymodules/module_transforms/a.py"
# What an author writes first: it fails in the first training batch, behind the evaluation of epoch 0.
BROKEN = FILES[TRANSFORM].replace(
    "difference = ", "assert not modules['trunk'].training, 'boom'\n                difference = "
)


def repair(home: Path) -> None:
    """Write the experiment again as it should be."""
    shutil.rmtree(home / "experiment_settings")
    write_experiment(home)


@pytest.mark.parametrize("nproc", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("flag", [[], ["--auto"]])
def test_repaired_experiment_starts_again_if_nothing_was_trained(
    tmp_path: Path, flag: list[str], nproc: int | None
) -> None:
    """After a crash in the first batch, the same command uses the repaired file and says so; no --reset is needed."""
    write_experiment(tmp_path, files={TRANSFORM: BROKEN})
    crashed = run_process(tmp_path, *flag, nproc=nproc)
    assert crashed.returncode == 1
    assert "nothing was trained yet" in crashed.stderr
    repair(tmp_path)
    done = run_process(tmp_path, *flag, nproc=nproc)
    assert done.returncode == 0, done.stderr
    assert "Nothing was trained yet: the settings folder was changed since, so this starts again with it" in done.stdout
    assert not [path.name for path in (tmp_path / "experiment_results").iterdir() if path.name != "tiny"]
    if nproc is None:
        write_experiment(tmp_path / "fresh")
        run_inside(tmp_path / "fresh")
        assert first_difference(tmp_path / "fresh" / RESULTS / "data", tmp_path / RESULTS / "data") is None


def test_unchanged_experiment_continues_without_a_flag(tmp_path: Path) -> None:
    """Results of nothing but the preparation continue; there is nothing to lose and nothing to ask."""
    write_experiment(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "0")
    generation = json.loads((tmp_path / RESULTS / "state.json").read_text())["generation"]
    assert run_inside(tmp_path, "--stop-after-epoch", "1").epoch == 2
    assert len((tmp_path / RESULTS / "starts.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / RESULTS / "state.json").read_text())["generation"] > generation
    with pytest.raises(StateConflict, match="to start again"):
        run_inside(tmp_path)


def test_other_settings_on_the_command_line_start_again(tmp_path: Path) -> None:
    """What --set changes is a change of the settings, too; repeated, it is none."""
    write_experiment(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "0")
    for seed, num_starts in (("9", 1), ("9", 2), ("10", 1)):
        run_inside(tmp_path, "--set", f"training.seed={seed}", "--stop-after-epoch", "0")
        assert json.loads((tmp_path / RESULTS / "settings/training.json").read_text())["seed"] == int(seed)
        assert len((tmp_path / RESULTS / "starts.jsonl").read_text().splitlines()) == num_starts


def test_resume_keeps_the_frozen_copy_even_if_nothing_was_trained(tmp_path: Path) -> None:
    """Who asks for --resume gets what was frozen, with a warning about the edits."""
    folder = write_experiment(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "0")
    (folder / "settings/training.json").write_text('{"seed": 99}')
    done = run_process(tmp_path, "--resume", "--stop-after-epoch", "1")
    assert "continues with its frozen copy: settings/training.json" in done.stdout + done.stderr
    assert json.loads((tmp_path / RESULTS / "settings/training.json").read_text())["seed"] == 3


def test_invalid_repair_leaves_the_results_as_they_are(tmp_path: Path) -> None:
    """A start again that is refused deletes nothing."""
    folder = write_experiment(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "0")
    (folder / "settings/training.json").write_text('{"sed": 99}')
    before = tree(tmp_path / "experiment_results")
    done = run_process(tmp_path)
    assert done.returncode == 2
    assert "Did you mean 'seed'?" in done.stderr
    assert tree(tmp_path / "experiment_results") == before


def test_try_has_results_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few batches of each split, in results named after it, are never taken for the experiment itself."""
    write_experiment(tmp_path)
    run_inside(tmp_path, "--limit-batches", "2")
    assert sorted(path.name for path in (tmp_path / "experiment_results").iterdir()) == ["tiny.try"]
    assert json.loads((tmp_path / "experiment_results/tiny.try/status.json").read_text())["state"] == "finished"
    run_inside(tmp_path, "--stop-after-epoch", "1")
    before = tree(tmp_path / RESULTS)
    # Another try begins anew, and leaves the experiment alone.
    run_inside(tmp_path, "--limit-batches", "1", "--stop-after-epoch", "1")
    assert tree(tmp_path / RESULTS) == before
    assert call(tmp_path, "status") == 0
    assert "tiny.try" in capsys.readouterr().out


@pytest.mark.slow
def test_try_under_torchrun_takes_few_batches(tmp_path: Path) -> None:
    """Two processes share the batches of a try: two of each of two datasets make two steps."""
    write_experiment(tmp_path)
    done = run_process(tmp_path, "--limit-batches", "2", "--set", "training.max_epochs=1", nproc=2)
    assert done.returncode == 0, done.stderr
    assert "steps: 1 per epoch" in done.stdout


def test_try_never_deletes_what_is_not_a_try(tmp_path: Path) -> None:
    """An experiment that happens to have the name of a try is refused, with or without results."""
    write_experiment(tmp_path)
    write_experiment(tmp_path, "tiny.try")
    with pytest.raises(StateConflict, match="which is an experiment of its own"):
        run_inside(tmp_path, "--limit-batches", "1")
    run_inside(tmp_path, "--stop-after-epoch", "0", name="tiny.try")
    shutil.rmtree(tmp_path / "experiment_settings/tiny.try")
    before = tree(tmp_path / "experiment_results")
    with pytest.raises(StateConflict, match="that --limit-batches has not made"):
        run_inside(tmp_path, "--limit-batches", "1")
    assert tree(tmp_path / "experiment_results") == before


@pytest.mark.parametrize("flag", ["--resume", "--auto", "--reset"])
def test_try_takes_no_mode(tmp_path: Path, flag: str) -> None:
    """A try is never continued."""
    write_experiment(tmp_path)
    done = run_process(tmp_path, "--limit-batches", "1", flag)
    assert done.returncode == 2
    assert f"--limit-batches does not go together with {flag}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["experiment_settings"]


@pytest.mark.parametrize("flag", ["--resume", "--auto", "--reset", None])
def test_wrong_data_home_is_recognised(tmp_path: Path, flag: str | None) -> None:
    """Called above, inside or beside the data home, the message names the one that has the experiment."""
    home = tmp_path / "project"
    write_experiment(home)
    for place in (tmp_path, home / "experiment_settings", home / "experiment_settings/tiny"):
        with pytest.raises(UsageError) as caught:
            run_inside(place, *([flag] if flag else []))
        assert f"No experiment 'tiny' in {place}" in str(caught.value)
        assert f"tiny is in {home}: add --data-home {home}" in str(caught.value)


def test_completed_path_is_recognised_as_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that the shell has completed names the experiment with its folder; the message says how to call it."""
    write_experiment(tmp_path)
    with pytest.raises(UsageError, match="name the experiment without its folder: tiny"):
        run_inside(tmp_path, name="experiment_settings/tiny")


SHOWS_FILE = """
    import sys

    from pipeline.components import BaseDataTransform


    class TrainDataTransform(BaseDataTransform):
        def __call__(self, data_point):
            print(f"loaded by {sys._getframe().f_code.co_filename}", flush=True)
"""


def test_breakpoints_of_a_resumed_run_are_in_the_authors_file(tmp_path: Path) -> None:
    """In loader workers, too, code goes by the author's file while the copy is identical to it, and not longer."""
    workers = FILES["pymodules/dataloaders/a.py"].replace('"num_workers": 0', '"num_workers": 1', 1)
    file = "pymodules/data_transforms/a.py"
    files = {file: f"{SHOWS_FILE}\n    EvalDataTransform = BaseDataTransform\n", "pymodules/dataloaders/a.py": workers}
    folder = write_experiment(tmp_path, files=files)
    first = run_process(tmp_path, "--stop-after-epoch", "1")
    resumed = run_process(tmp_path, "--resume", "--stop-after-epoch", "2")
    for done in (first, resumed):
        assert done.returncode == 0, done.stderr
        assert f"loaded by {folder / file}\n" in done.stdout
        assert f"loaded by {tmp_path / RESULTS / file}" not in done.stdout
    with (folder / file).open("a") as edited:
        edited.write("# An edit.\n")
    edited_since = run_process(tmp_path, "--resume")
    assert f"loaded by {tmp_path / RESULTS / file}\n" in edited_since.stdout
