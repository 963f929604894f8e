"""Epochs of steps, mixtures and a last step inside an epoch: stopped, killed, at any number of processes."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import PipelineError
from pipeline.progress import Progress
from pipeline.store.compare import first_difference, read_any
from pipeline.training import step_plan
from tests.crash.campaign import live
from tests.support.experiments import FILES, write_experiment
from tests.support.running import run_inside, run_process
from tests.support.verbs import call

RESULTS = Path("experiment_results/tiny")
DATA = RESULTS / "data"
# 40, 24 and 16 training points; ten steps take two passes and more over each of them.
NUM_POINTS = {"a": 40, "b": 24, "c": 16}
MAX_STEPS = 10
PLANS: dict[str, dict[str, Any]] = {
    "passes": {"step_min_items": 20, "steps_per_epoch": 4},
    "mixture": {"steps_per_epoch": 4, "mixture": {"a": 2.5, "b": 1.6, "c": 0.7}},
}
# Writes down the points of every training batch; may ask its own run to stop after so many batches.
_WITNESS = FILES["pymodules/module_transforms/a.py"].replace(
    "outputs = modules",
    """if modules["trunk"].training and "WITNESS" in os.environ:
                    with open(os.environ["WITNESS"] + os.environ.get("RANK", "0"), "a") as file:
                        file.write(json.dumps([type(self).__module__[-1], batch["idx"].tolist()]) + "\\n")
                    self.num_seen.append(1)
                    if str(len(self.num_seen)) == os.environ.get("STOP_AT"):
                        os.kill(os.getpid(), signal.SIGTERM)
                outputs = modules""",
)
THREE: dict[str, str | None] = {
    "pymodules/datasets/c.py": "from ..utils.points import Points\n\ndataset = Points(20, 2)\n",
    "pymodules/dataloaders/a.py": """
        train_dataloader_args = {"batch_size": 4, "num_workers": 1}
        eval_dataloader_args = {"batch_size": 4, "num_workers": 0}
    """,
    "pymodules/dataloaders/c.py": """
        train_dataloader_args = {"batch_size": 5}
    """,
    "pymodules/module_transforms/a.py": _WITNESS.replace(
        "from pipeline.components",
        "import json\n        import os\n        import signal\n\n        from pipeline.components",
        1,
    ).replace('register = "loss_a"\n', 'register = "loss_a"\n            num_seen = []\n', 1),
    "pymodules/module_transforms/c.py": FILES["pymodules/module_transforms/b.py"],
}


def write(home: Path, plan: str, **training: Any) -> Path:
    """Write the experiment with three datasets, the last of which has no transforms and no batch size of its own."""
    settings = {"checkpoint_every_steps": 3, "max_steps": MAX_STEPS, **training}
    write_experiment(home, files=THREE, data_loading={"step_min_items": 1, **PLANS[plan]}, training=settings)
    return home


def run_at(home: Path, nproc: int | None, *words: str, **variables: str) -> str:
    done = run_process(home, *words, nproc=nproc, env={"WITNESS": str(home / "seen_by_"), **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def drawn(home: Path) -> dict[str, list[int]]:
    """Return the points of each dataset in the order in which one process has trained on them."""
    points: dict[str, list[int]] = {name: [] for name in NUM_POINTS}
    for line in (home / "seen_by_0").read_text().splitlines():
        dataset, indices = json.loads(line)
        points[dataset] += indices
    return points


@pytest.mark.parametrize("plan", PLANS)
def test_every_point_of_a_pass_is_seen_once(tmp_path: Path, plan: str) -> None:
    """Epochs have the steps the settings say, the last one what is left of max_steps; passes know nothing of them."""
    write(tmp_path, plan)
    run_at(tmp_path, None)
    records = tmp_path / DATA / "loss_reg_data/train/error"
    assert [len(read_any(records / f"step_data_{epoch}.npz")["steps"]) for epoch in (1, 2, 3)] == [4, 4, 2]
    assert list(read_any(tmp_path / DATA / "loss_reg_data/val/error/epoch_data.npz")["epochs"]) == [0, 1, 2, 3]
    for dataset, points in drawn(tmp_path).items():
        size = NUM_POINTS[dataset]
        whole_passes = [points[first : first + size] for first in range(0, len(points) - size + 1, size)]
        assert len(whole_passes) >= 2
        assert all(sorted(one) == [idx for idx in range(size * 5 // 4) if idx % 5] for one in whole_passes)
        assert max(Counter(points[len(whole_passes) * size :]).values(), default=1) == 1
        assert whole_passes[0] != whole_passes[1]


@pytest.mark.parametrize("plan", PLANS)
def test_stops_and_verbs_follow_the_plan(tmp_path: Path, plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped inside epochs and resumed, a run ends with the same bits; status, report and replay know its steps."""
    whole, parts = write(tmp_path / "whole", plan), write(tmp_path / "parts", plan)
    assert run_inside(whole) == Progress("finished", 3)
    run_inside(parts, "--stop-after-epoch", "2")
    assert call(parts, "status", "tiny") == 0
    assert "epoch 3, training" in capsys.readouterr().out
    run_inside(parts, "--resume")
    assert first_difference(whole / DATA, parts / DATA) is None
    assert call(parts, "replay", "tiny", "--epoch", "3", "--step", "2") == 0
    assert "identical to the record" in capsys.readouterr().out
    assert call(parts, "report", "tiny") == 0


