"""The shipped examples do what their pages promise, also when they are killed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pipeline.commands.new import templates, templates_folder
from pipeline.store.compare import first_difference
from tests.crash.campaign import live
from tests.support.running import run_process
from tests.support.verbs import call

# The register that an example is judged by, and the bound that its page states for the best epoch.
QUALITY = {
    "contrastive": ("probe_accuracy", 0.9),
    "diffusion": ("distance", 0.006),
    "digits": ("digit_accuracy", 0.95),
    "language_model": ("bits_per_character", 3.2),
    "minimal": ("squared_error", 0.01),
    "regression": ("error_in_metres", 1.0),
    "segmentation": ("miou", 0.8),
}
# What makes the long ones shorter where only their bits matter.
SHORT = {
    "contrastive": ["parameters.num_epochs=2", "parameters.num_points=640"],
    "diffusion": ["parameters.num_epochs=2", "data_loading.steps_per_epoch=20"],
    "digits": ["parameters.num_epochs=4"],
    "language_model": ["parameters.num_steps=60", "data_loading.steps_per_epoch=20", "parameters.max_eval_windows=50"],
    "minimal": [],
    "regression": ["parameters.num_epochs=6", "parameters.num_throws=300"],
    "segmentation": ["parameters.num_epochs=2", "parameters.num_images=100"],
}
SLOW = {"contrastive", "diffusion", "language_model", "regression", "segmentation"}
HIGHER_IS_BETTER = ("digit_accuracy", "miou", "probe_accuracy")
DATA = Path("experiment_results/tiny/data")


def examples() -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in QUALITY]


def best_value(home: Path, register: str) -> float:
    status = json.loads((home / "experiment_results/tiny/status.json").read_text())
    assert status["state"] == "finished"
    return float(status["best"]["values"][register])


def test_every_example_has_a_quality() -> None:
    """An example whose promise no test keeps would be forgotten."""
    assert sorted(QUALITY) == templates()


@pytest.mark.parametrize("name", examples())
def test_example_learns_what_its_page_says(tmp_path: Path, name: str) -> None:
    """Written by `new` and trained with two processes, it ends at the stated quality, for which training is needed."""
    register, bound = QUALITY[name]
    assert call(tmp_path, "new", "tiny", "--template", name) == 0
    done = run_process(tmp_path, nproc=2)
    assert done.returncode == 0, done.stderr
    is_higher_better = register in HIGHER_IS_BETTER
    best = best_value(tmp_path, register)
    assert best > bound if is_higher_better else best < bound
    first = float(done.stdout.split("Epoch(val) [0]")[1].split(f"{register}: ")[1].split(",")[0].split("\n")[0])
    assert first < bound if is_higher_better else first > bound


@pytest.mark.slow
def test_diffusion_needs_the_average_of_its_weights(tmp_path: Path) -> None:
    """Judged by the raw weights, the stated quality is missed: the example shows what an average is for."""
    register, bound = QUALITY["diffusion"]
    assert call(tmp_path, "new", "tiny", "--template", "diffusion") == 0
    (tmp_path / "experiment_settings/tiny/pymodules/modules/ema.py").unlink()
    done = run_process(tmp_path, nproc=2)
    assert done.returncode == 0, done.stderr
    assert best_value(tmp_path, register) > bound


@pytest.mark.slow
def test_contrastive_needs_the_rows_of_a_whole_step(tmp_path: Path) -> None:
    """The same loss inside each batch of four points misses the stated quality by far."""
    register, bound = QUALITY["contrastive"]
    assert call(tmp_path, "new", "tiny", "--template", "contrastive") == 0
    file = tmp_path / "experiment_settings/tiny/pymodules/module_transforms/glyphs.py"
    text = file.read_text()
    call_of_batch = (
        "def __call__(self, batch, modules):\n        return self.compare(self.rows(batch, modules), modules)"
    )
    changes = {"    def embed(": f"    {call_of_batch}\n\n    def rows(", "    def loss(": "    def compare("}
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    file.write_text(text)
    done = run_process(tmp_path, nproc=2)
    assert done.returncode == 0, done.stderr
    assert best_value(tmp_path, register) < 0.5 < bound


@pytest.mark.slow
@pytest.mark.parametrize("name", QUALITY)
def test_killed_example_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    """Killed twice at two processes and resumed, it ends like one that was left alone."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    changes = [word for change in [*SHORT[name], "training.checkpoint_every_steps=3"] for word in ("--set", change)]
    for home in (undisturbed, killed):
        assert call(home, "new", "tiny", "--template", name, *changes) == 0
    done = run_process(undisturbed, nproc=2)
    assert done.returncode == 0, done.stderr
    draw = random.Random(3)
    lives = [live(killed, 2, aim, draw) for aim in ("random", "write")]
    assert any(life.was_killed for life in lives)
    done = run_process(killed, "--auto", nproc=2)
    assert done.returncode == 0, done.stderr
    assert first_difference(undisturbed / DATA, killed / DATA) is None


def test_smallest_example_is_four_short_files() -> None:
    """As its page says: four files of Python, 18 lines that are not empty, and no settings."""
    folder = templates_folder() / "minimal"
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"]
    assert {path.suffix for path in files} == {".py"}
    assert len(files) == 4
    assert sum(bool(line.strip()) for path in files for line in path.read_text().splitlines()) == 18
