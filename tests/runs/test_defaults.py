"""What an experiment may leave out: what stands for it, that it is frozen, and that it changes no bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pipeline.commands.new import templates
from pipeline.experiment.pymodules import assumptions
from pipeline.store.compare import first_difference
from tests.support.experiments import FILES, write_experiment
from tests.support.running import run_inside
from tests.support.verbs import call

RESULTS = Path("experiment_results/tiny")
WRITTEN = {
    "pymodules/datasets/curve.py",
    "pymodules/modules/net.py",
    "pymodules/module_transforms/curve.py",
    "pymodules/optim_sched/main.py",
}
ASSUMED = {
    "pymodules/data_transforms/curve.py",
    "pymodules/dataloaders/curve.py",
    "pymodules/checkpoint_saver.py",
    "pymodules/early_stopper.py",
    "pymodules/loss_weighter.py",
}


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    """A data home with an experiment of four files."""
    assert call(tmp_path, "new", "tiny", "--template", "minimal", "--set", "training.max_epochs=2") == 0
    return tmp_path


def frozen(home: Path) -> set[str]:
    return {path.relative_to(home / RESULTS).as_posix() for path in (home / RESULTS / "pymodules").rglob("*.py")}


def test_four_files_are_an_experiment_whose_copy_is_complete(minimal: Path) -> None:
    """The frozen copy has a file for everything that was left out, and a value for every settings key."""
    assert run_inside(minimal).is_finished
    assert frozen(minimal) == WRITTEN | ASSUMED
    settings = {path.stem: json.loads(path.read_text()) for path in (minimal / RESULTS / "settings").iterdir()}
    assert settings["training"]["max_epochs"] == 2
    assert settings["training"]["precision"] == "fp32"
    assert settings["logging"]["text"]["every_steps"] == 50
    assert settings["loss_registers"] == {"loss_registers": ["squared_error"]}


def test_check_explains_what_is_assumed(minimal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file and name that was left out has a line with what stands for it, and so have the settings."""
    shutil.rmtree(minimal / "experiment_settings/tiny/settings")
    assert call(minimal, "check", "tiny", "--explain") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("assumed: ")]
    for path in ASSUMED:
        assert any(line.startswith(f"assumed: {path}: ") for line in said), path
    for words in (
        "pymodules/dataloaders/curve.py: batches of 32, loaded by the training process itself",
        "settings/loss_registers.json: squared_error, all to be minimised, as in module_transforms/*.py",
        "pymodules/optim_sched/main.py: create_scheduler: learning rates stay constant",
        "pymodules/optim_sched/main.py: names of param groups: group_0",
        "pymodules/modules/net.py: settings: ",
    ):
        assert any(words in line for line in said), words
    (training,) = [line for line in said if line.startswith("assumed: settings/training.json")]
    assert "max_epochs 10" in training
    capsys.readouterr()
    # What is written is not assumed.
    assert call(minimal, "new", "whole", "--template", "digits") == 0
    assert call(minimal, "check", "whole", "--explain", "--no-batches") == 0
    assert "dataloaders" not in [line for line in capsys.readouterr().out.splitlines() if line.startswith("assumed: ")]


def test_what_was_assumed_is_what_its_author_could_have_written(minimal: Path) -> None:
    """An experiment that writes all of it down ends with the same bits."""
    run_inside(minimal)
    assert call(minimal, "new", "written", "--from", "tiny") == 0
    assert frozen(minimal) == WRITTEN | ASSUMED
    run_inside(minimal, name="written")
    assert first_difference(minimal / RESULTS / "data", minimal / "experiment_results/written/data") is None


