"""Modules and batches that are not the usual ones: they train, or ``check`` refuses them with a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.__main__ import main
from tests.proof.experiments import write_deep
from tests.support.experiments import write_experiment
from tests.support.running import run_inside, run_process

DOUBLE = """
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, images):
        return (images[:, 0, 0, :] * self.weight).sum(1, keepdim=True).float()


module = Wide()
"""
COMPLEX = DOUBLE.replace("float64", "complex64").replace("keepdim=True)", "keepdim=True).real")
SPARSE = """
import torch
from torch import nn


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(6, 1, sparse=True)

    def forward(self, images):
        return self.rows(torch.arange(6, device=images.device)).sum() * images[:, 0, 0, :1]


module = Rows()
"""
BANK = """
import torch
from torch import nn


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.register_buffer("bank", torch.zeros(0, 6))

    def forward(self, images):
        self.bank = torch.cat([self.bank, images[:, 0, 0, :].detach()])
        return self.linear(images[:, 0, 0, :])


module = Bank()
"""


@pytest.mark.parametrize("module", [DOUBLE, COMPLEX, SPARSE], ids=["float64", "complex", "sparse"])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_unusual_gradients_train_and_are_clipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], module: str, clip: float | None
) -> None:
    """What check calls ok takes its steps."""
    write_deep(tmp_path, module=module, training={"grad_clip_norm": clip})
    assert main(["check", "deep", "--data-home", str(tmp_path)]) == 0
    assert "update: trunk took" in capsys.readouterr().out
    run_inside(tmp_path, "--stop-after-epoch", "1", name="deep")


def test_buffer_that_grows_is_refused_by_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A commit could not be loaded into a module that was built anew."""
    write_deep(tmp_path, module=BANK)
    assert main(["check", "deep", "--data-home", str(tmp_path)]) == 2
    assert "modules/trunk.py: buffer 'bank' must keep its shape and type" in capsys.readouterr().err


def test_update_that_fails_is_found_by_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No "ok" that dies at the first step."""
    pymodules = write_deep(tmp_path) / "pymodules"
    (pymodules / "optim_sched" / "trunk.py").write_text(
        """
from torch.optim import SGD

from pipeline.components import BaseScheduler


class Broken(SGD):
    def step(self, closure=None):
        raise ValueError("no such momentum")


def create_optimizer(modules):
    return Broken([{"name": "trunk", "params": modules["trunk"].parameters()}], lr=0.1)


def create_scheduler(optimizer):
    return BaseScheduler()
"""
    )
    assert main(["check", "deep", "--data-home", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "optim_sched/trunk.py:9: an update must work, but raises ValueError: no such momentum" in message


COLLECTIVE = """
import torch.distributed as dist

from pipeline.components import BaseModuleTransform

loss_registers = ["loss_a", "error"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        outputs = modules["head_a"](modules["trunk"](modules["stem"](batch["x"])))[:, 0]
        dist.all_reduce(outputs.detach())
        return {"loss_a": (outputs - batch["y"]) ** 2, "error": outputs.detach().abs()}
"""


def test_collective_inside_a_batch_is_explained_at_once(tmp_path: Path) -> None:
    """Ranks have different numbers of batches: it would hang until the timeout, half an hour later."""
    write_experiment(tmp_path, files={"pymodules/module_transforms/a.py": COLLECTIVE})
    done = run_process(tmp_path, nproc=2)
    # Both datasets use the class, and either rank may be the first to say so.
    words = (
        r"module_transforms/[ab]\.py must compute with its own batch alone, but calls torch\.distributed\.all_reduce"
    )
    assert re.search(words, done.stderr)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("gradient_accumulation_steps", "step_min_items items (settings/data_loading.json)"),
        ("epochs", "max_epochs or max_steps, both in settings/training.json"),
        ("lr", "created in pymodules/optim_sched/*.py"),
        ("batch_size", "an argument in pymodules/dataloaders/*.py"),
        ("device", "--device cpu"),
    ],
)
def test_words_of_other_trainers_lead_to_the_right_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, words: str
) -> None:
    """In a settings file and with --set; a nearest key would send a newcomer astray."""
    write_experiment(tmp_path, training={key: 1})
    assert main(["check", "tiny", "--data-home", str(tmp_path)]) == 2
    assert f"For {key}: " in (message := capsys.readouterr().err)
    assert words in message
    write_experiment(tmp_path)
    assert main(["check", "tiny", "--data-home", str(tmp_path), "--set", f"training.{key}=1"]) == 2
    assert words in capsys.readouterr().err
