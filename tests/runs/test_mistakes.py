"""Mistakes that people make in their first hour: each gets one sentence with file, line and the right remedy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.running import run_inside, run_process
from tests.support.verbs import call

DATASET = "pymodules/datasets/curve.py"
TRANSFORM = "pymodules/module_transforms/curve.py"
MODULE = "pymodules/modules/net.py"
OPTIMIZER = "pymodules/optim_sched/main.py"


class Mistake(NamedTuple):
    """An edit of the smallest example, what check says of it, and the edit that the remedy asks for."""

    file: str
    old: str
    new: str
    where: str
    what: str
    fix: str
    repair: tuple[str, str] = ("", "")


LOSS = '(modules["net"](batch["x"]) - batch["y"])[:, 0] ** 2'
MISTAKES = {
    "loss averaged": Mistake(
        TRANSFORM,
        LOSS,
        '((modules["net"](batch["x"]) - batch["y"]) ** 2).mean()',
        f"{TRANSFORM}:7",
        "must return one value per item for 'squared_error', here 32, but returned a tensor of shape ()",
        'reduction="none"',
        (".mean()", "[:, 0]"),
    ),
    "loss broadcast": Mistake(
        TRANSFORM,
        LOSS,
        '(modules["net"](batch["x"]) - batch["y"][:, 0]) ** 2',
        f"{TRANSFORM}:7",
        "returned a tensor of shape (32, 32): outputs and targets of different shapes were broadcast",
        "outputs[:, 0]",
        ('(batch["x"]) -', '(batch["x"])[:, 0] -'),
    ),
    "loss with dimensions": Mistake(
        TRANSFORM,
        LOSS,
        '((modules["net"](batch["x"]) - batch["y"]) ** 2).expand(-1, 3)',
        f"{TRANSFORM}:7",
        "returned a tensor of shape (32, 3)",
        ".flatten(1).mean(dim=1)",
        (".expand(-1, 3)", ".flatten(1).mean(dim=1)"),
    ),
    "one key too many": Mistake(
        TRANSFORM,
        '{"squared_error"',
        '{"mae": batch["x"][:, 0], "squared_error"',
        f"{TRANSFORM}:7",
        "must return only its loss_registers, squared_error, but also has mae",
        "add mae to loss_registers in this file",
        ('loss_registers = ["squared_error"', 'loss_registers = ["mae", "squared_error"'),
    ),
    "dataset returns a tuple": Mistake(
        DATASET,
        'return {"x": x, "y": torch.sin(3 * x)}',
        "return x, torch.sin(3 * x)",
        f"{DATASET}:5",
        'a point must be a dict, so that batch["name"] works, but __getitem__ returns a tuple',
        'return {"input": …, "target": …}',
        ("return x, torch.sin(3 * x)", 'return {"x": x, "y": torch.sin(3 * x)}'),
    ),
    "None in a point": Mistake(
        DATASET,
        'return {"x": x,',
        'return {"mask": None, "x": x,',
        f"{DATASET}:5",
        "every value of a point must be a number, an array or a tensor, but mask is None",
        "leave it out",
        ('"mask": None, ', ""),
    ),
    "wrong key of the batch": Mistake(
        TRANSFORM,
        'batch["y"]',
        'batch["Y"]',
        f"{TRANSFORM}:8",
        "KeyError: 'Y'",
        "the batch has x, y; the modules are net",
    ),
    "float64 points": Mistake(
        DATASET,
        "torch.tensor([idx / 500 - 1])",
        "torch.tensor([idx / 500 - 1], dtype=torch.float64)",
        f"{TRANSFORM}:8",
        "must have the same dtype",
        "x, y of the batch is float64, weights are float32: cast it in datasets/curve.py",
        (", dtype=torch.float64", ", dtype=torch.float32"),
    ),
    "wrong width": Mistake(
        MODULE,
        "nn.Linear(1, 32)",
        "nn.Linear(3, 32)",
        f"{TRANSFORM}:8",
        "shapes cannot be multiplied",
        "the batch has x (32, 1), y (32, 1); first layers: net Linear(in_features=3, out_features=32",
        ("nn.Linear(3, 32)", "nn.Linear(1, 32)"),
    ),
    "class instead of instance": Mistake(
        MODULE,
        "module = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))",
        "module = nn.Sequential",
        f"{MODULE}:3",
        "module must be a torch.nn.Module, but is <class",
        "write Sequential(…)",
    ),
    "mask instead of indices": Mistake(
        DATASET,
        'return [idx for idx in range(1000) if (idx % 5 == 0) == (split == "val")]',
        'return torch.arange(1000) % 5 == (0 if split == "val" else 1)',
        DATASET,
        "'train' must be a list of integers, but has shape (1000,) of bool",
        "np.flatnonzero turns this mask into indices",
    ),
    "a module on the GPU": Mistake(
        MODULE,
        "nn.Linear(32, 1))",
        "nn.Linear(32, 1)).cuda()",
        f"{MODULE}:3",
        "must be importable, but raises",
        "",
    ),
    "a batch on the GPU": Mistake(
        TRANSFORM,
        'batch["x"])',
        'batch["x"].cuda())',
        f"{TRANSFORM}:8",
        "Torch not compiled with CUDA enabled",
        "leave devices to the pipeline: it moves modules and batches",
        (".cuda()", ""),
    ),
    "a module in no optimizer": Mistake(
        OPTIMIZER,
        'modules["net"].parameters()',
        '[*modules["net"].parameters()][1:]',
        f"{MODULE}:3",
        "every parameter must be in exactly one optimizer, but '0.weight' are in none",
        'give modules["net"].parameters() to one in create_optimizer',
    ),
    "a scheduler of torch's": Mistake(
        OPTIMIZER,
        "lr=0.01)\n",
        "lr=0.01)\n\n\ndef create_scheduler(optimizer):\n    return StepLR(optimizer, 5)\n",
        f"{OPTIMIZER}:9",
        "create_scheduler must return an object with a method",
        "return TorchScheduler(StepLR(…))",
    ),
    "a helper imported by its bare name": Mistake(
        MODULE,
        "from torch import nn\n",
        "from torch import nn\nfrom utils.net import x\n",
        f"{MODULE}:2",
        "must be importable, but raises ModuleNotFoundError: No module named 'utils'",
        "files of an experiment import each other with two dots: from ..utils.net import x",
        ("from utils.net", "from ..utils.net"),
    ),
}


def home_with(tmp_path: Path, mistake: Mistake) -> Path:
    """Write the smallest example with a mistake in it; returns the file."""
    assert call(tmp_path, "new", "tiny", "--template", "minimal", "--set", "training.max_epochs=1") == 0
    folder = tmp_path / "experiment_settings/tiny"
    (folder / "pymodules/utils").mkdir()
    (folder / "pymodules/utils/net.py").write_text("x = 1\n")
    path = folder / mistake.file
    text = path.read_text()
    assert mistake.old in text
    text = text.replace(mistake.old, mistake.new, 1)
    if "StepLR" in text:
        text = text.replace("import Adam\n", "import Adam\nfrom torch.optim.lr_scheduler import StepLR\n")
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_sentence_with_the_right_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """One problem with file and line, what was found, and what to do; doing so makes the experiment train."""
    mistake = MISTAKES[name]
    path = home_with(tmp_path, mistake)
    assert call(tmp_path, "check", "tiny") == 2
    said = capsys.readouterr().err
    assert "1 problem.\n" in said, said
    assert f"/tiny/{mistake.where}" in said, said
    assert mistake.what in said, said
    assert mistake.fix in said, said
    assert "PipelineError" not in said
    old, new = mistake.repair
    if old:
        path.write_text(path.read_text().replace(old, new))
        assert call(tmp_path, "check", "tiny") == 0, capsys.readouterr().err
        run_inside(tmp_path)


def test_broken_contract_in_training_names_the_start_again(tmp_path: Path) -> None:
    """The same sentence when nobody has asked check; what was repaired is used by the same command."""
    path = home_with(tmp_path, MISTAKES["loss averaged"])
    done = run_process(tmp_path)
    assert done.returncode == 1
    assert f"{path}:7: must return one value per item" in done.stderr
    path.write_text(path.read_text().replace(".mean()", "[:, 0]"))
    assert run_process(tmp_path).returncode == 0


def test_metric_that_would_be_minimised_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a list of registers all are losses; check says so as soon as there are several."""
    both = Mistake(TRANSFORM, '["squared_error"]', '["squared_error", "error"]', "", "", "", ("", ""))
    path = home_with(tmp_path, both)
    path.write_text(path.read_text().replace('{"squared_error"', '{"error": batch["x"][:, 0].abs(), "squared_error"'))
    assert call(tmp_path, "check", "tiny") == 0
    assert "without settings/loss_registers.json all of squared_error, error are minimised" in capsys.readouterr().out


