"""The mode table: what each flag does in each situation, and what it leaves untouched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import StateConflict, UsageError
from tests.support.experiments import tree, write_experiment
from tests.support.running import BackgroundRun, run_inside, run_process

RESULTS = "experiment_results/tiny"


@pytest.fixture
def unfinished(home: Path) -> Path:
    """A data home whose experiment stands after epoch 1."""
    run_inside(home, "--stop-after-epoch", "1")
    return home


@pytest.fixture
def finished(home: Path) -> Path:
    """A data home whose experiment is finished."""
    run_inside(home)
    return home


@pytest.mark.parametrize("words", [(), ("--reset",), ("--auto",)])
def test_without_results_it_starts(home: Path, words: tuple[str, ...]) -> None:
    """Nothing on disk: plain, --reset and --auto all start."""
    assert run_inside(home, *words, "--stop-after-epoch", "0").epoch == 1


def test_resume_without_results_is_refused(home: Path) -> None:
    """--resume with nothing to resume says so, names --auto and touches nothing."""
    before = tree(home)
    with pytest.raises(StateConflict, match=r"no results to resume(?s:.*)--auto"):
        run_inside(home, "--resume")
    assert tree(home) == before


def test_unfinished_without_flag_is_refused(unfinished: Path) -> None:
    """Unfinished results are refused with where they stand and both ways to go on."""
    before = tree(unfinished)
    with pytest.raises(StateConflict, match=r"(?s)epoch 2, training.* --resume.* --reset"):
        run_inside(unfinished)
    assert tree(unfinished) == before


def test_reset_is_offered_with_the_settings_of_the_start(home: Path) -> None:
    """The settings folder does not have what --set changed, so the printed line repeats it."""
    run_inside(home, "--set", "training.seed=5", "--no-validate", "--stop-after-epoch", "1")
    with pytest.raises(StateConflict, match=r"--reset --set training\.seed=5 --set training\.evaluation_interval=0"):
        run_inside(home)


@pytest.mark.parametrize("words", [(), ("--auto",)])
def test_finished_experiment_refuses_other_settings(finished: Path, words: tuple[str, ...]) -> None:
    """A script that changes a value must not believe that it was trained with it."""
    before = tree(finished)
    with pytest.raises(UsageError, match=r"training.seed=9 would change settings that are frozen(?s:.*)--from tiny"):
        run_inside(finished, *words, "--set", "training.seed=9")
    assert run_inside(finished, *words, "--set", "training.seed=3").is_finished
    assert tree(finished) == before


@pytest.mark.parametrize("word", ["--resume", "--auto"])
def test_unfinished_continues(unfinished: Path, word: str) -> None:
    """--resume and --auto continue from the last commit."""
    assert run_inside(unfinished, word).is_finished
    starts = (unfinished / RESULTS / "starts.jsonl").read_text().splitlines()
    assert json.loads(starts[1])["from"] == {"stage": "training", "epoch": 2, "step": 0}


def test_reset_starts_again(unfinished: Path) -> None:
    """--reset deletes results and logs, and starts from the beginning."""
    old_log = unfinished / "experiment_logs/tiny/old.txt"
    old_log.write_text("old")
    assert run_inside(unfinished, "--reset", "--stop-after-epoch", "0").epoch == 1
    assert not old_log.exists()
    assert len((unfinished / RESULTS / "starts.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("words", [(), ("--resume",), ("--auto",)])
def test_finished_changes_no_byte_and_no_time_stamp(finished: Path, words: tuple[str, ...]) -> None:
    """A finished experiment is left exactly as it is."""
    before = tree(finished)
    assert run_inside(finished, *words).is_finished
    assert tree(finished) == before


def test_finished_is_told_with_best_value_and_a_way_on(finished: Path) -> None:
    """The message of a finished experiment names when, the best value and how to make a variant; exit code 0."""
    done = run_process(finished, "--resume")
    assert done.returncode == 0
    assert "finished on" in done.stdout
    assert "Best: epoch" in done.stdout
    assert "new VARIANT --from tiny" in done.stdout


def test_finished_can_be_reset(finished: Path) -> None:
    """--reset starts a finished experiment again."""
    assert run_inside(finished, "--reset", "--stop-after-epoch", "0").epoch == 1


def test_a_live_run_refuses_every_other_one_at_once(home: Path) -> None:
    """While a run is alive every mode is refused with its host, pid and start; once killed, its lock is free."""
    write_experiment(home, training={"checkpoint_every_steps": 1}, files=_many_epochs())
    lock = home / RESULTS / "run.lock"
    with BackgroundRun(home) as alive:
        alive.wait_for(lambda: (home / RESULTS / "state.json").exists())
        owner = json.loads(lock.read_text())
        for words in ((), ("--resume",), ("--reset",), ("--auto",)):
            with pytest.raises(StateConflict) as refusal:
                run_inside(home, *words)
            assert f"pid {owner['pid']} on host {owner['host']}" in str(refusal.value)
            assert owner["started"] in str(refusal.value)
        assert alive.process.poll() is None
        alive.kill()
    assert not run_inside(home, "--resume", "--stop-after-epoch", "0").is_finished


def _many_epochs() -> dict[str, str | None]:
    text = (
        "from pipeline.components import WeightedLossEarlyStopper\n\nearly_stopper = WeightedLossEarlyStopper(5000)\n"
    )
    return {"pymodules/early_stopper.py": text}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--resume", "--reset"), 2, "not allowed with"),
        (("--resume",), 3, "--auto"),
        (("--set", "training.sed=1"), 2, "Did you mean 'seed'?"),
        (("--set", "training.seed=-1"), 2, "0 or more"),
        (("--resume", "--set", "training.seed=1"), 2, "new VARIANT"),
    ],
)
def test_refusals_have_exit_codes_one_message_and_no_trace(
    home: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    """Bad usage ends with 2 and state conflicts with 3, in one message without a stack trace, disk untouched."""
    before = tree(home)
    done = run_process(home, *words)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert tree(home) == before


def test_refusals_under_torchrun_are_told_once(home: Path) -> None:
    """With two processes the message comes from rank zero alone, and nothing is written."""
    before = tree(home)
    done = run_process(home, "--resume", nproc=2)
    assert done.returncode == 1
    assert done.stderr.count("no results to resume") == 1
    assert "exitcode  : 3" in done.stderr
    assert tree(home) == before


def test_invalid_experiment_under_torchrun_lists_all_problems_once(home: Path) -> None:
    """Several broken files are all listed, once, with exit code 2, and the disk stays as it was."""
    files: dict[str, str | None] = {
        "pymodules/modules/trunk.py": "import sys\n\nsys.exit(0)\n",
        "pymodules/datasets/b.py": "dataset = (\n",
    }
    write_experiment(home, files=files)
    before = tree(home)
    done = run_process(home, nproc=2)
    assert done.stderr.count("modules/trunk.py:3: must be importable, but calls sys.exit(0)") == 1
    assert done.stderr.count("datasets/b.py:1: must be valid Python") == 1
    assert "exitcode  : 2" in done.stderr
    assert tree(home) == before


@pytest.mark.slow
def test_plain_python_and_torchrun_with_one_process_give_the_same_bits(home: Path) -> None:
    """One process without torchrun is the same run as one process under it."""
    from pipeline.store.compare import first_difference

    write_experiment(home, "other")
    assert run_process(home).returncode == 0
    assert run_process(home, name="other", nproc=1).returncode == 0
    assert first_difference(home / RESULTS / "data", home / "experiment_results/other/data") is None


def test_overrides_are_frozen_into_the_copy(home: Path) -> None:
    """--set is written into the copied settings and rules every later start."""
    run_inside(home, "--set", "training.seed=11", "--stop-after-epoch", "1")
    assert json.loads((home / RESULTS / "settings/training.json").read_text())["seed"] == 11
    assert json.loads((home / "experiment_settings/tiny/settings/training.json").read_text())["seed"] == 3
    assert run_inside(home, "--auto", "--set", "training.seed=11", "--stop-after-epoch", "1").epoch == 2
    with pytest.raises(UsageError, match=r"training.seed=12 would change settings that are frozen"):
        run_inside(home, "--auto", "--set", "training.seed=12")


def test_stop_after_epoch_is_resumable(home: Path) -> None:
    """--stop-after-epoch stops after that epoch's evaluation is committed."""
    assert str(run_inside(home, "--stop-after-epoch", "1")) == "epoch 2, training, step 0"


def test_no_validate_trains_without_evaluation(home: Path) -> None:
    """--no-validate records nothing in val and still ends at max_epochs."""
    import numpy as np

    assert run_inside(home, "--no-validate").is_finished
    assert not np.load(home / RESULTS / "data/loss_reg_data/val/loss_a/epoch_data.npz")["epochs"].size
    assert np.load(home / RESULTS / "data/loss_reg_data/train/loss_a/epoch_data.npz")["epochs"].tolist() == [1, 2, 3]


def test_evaluation_interval_skips_epochs_but_not_the_last(home: Path) -> None:
    """With an interval of 2, epochs 0, 2 and the last one are evaluated."""
    import numpy as np

    run_inside(home, "--set", "training.evaluation_interval=2")
    assert np.load(home / RESULTS / "data/loss_reg_data/val/error/epoch_data.npz")["epochs"].tolist() == [0, 2, 3]
