"""The number of processes changes neither which items a step holds nor what they look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.results.comparison import read_any
from tests.support.experiments import FILES, write_experiment
from tests.support.running import run_inside, run_process

WORLD_SIZES = (1, 2, 3, 4)
RESULTS = "experiment_results/tiny/data"
# Writes down every training batch it is given: its points, and their augmented values to the last bit.
_WITNESS = FILES["pymodules/module_transforms/a.py"].replace(
    "outputs = modules",
    """if modules["trunk"].training:
                    line = [self.register, batch["idx"].tolist(), batch["x"].numpy().tobytes().hex()]
                    with open(os.environ["WITNESS"] + os.environ.get("RANK", "0"), "a") as file:
                        file.write(json.dumps(line) + "\\n")
                outputs = modules""",
)
EXPERIMENT: dict[str, str | None] = {
    "pymodules/module_transforms/a.py": _WITNESS.replace(
        "from pipeline.components", "import json\n        import os\n\n        from pipeline.components", 1
    ),
    "pymodules/dataloaders/b.py": """
        train_dataloader_args = {"batch_size": 3, "num_workers": 2}
        eval_dataloader_args = {"batch_size": 4, "num_workers": 0}
    """,
}


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same experiment, run with one to four processes."""
    found = {}
    for nproc in WORLD_SIZES:
        home = tmp_path_factory.mktemp(f"world_{nproc}")
        write_experiment(home, files=EXPERIMENT)
        done = run_process(home, nproc=nproc, env={"WITNESS": str(home / "seen_by_")})
        assert done.returncode == 0, done.stderr
        found[nproc] = home
    return found


def seen(home: Path) -> list[list[Any]]:
    lines = [line for path in home.glob("seen_by_*") for line in path.read_text().splitlines()]
    return sorted(json.loads(line) for line in lines)


def test_every_number_of_processes_sees_the_same_augmented_items(homes: dict[int, Path]) -> None:
    """The batches of all epochs are the same, with the same bits after augmentation."""
    assert all(seen(homes[nproc]) == seen(homes[1]) for nproc in WORLD_SIZES)


def test_every_item_is_seen_once_per_epoch(homes: dict[int, Path]) -> None:
    """Three epochs see each training point three times, no more and no less."""
    for home in homes.values():
        points = [(register, idx) for register, idxs, _ in seen(home) for idx in idxs]
        assert sorted(points) == sorted([*_all_points("loss_a", 50), *_all_points("loss_b", 30)] * 3)


def _all_points(register: str, size: int) -> list[tuple[str, int]]:
    return [(register, idx) for idx in range(size) if idx % 5]


def test_steps_hold_the_same_items_and_losses_agree_to_rounding(homes: dict[int, Path]) -> None:
    """Records of every epoch and step agree: numbers of items exactly, losses to rounding."""
    for path in sorted((homes[1] / RESULTS / "loss_reg_data").rglob("*.npz")):
        expected = read_any(path)
        for nproc in WORLD_SIZES:
            found = read_any(homes[nproc] / RESULTS / path.relative_to(homes[1] / RESULTS))
            assert np.array_equal(found["items"], expected["items"])
            np.testing.assert_allclose(found["totals"], expected["totals"], rtol=2e-3)


def test_weights_and_batchnorm_statistics_agree_to_rounding(homes: dict[int, Path]) -> None:
    """Final weights and running statistics do not depend on the number of processes but for rounding."""
    for path in sorted((homes[1] / RESULTS / "module_ckps/last").glob("*.pt")):
        expected = read_any(path)
        for nproc in WORLD_SIZES:
            found = read_any(homes[nproc] / RESULTS / path.relative_to(homes[1] / RESULTS))
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=5e-3, atol=1e-4)


def test_idle_processes_are_reported_and_weights_nobody_used_stay(tmp_path: Path) -> None:
    """Steps of one batch leave a process idle, which is told once, and move no weights of the other dataset's head."""
    for name in ("tiny", "alone"):
        write_experiment(tmp_path, name, data_loading={"step_min_items": 1}, training={"checkpoint_every_steps": None})
    done = run_process(tmp_path, "--stop-after-epoch", "1", nproc=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 of 2 processes are idle; data_loading.step_min_items of 5 or more would use all") == 1
    run_inside(tmp_path, "--stop-after-epoch", "1", name="alone")
    names = [tmp_path / "experiment_results" / name / "data/module_ckps/last/head_b.pt" for name in ("tiny", "alone")]
    together, alone = (read_any(path)["weight"] for path in names)
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_resuming_with_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    """Stopped at two processes and resumed with one, it finishes, says what differs and stays equal to rounding."""
    write_experiment(tmp_path)
    write_experiment(tmp_path, "whole")
    assert run_process(tmp_path, "--stop-after-epoch", "1", nproc=2).returncode == 0
    done = run_process(tmp_path, "--resume")
    assert done.returncode == 0, done.stderr
    assert "world_size 2 → 1" in done.stdout
    assert run_process(tmp_path, name="whole").returncode == 0
    names = [tmp_path / "experiment_results" / name / "data/module_ckps/last/trunk.pt" for name in ("tiny", "whole")]
    resumed, whole = (read_any(path) for path in names)
    torch.testing.assert_close(resumed["0.weight"], whole["0.weight"], rtol=5e-3, atol=1e-4)
