"""The shipped examples do what their pages promise, also when they are killed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pipeline.commands.new import templates, templates_folder
from pipeline.paths import ExperimentPaths
from pipeline.serialization.torch_files import load_tensors
from pipeline.store.compare import first_difference
from pipeline.store.weight_pools import newest_commit
from tests.crash.campaign import live
from tests.support.running import run_process
from tests.support.verbs import call

# The register that an example is judged by, and the bound that its page states for the best epoch.
QUALITY = {
    "contrastive": ("probe_accuracy", 0.9),
    "diffusion": ("distance", 0.006),
    "digits": ("digit_accuracy", 0.95),
    "gan": ("distance", 0.02),
    "finetune": ("digit_accuracy", 0.8),
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
    "gan": ["parameters.num_epochs=2", "data_loading.steps_per_epoch=20"],
    "finetune": ["parameters.num_epochs=3"],
    "language_model": ["parameters.num_steps=60", "data_loading.steps_per_epoch=20", "parameters.max_eval_windows=50"],
    "minimal": [],
    "regression": ["parameters.num_epochs=6", "parameters.num_throws=300"],
    "segmentation": ["parameters.num_epochs=2", "parameters.num_images=100"],
}
SLOW = {"contrastive", "diffusion", "finetune", "gan", "language_model", "regression", "segmentation"}
HIGHER_IS_BETTER = ("digit_accuracy", "miou", "probe_accuracy")
# The experiment of this name that an example starts from.
SOURCES = {"finetune": "digits"}
DATA = Path("experiment_results/tiny/data")


def examples() -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in QUALITY]


def write_example(home: Path, name: str, *changes: str, short_source: bool = False) -> None:
    """Write an example as `tiny`; one that starts from another experiment gets that as well, trained."""
    words = [word for change in changes for word in ("--set", change)]
    assert call(home, "new", "tiny", "--template", name, *words) == 0
    if name in SOURCES:
        source = SOURCES[name]
        shorter = ("--set", "parameters.num_epochs=2") if short_source else ()
        assert call(home, "new", source, "--template", source, *shorter) == 0
        done = run_process(home, name=source, nproc=2)
        assert done.returncode == 0, done.stderr


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
    write_example(tmp_path, name)
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
def test_gan_needs_registers_of_its_own_for_each_optimizer(tmp_path: Path) -> None:
    """Where both follow both losses, the generator is pulled both ways and does not learn to draw."""
    register, bound = QUALITY["gan"]
    assert call(tmp_path, "new", "tiny", "--template", "gan") == 0
    for file in (tmp_path / "experiment_settings/tiny/pymodules/optim_sched").glob("*.py"):
        file.write_text("\n".join(line for line in file.read_text().splitlines() if "loss_registers" not in line))
    done = run_process(tmp_path, nproc=2)
    assert done.returncode == 0, done.stderr
    assert best_value(tmp_path, register) > 5 * bound


@pytest.mark.slow
def test_finetune_needs_its_adapters(tmp_path: Path) -> None:
    """With factors of rank 0 the head alone is trained, and the stated quality is missed."""
    register, bound = QUALITY["finetune"]
    write_example(tmp_path, "finetune", "parameters.rank=0")
    done = run_process(tmp_path, nproc=2)
    assert done.returncode == 0, done.stderr
    assert best_value(tmp_path, register) < bound


@pytest.mark.slow
def test_commit_of_finetune_is_as_small_as_its_adapters(tmp_path: Path) -> None:
    """A commit writes at most 1.2 times the bytes of the adapters and their optimizer states, besides records."""
    write_example(tmp_path, "finetune", "parameters.num_epochs=1", short_source=True)
    done = run_process(tmp_path, nproc=2)
    assert done.returncode == 0, done.stderr
    paths = ExperimentPaths(tmp_path, "tiny")
    files = newest_commit(paths).files
    number = files["module_ckps/last/backbone.pt"].generation
    # Names of earlier files, and further names of new ones, are links.
    new = {entry.object for entry in files.values() if entry.generation == number}
    written = {name.split("/", 1)[1]: (paths.generations / name).stat().st_size for name in new}
    assert {*written} >= {"module_ckps/last/backbone.pt", "module_ckps/last/head.pt", "optim_ckps/main.pt"}
    states = sum(size for path, size in written.items() if path.startswith(("module_ckps/", "optim_ckps/")))
    trained = [load_tensors(paths.data / f"module_ckps/last/{name}.pt") for name in ("backbone", "head")]
    moments = load_tensors(paths.data / "optim_ckps/main.pt")["state"].values()
    assert states <= 1.2 * sum(tensor.nbytes for state in (*trained, *moments) for tensor in state.values())
    # All weights of the backbone are many times as large.
    assert written["module_ckps/last/backbone.pt"] < files["module_ckps/constant/backbone.pt"].digest.size / 5
    assert sum(written.values()) - states < 10_000, "records"


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
    for home in (undisturbed, killed):
        write_example(home, name, *SHORT[name], "training.checkpoint_every_steps=3", short_source=True)
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