def test_other_defaults_do_not_change_what_has_begun(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume reads the copy alone, whatever a later version would assume."""
    shutil.copytree(minimal, minimal / "left_alone")
    run_inside(minimal / "left_alone")
    run_inside(minimal, "--stop-after-epoch", "1")
    monkeypatch.setattr(assumptions, "_DEFAULTS", minimal / "gone")
    run_inside(minimal, "--resume")
    assert first_difference(minimal / RESULTS / "data", minimal / "left_alone" / RESULTS / "data") is None


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("pymodules/early_stoper.py", "early_stopper = 1\n", "Did you mean 'early_stopper.py'?"),
        ("pymodules/dataloader/curve.py", "x = 1\n", "Did you mean 'dataloaders'?"),
        ("pymodules/dataloaders/curv.py", "train_dataloader_args = {}\n", "Did you mean 'curve'?"),
        ("pymodules/dataloaders/curve.py", "train_dataloader_arg = {}\n", "Did you mean 'train_dataloader_arg'?"),
        ("pymodules/optim_sched/main.py", "create_optimiser = 1\n", "Did you mean 'create_optimiser'?"),
        ("pymodules/modules/net.py", "module = 1\nsetings = {}\n", "Did you mean 'setings'?"),
        ("settings/trainin.json", "{}", "Did you mean 'training.json'?"),
    ],
)
def test_misspelt_name_is_never_replaced_by_a_default(
    minimal: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, said: str
) -> None:
    """A file or name that is nearly right is reported with the right one."""
    path = minimal / "experiment_settings/tiny" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert call(minimal, "check", "tiny") == 2
    assert said in capsys.readouterr().err


def test_new_writes_commented_stubs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stubs of two datasets and two modules need nothing but points to be an experiment that trains."""
    words = ["--dataset", "houses", "--dataset", "flats", "--module", "trunk", "--module", "head"]
    assert call(tmp_path, "new", "mine", "--empty", *words) == 0
    assert "check mine" in capsys.readouterr().out
    folder = tmp_path / "experiment_settings/mine"
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    names = ["datasets/flats", "datasets/houses", "module_transforms/flats", "module_transforms/houses"]
    pymodules = {f"pymodules/{name}.py" for name in [*names, "modules/head", "modules/trunk", "optim_sched/main"]}
    assert written == {*pymodules, "settings/parameters.json"}
    assert all('"""' in (folder / path).read_text() for path in pymodules)
    assert call(tmp_path, "check", "mine") == 2
    said = capsys.readouterr().err
    assert said.count("the train split must have points") == 2
    assert "2 problems" in said
    for name in ("houses", "flats"):
        path = folder / f"pymodules/datasets/{name}.py"
        points = '[{"input": torch.ones(1) * x, "target": 1.0} for x in range(50)]'
        text = path.read_text().replace("self.points = []", f"self.points = {points}")
        text = text.replace(
            "            return []\n        return []", "            return range(40)\n        return range(40, 50)"
        )
        path.write_text(text.replace("from pipeline", "import torch\n\nfrom pipeline", 1))
    run_inside(tmp_path, "--stop-after-epoch", "1", name="mine")


def test_names_of_stubs_need_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are not silently ignored, and must be names."""
    assert call(tmp_path, "new", "mine", "--dataset", "houses") == 2
    assert "--empty, which is not given" in capsys.readouterr().err
    assert call(tmp_path, "new", "mine", "--empty", "--dataset", "../houses") == 2
    assert "must be letters, digits, _ and -" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.py"))


def test_templates_are_listed_with_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The list says what each example is for."""
    assert call(tmp_path, "new", "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(templates())
    assert all(len(line.split()) > 5 for line in lines)


def test_experiment_without_registers_file_may_not_list_metrics_by_accident(tmp_path: Path) -> None:
    """Where a file lists registers, it decides; where none does, all that transforms name are minimised."""
    write_experiment(tmp_path, files={"settings/loss_registers.json": None})
    run_inside(tmp_path, "--stop-after-epoch", "0")
    copy = json.loads((tmp_path / RESULTS / "settings/loss_registers.json").read_text())
    assert copy == {"loss_registers": ["loss_a", "error", "loss_b"]}
    assert "loss_b" in FILES["pymodules/module_transforms/b.py"]
