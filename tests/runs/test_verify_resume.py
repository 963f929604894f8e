"""The verbs with which a user proves exactness on an experiment of their own, and finds what breaks it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.__main__ import main
from tests.support.experiments import FILES, tree, write_experiment
from tests.support.running import run_inside, run_process

OWN_GENERATOR = """
    import numpy as np

    from pipeline.components import BaseDataTransform


    class TrainDataTransform(BaseDataTransform):
        def __init__(self):
            self.generator = np.random.default_rng(0)

        def __call__(self, data_point):
            data_point["x"] = data_point["x"] + np.float32(self.generator.normal())


    class EvalDataTransform(BaseDataTransform):
        pass
"""
FORGETFUL_WEIGHTER = """
    from pipeline.components import BaseLossWeighter


    class Weighter(BaseLossWeighter):
        count = 0

        def __init__(self):
            self.count = 0

        def after_train_step(self, losses):
            self.count += 1

        def get_loss_weight(self, register):
            return 1.0 + 0.1 * self.count


    loss_weighter = Weighter()
"""
UNORDERED_SPLIT = FILES["pymodules/utils/points.py"].replace(
    'return [idx for idx in idxs if (idx % 5 == 0) == (split == "val")]',
    'return [int(word) for word in {str(idx) for idx in idxs if (idx % 5 == 0) == (split == "val")}]',
)


def verify(home: Path, *words: str) -> int:
    return main(["verify-resume", "tiny", "--data-home", str(home), "--steps", "6", "--kills", "1", *words])


def test_sound_experiment_is_exact(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The tiny experiment passes, and nothing of it or beside it is touched."""
    before = tree(home)
    assert verify(home) == 0
    said = capfd.readouterr().out
    assert "exact: 22 batches, their losses, all weights and every committed file have the same bits" in said
    assert "note" not in said
    assert tree(home) == before


@pytest.mark.slow
def test_exactness_at_two_processes(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Under torchrun the batches of all processes are compared."""
    assert verify(home, "--nproc", "2") == 0
    assert "exact: 22 batches" in capfd.readouterr().out


BROKEN = {
    "a generator of one's own": (
        {"pymodules/data_transforms/a.py": OWN_GENERATOR},
        ["a loaded batch of ", "data_transforms/a.py", "TrainDataTransform.generator was Generator"],
    ),
    "a counter that is not saved": (
        {"pymodules/loss_weighter.py": FORGETFUL_WEIGHTER},
        ["loss weights", "loss_weighter.py: Weighter.count was 3 before the kill and is 0 after the resume"],
    ),
}


@pytest.mark.parametrize("flaw", [pytest.param(one, marks=pytest.mark.slow) for one in BROKEN])
def test_culprit_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str], flaw: str) -> None:
    """What breaks exactness is told with its file and attribute."""
    files, words = BROKEN[flaw]
    write_experiment(tmp_path, files=files)
    assert verify(tmp_path) == 1
    said = capfd.readouterr().out
    assert "NOT exact" in said
    for word in words:
        assert word in said


@pytest.mark.slow
def test_unordered_split_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An order that comes from a set is refused at the resume, with the dataset's name and the likely cause."""
    write_experiment(tmp_path, files={"pymodules/utils/points.py": UNORDERED_SPLIT})
    assert verify(tmp_path) == 1
    said = capfd.readouterr().err
    assert "datasets/a.py: the train split has as many points as before, but other ones or in another order" in said
    assert "such as a set" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify-resume", "tinny"], "Did you mean 'tiny'?"),
        (["verify-resume", "tiny", "--steps", "2", "--kills", "2"], "--steps must exceed --kills"),
        (["replay", "tinny", "--epoch", "1", "--step", "1"], "No results of 'tinny'"),
        (["fsck", "tinny"], "No results of 'tinny'"),
    ],
)
def test_bad_input_is_told(home: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """Unknown names and impossible numbers end with code 2 and a sentence."""
    assert main([*words, "--data-home", str(home)]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment."""
    home = tmp_path_factory.mktemp("finished")
    write_experiment(home)
    run_inside(home)
    return home


def replay(home: Path, *words: str) -> int:
    return main(["replay", "tiny", "--data-home", str(home), *words])


def test_past_step_is_rebuilt_exactly(finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A step that no commit is left of is rebuilt from the beginning, with the bits that were recorded."""
    before = tree(finished)
    assert replay(finished, "--epoch", "2", "--step", "3", "--json", "--save", str(tmp_path / "saved")) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["record"] == "identical"
    assert found["from"] == "the beginning"
    assert sum(len(batch["points"]) for batch in found["batches"]) >= 14
    saved = torch.load(tmp_path / "saved/batches_0.pt", weights_only=True)
    assert saved["0"]["batch"]["x"].shape == (4, 6)
    assert saved["0"]["losses"]["loss_a"].shape == (4,)
    assert tree(finished) == before


def test_recent_step_is_rebuilt_from_a_commit(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A step after a commit that is still kept needs no more than that commit."""
    assert replay(finished, "--epoch", "3", "--step", "5") == 0
    said = capfd.readouterr().out
    assert "1 process, from commit 12 (epoch 3, training, step 4)" in said
    assert "identical to the record" in said


@pytest.mark.slow
def test_step_of_the_running_epoch_is_rebuilt(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The steps of an epoch that is not complete are compared as well, and one that is still to come is shown."""
    write_experiment(tmp_path, files={"pymodules/module_transforms/b.py": FAILS_LATE})
    assert run_process(tmp_path).returncode == 1
    assert replay(tmp_path, "--epoch", "2", "--step", "2") == 0
    assert "identical to the record" in capfd.readouterr().out


@pytest.mark.slow
def test_step_that_does_not_exist_is_refused(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An epoch has only so many steps."""
    assert replay(finished, "--epoch", "2", "--step", "6") == 1
    assert "has no step 6" in capfd.readouterr().err


FAILS_LATE = """
    from . import a

    loss_registers = ["loss_b", "error"]


    class ModuleTransform(a.ModuleTransform):
        head = "head_b"
        register = "loss_b"
        num_calls = 0

        def __call__(self, batch, modules):
            self.num_calls += modules["trunk"].training
            if self.num_calls == 14:
                raise ValueError("too late")
            return super().__call__(batch, modules)
"""
