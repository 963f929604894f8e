"""The number of processes changes neither which items a step holds nor what they look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.lifecycle.starts import read_starts
from pipeline.paths import ExperimentPaths
from pipeline.progress import Progress
from pipeline.store.compare import first_difference, read_any
from tests.support.experiments import FILES, write_experiment
from tests.support.running import run_inside, run_process

WORLD_SIZES = (1, 2, 3, 4)
RESULTS = "experiment_results/tiny/data"
# Writes down every training batch it is given: its points, and their augmented values to the last bit. May ask its own
# run to stop after so many batches of the first process.
_WITNESS = FILES["pymodules/module_transforms/a.py"].replace(
    "outputs = modules",
    """if modules["trunk"].training:
                    line = [self.register, batch["idx"].tolist(), batch["x"].numpy().tobytes().hex()]
                    with open(os.environ["WITNESS"] + os.environ.get("RANK", "0"), "a") as file:
                        file.write(json.dumps(line) + "\\n")
                    self.batches_seen.append(1)
                    if (os.environ.get("RANK"), str(len(self.batches_seen))) == ("0", os.environ.get("STOP_AT")):
                        os.kill(os.getpid(), signal.SIGTERM)
                outputs = modules""",
)
EXPERIMENT: dict[str, str | None] = {
    "pymodules/module_transforms/a.py": _WITNESS.replace(
        "from pipeline.components",
        "import json\n        import os\n        import signal\n\n        from pipeline.components",
        1,
    ).replace('register = "loss_a"\n', 'register = "loss_a"\n            batches_seen = []\n', 1),
    "pymodules/dataloaders/b.py": """
        train_dataloader_args = {"batch_size": 3, "num_workers": 2}
        eval_dataloader_args = {"batch_size": 4, "num_workers": 0}
    """,
}


def finished(home: Path, nproc: int) -> Path:
    """Run the experiment to its end, from nothing, and return its home."""
    write_experiment(home, files=EXPERIMENT)
    done = run_process(home, nproc=nproc, env={"WITNESS": str(home / "seen_by_")})
    assert done.returncode == 0, done.stderr
    return home


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment, run by one process."""
    return finished(tmp_path_factory.mktemp("world_1"), 1)