def test_results_of_another_plan_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that would plan other batches says so instead of continuing with them."""
    run_inside(write(tmp_path, "passes"), "--stop-after-epoch", "1")
    monkeypatch.setattr(step_plan, "PLAN_VERSION", 2)
    with pytest.raises(PipelineError, match="started with version 1 of the plan of its batches"):
        run_inside(tmp_path, "--resume")


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_exact_plans_give_the_same_bits_on_one_to_five_processes(tmp_path: Path, plan: str) -> None:
    """Epochs that span passes, mixtures and a cut epoch are the same to the bit at 1, 2, 3 and 5 processes."""
    homes = {nproc: write(tmp_path / str(nproc), plan, gradient_reduction="exact") for nproc in (1, 2, 3, 5)}
    for nproc, home in homes.items():
        run_at(home, None if nproc == 1 else nproc)
    differences = {nproc: first_difference(homes[1] / DATA, home / DATA) for nproc, home in homes.items()}
    assert differences == dict.fromkeys(homes)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("engine", [{"gradient_reduction": "exact"}, {}, {"parallelism": "fsdp"}], ids=str)
def test_killed_plans_end_with_the_same_bits(tmp_path: Path, plan: str, engine: dict[str, Any]) -> None:
    """Killed three times at two processes, at random and inside writes, a run ends like one that was left alone."""
    undisturbed, killed = (write(tmp_path / name, plan, **engine) for name in ("undisturbed", "killed"))
    run_at(undisturbed, 2)
    draw = random.Random(7)
    lives = [live(killed, 2, aim, draw) for aim in ("random", "write", "random")]
    assert any(life.was_killed for life in lives)
    run_at(killed, 2, "--auto")
    assert first_difference(undisturbed / DATA, killed / DATA) is None


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_tenth_resume_in_a_row_gives_the_same_bits(tmp_path: Path, plan: str) -> None:
    """A run that is stopped after each of its steps, and resumed each time, sees the points of one that never was."""
    whole, parts = (write(tmp_path / name, plan) for name in ("whole", "parts"))
    run_at(whole, None)
    for _ in range(MAX_STEPS):
        run_at(parts, None, "--auto", STOP_AT="1")
    run_at(parts, None, "--auto")
    starts = (parts / RESULTS / "starts.jsonl").read_text().splitlines()
    assert len(starts) >= MAX_STEPS
    assert first_difference(whole / DATA, parts / DATA) is None
    assert drawn(parts) == drawn(whole)


@pytest.mark.slow
def test_verify_resume_proves_plans_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verb that proves exactness runs more steps than an epoch has."""
    write(tmp_path, "mixture", gradient_reduction="exact")
    assert call(tmp_path, "verify-resume", "tiny", "--steps", "6", "--nproc", "1,2") == 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("data_loading", "training", "said"),
    [
        ({"steps_per_epoch": 0}, {}, "data_loading.json:3 (steps_per_epoch): must be 1 or more, but is 0"),
        ({}, {"max_steps": 0}, "(max_steps): must be 1 or more, but is 0"),
        (
            {"mixture": {"a": 1, "b": 1, "c": 1}},
            {},
            "(mixture): needs steps_per_epoch: mixed datasets do not end together",
        ),
        ({"steps_per_epoch": 4, "mixture": {}}, {}, "(mixture): must be an object with at least 1 key, but is {}"),
        (
            {"steps_per_epoch": 4, "mixture": {"a": 0, "b": 1, "c": 1}},
            {},
            "(mixture.a): must be greater than 0, but is 0",
        ),
        (
            {"steps_per_epoch": 4, "mixture": {"a": 1, "b": 1}},
            {},
            "(mixture): must have a weight for every dataset, but has none for 'c'",
        ),
        ({"steps_per_epoch": 4, "mixture": {"a": 1, "b": 1, "cc": 1}}, {}, "Did you mean 'c'?"),
        ({"steps_per_epoch": 4, "mixture": {"a": 0.5, "b": 0.5, "c": 0.5}}, {}, "leaves steps without a batch"),
    ],
)
def test_plans_that_make_no_sense_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    data_loading: dict[str, Any],
    training: dict[str, Any],
    said: str,
) -> None:
    """One sentence each, by check and by a start, and nothing is written."""
    write_experiment(tmp_path, files=THREE, data_loading={"step_min_items": 1, **data_loading}, training=training)
    assert call(tmp_path, "check", "tiny") == 2
    assert said in capsys.readouterr().err
    with pytest.raises(PipelineError, match=re.escape(said)):
        run_inside(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["experiment_settings"]


def test_mixture_of_a_dataset_without_points_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A weight for a dataset that has nothing to train on is named."""
    files = {**THREE, "pymodules/datasets/c.py": "from ..utils.points import Points\n\ndataset = Points(0, 2)\n"}
    write_experiment(tmp_path, files=files, data_loading=PLANS["mixture"])
    assert call(tmp_path, "check", "tiny") == 2
    assert "the train split must have points" in capsys.readouterr().err
