"""The verbs with which a user proves exactness on an experiment of their own, and finds what breaks it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from pipeline.__main__ import main
from pipeline.commands import verify_resume
from pipeline.errors import PipelineError
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
# What a rank adds to its own outputs, or to its own copy of a weight, shows only with several processes.
RANK_IN_OUTPUTS = """
    import os

    from torch import nn


    class Head(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 0.001 * int(os.environ.get("RANK", "0"))


    module = Head(8, 1)
    settings = {}
"""
RANK_IN_WEIGHTS = """
    import os

    import torch
    from torch import nn


    class Head(nn.Linear):
        def forward(self, x):
            outputs = super().forward(x)
            if os.environ.get("RANK") == "1" and self.training:
                self.bias.data = self.bias.data + 0.001
            return outputs


    module = Head(8, 1)
    settings = {}
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


def verify_numbers(home: Path, numbers: str, *words: str, files: dict[str, str | None] | None = None) -> int:
    write_experiment(home, files=files, training={"gradient_reduction": "exact"})
    return verify(home, "--nproc", numbers, *words)


@pytest.mark.slow
def test_exactness_at_several_numbers_of_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each number runs uninterrupted, a resume changes it, and the output names what was proved."""
    assert verify_numbers(tmp_path, "1,2", "--steps", "2") == 0
    said = capfd.readouterr().out.splitlines()
    assert [line.removeprefix("tiny: ") for line in said[:-1]] == [
        "2 steps without interruption with 1 process …",
        "2 steps without interruption with 2 processes …",
        "killed before step 2 with 1 process …",
        "resumed to the end with 2 processes …",
    ]
    assert said[-1] == (
        "exact: 8 batches, their losses, all weights and every committed file have the same bits with 1 and 2 "
        "processes, uninterrupted and killed"
    )


@pytest.mark.slow
def test_proof_names_the_numbers_that_were_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer lives than numbers, the output claims only what was run; all have the same number of threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert verify_numbers(tmp_path, "3,1,2", "--steps", "4") == 0
    said = capfd.readouterr().out
    assert "the same bits with 3, 1 and 2 processes uninterrupted, and with 3 and 1 processes killed" in said


def test_difference_names_the_number_of_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A module that depends on its rank is found at the first number that shows it; nothing more is run."""
    assert verify_numbers(tmp_path, "1,2,3", files={"pymodules/modules/head_a.py": RANK_IN_OUTPUTS}) == 1
    said = capfd.readouterr().out
    assert "first difference: with 2 processes, epoch 1, step 1: the losses " in said
    assert "look at module_transforms/a.py" in said
    assert "let nothing depend on the rank" in said
    assert "with 3 processes" not in said


@pytest.mark.slow
def test_weights_of_every_rank_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights of a rank that neither commits nor is the last one count as well: the run itself finds them."""
    assert verify_numbers(tmp_path, "1,3", files={"pymodules/modules/head_a.py": RANK_IN_WEIGHTS}) == 1
    said = capfd.readouterr().err
    assert "The run failed, so there is nothing to compare" in said
    assert "rank 1 differs from ranks 0 and 2 in weight" in said


@pytest.mark.slow
def test_difference_after_a_kill_names_the_number_of_the_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What only a resume loses is found in the life after the kill."""
    assert verify_numbers(tmp_path, "1,2", files={"pymodules/loss_weighter.py": FORGETFUL_WEIGHTER}) == 1
    said = capfd.readouterr().out
    assert "first difference: with 2 processes, epoch 1, step 4: loss weights" in said
    assert "Weighter.count was 3 before the kill and is 0 after the resume" in said


@pytest.mark.parametrize("training", [{}, {"parallelism": "fsdp"}, {"sync_batchnorm": True}])
def test_several_numbers_need_exact_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, training: dict[str, Any]
) -> None:
    """Without exact reduction only rounding is promised; the line in the remedy is accepted as it stands."""
    home = tmp_path / "data home"
    write_experiment(home, training=training)
    assert verify(home, "--nproc", "1,2", "--set", "training.seed=4") == 2
    sentence, fix = capsys.readouterr().err.splitlines()
    assert 'only with gradient_reduction: "exact", but the settings of \'tiny\' have "fast".' in sentence
    line = shlex.split(fix.removeprefix("  fix: "))
    verb = line.index("verify-resume")
    assert line[verb + 1] == "tiny"
    assert {"training.seed=4", "training.gradient_reduction=exact", str(home)} <= set(line)
    monkeypatch.setattr(verify_resume, "retrace", fail_to_run)
    assert main(line[verb:]) == 1
    assert capsys.readouterr().err == "this would run\n"


def fail_to_run(*arguments: object) -> NoReturn:
    raise PipelineError("this would run")


@pytest.mark.parametrize("numbers", ["0", "1,0", "2,2", "1,,2", "1,two", ""])
def test_bad_numbers_of_processes_are_refused(home: Path, capsys: pytest.CaptureFixture[str], numbers: str) -> None:
    """Each number must be 1 or more and be named once."""
    with pytest.raises(SystemExit) as raised:
        verify(home, "--nproc", numbers)
    assert raised.value.code == 2
    assert f"--nproc: must be a number from 1 on, or several different ones such as 1,2,3, but is {numbers!r}" in (
        capsys.readouterr().err
    )


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