@pytest.fixture(scope="module")
def homes(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same experiment, run with one to four processes."""
    others = {nproc: finished(tmp_path_factory.mktemp(f"world_{nproc}"), nproc) for nproc in WORLD_SIZES[1:]}
    return {1: alone, **others}


def seen(home: Path) -> list[list[Any]]:
    lines = [line for path in home.glob("seen_by_*") for line in path.read_text().splitlines()]
    return sorted(json.loads(line) for line in lines)


@pytest.mark.slow
def test_every_number_of_processes_sees_the_same_augmented_items(homes: dict[int, Path]) -> None:
    """The batches of all epochs are the same, with the same bits after augmentation."""
    assert all(seen(homes[nproc]) == seen(homes[1]) for nproc in WORLD_SIZES)


@pytest.mark.slow
def test_every_item_is_seen_once_per_epoch(homes: dict[int, Path]) -> None:
    """Three epochs see each training point three times, no more and no less."""
    for home in homes.values():
        points = [(register, idx) for register, idxs, _ in seen(home) for idx in idxs]
        assert sorted(points) == sorted([*_all_points("loss_a", 50), *_all_points("loss_b", 30)] * 3)


def _all_points(register: str, size: int) -> list[tuple[str, int]]:
    return [(register, idx) for idx in range(size) if idx % 5]


@pytest.mark.slow
def test_steps_hold_the_same_items_and_losses_agree_to_rounding(homes: dict[int, Path]) -> None:
    """Records of every epoch and step agree: numbers of items exactly, losses to rounding."""
    for path in sorted((homes[1] / RESULTS / "loss_reg_data").rglob("*.npz")):
        expected = read_any(path)
        for nproc in WORLD_SIZES:
            found = read_any(homes[nproc] / RESULTS / path.relative_to(homes[1] / RESULTS))
            assert np.array_equal(found["items"], expected["items"])
            np.testing.assert_allclose(found["totals"], expected["totals"], rtol=2e-3)


@pytest.mark.slow
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


def test_points_loaded_during_a_reduction_may_be_differentiated(tmp_path: Path) -> None:
    """A transform that needs gradients of its own works wherever a batch is loaded, with two processes as alone."""
    differentiating = """
        import torch

        from pipeline.components import BaseDataTransform


        class TrainDataTransform(BaseDataTransform):
            def __call__(self, data_point):
                x = torch.tensor(data_point["x"], requires_grad=True)
                (slope,) = torch.autograd.grad(x.pow(2).sum(), x)
                data_point["x"] = (slope / 2).numpy()


        class EvalDataTransform(BaseDataTransform):
            pass
    """
    write_experiment(tmp_path, files={"pymodules/data_transforms/a.py": differentiating})
    done = run_process(tmp_path, "--stop-after-epoch", "1", nproc=2)
    assert done.returncode == 0, done.stderr


def test_weight_that_is_reached_without_a_gradient_does_not_count_as_used(tmp_path: Path) -> None:
    """An operation may give its weight no gradient; all processes go on, and leave the weight as it was."""
    reaching = """
        import torch
        from torch import nn


        class Ignoring(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                return x + 0 * weight

            @staticmethod
            def backward(ctx, gradient):
                return gradient, None


        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.ignored = nn.Linear(8, 1), nn.Parameter(torch.ones(8))

            def forward(self, x):
                return self.linear(Ignoring.apply(x, self.ignored))


        module = Head()
        settings = {}
    """
    write_experiment(tmp_path, files={"pymodules/modules/head_a.py": reaching})
    done = run_process(tmp_path, "--stop-after-epoch", "1", nproc=2)
    assert done.returncode == 0, done.stderr
    assert read_any(tmp_path / RESULTS / "module_ckps/last/head_a.pt")["ignored"].eq(1).all()


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that was stopped inside an epoch at four processes, then at two, and finished by three; what each said."""
    home = tmp_path_factory.mktemp("moved")
    write_experiment(home, files=EXPERIMENT)
    said = []
    for nproc, stop_at in ((4, 2), (2, 7), (3, 0)):
        variables = {"WITNESS": str(home / "seen_by_"), "STOP_AT": str(stop_at)}
        done = run_process(home, "--auto", nproc=nproc, env=variables)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    return home, said


@pytest.mark.slow
def test_change_of_processes_is_told_with_its_first_step_and_recorded(moved: tuple[Path, list[str]]) -> None:
    """Each resume says how many processes there were and are, and from which step on that may be seen in the bits."""
    home, said = moved
    starts = read_starts(ExperimentPaths(home, "tiny"))
    assert [start["world_size"] for start in starts] == [4, 2, 3]
    places = [Progress.from_json(start["from"]) for start in starts]
    assert [place.epoch for place in places[1:]] == [1, 2]
    for change, place, text in zip(("4 → 2", "2 → 3"), places[1:], said[1:], strict=True):
        assert 0 < place.step < 5
        step = f"epoch {place.epoch}, step {place.step + 1}"
        assert f"world_size {change}. Training continues; from {step} on, bits may differ" in text


@pytest.mark.slow
def test_processes_may_change_inside_an_epoch(alone: Path, moved: tuple[Path, list[str]]) -> None:
    """Every item is seen once with the same bits, in the same steps and at the same learning rates; losses agree."""
    parts = moved[0]
    assert seen(parts) == seen(alone)
    assert first_difference(alone / RESULTS / "module_ckps/init", parts / RESULTS / "module_ckps/init") is None
    for path in sorted((alone / RESULTS).rglob("*_data*.npz")):
        expected, found = read_any(path), read_any(parts / RESULTS / path.relative_to(alone / RESULTS))
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            is_rounded = name in ("means", "totals", "grad_norms")
            np.testing.assert_allclose(found[name], values, rtol=2e-3 if is_rounded else 0)


@pytest.mark.slow
def test_weights_agree_to_rounding_whatever_the_processes_were(alone: Path, moved: tuple[Path, list[str]]) -> None:
    """Two changes of the number of processes later, weights and running statistics are still the same to rounding."""
    for path in sorted((alone / RESULTS / "module_ckps/last").glob("*.pt")):
        found = read_any(moved[0] / RESULTS / path.relative_to(alone / RESULTS))
        for name, tensor in read_any(path).items():
            torch.testing.assert_close(found[name], tensor, rtol=5e-3, atol=1e-4)