def test_wrong_setting_is_one_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is assumed for files that were left out also holds while settings are wrong."""
    assert call(tmp_path, "new", "tiny", "--template", "minimal") == 0
    assert call(tmp_path, "check", "tiny", "--set", "training.max_epoch=3") == 2
    said = capsys.readouterr().err
    assert "Did you mean 'max_epochs'" in said or "max_epochs" in said
    assert "early_stopper" not in said


def test_options_of_a_run_are_placed_behind_dashes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run NAME --resume` and `--lr 1e-3` say how they are written here."""
    with pytest.raises(SystemExit):
        call(home, "run", "tiny", "--resume")
    assert "run … -- --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call(home, "train", "tiny", "--lr", "1e-3")
    assert "--set parameters.lr=VALUE" in capsys.readouterr().err


def test_misspelt_experiment_names_the_command_that_was_meant(home: Path) -> None:
    """The remedy is the right name, not a new experiment of the wrong one."""
    done = run_process(home, name="tinny")
    assert done.returncode == 2
    assert "Did you mean 'tiny'?" in done.stderr
    assert " tiny " in done.stderr.split("fix: ")[1]
    assert "new tinny" not in done.stderr


def test_leaving_the_debugger_is_no_crash(home: Path) -> None:
    """`q` at the prompt ends the run with a word about how to continue, and no traceback."""
    path = home / "experiment_settings/tiny/pymodules/module_transforms/a.py"
    path.write_text(
        path.read_text().replace("outputs = modules", "import bdb; raise bdb.BdbQuit\n        outputs = modules")
    )
    done = run_process(home)
    assert done.returncode == 1
    assert "The debugger was left. The last commit is intact." in done.stderr
    assert "Traceback" not in done.stderr


def test_variant_of_edited_settings_says_what_it_is_of(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy is of what ran; edits since then are named."""
    run_inside(home, "--stop-after-epoch", "0")
    (home / "experiment_settings/tiny/settings/training.json").write_text('{"seed": 99}')
    assert call(home, "new", "variant", "--from", "tiny") == 0
    assert "not in it, because edited since: settings/training.json" in capsys.readouterr().out


def test_try_recommends_the_real_run_with_the_same_values(home: Path) -> None:
    """What --set has changed in a try is in the command that it recommends."""
    done = run_process(home, "--limit-batches", "1", "--set", "training.max_epochs=1")
    assert done.returncode == 0, done.stderr
    assert "--set training.max_epochs=1    (the real run; nothing of this try is used)" in done.stdout
