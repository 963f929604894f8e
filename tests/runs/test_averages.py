"""Averages of weights: by their formula, evaluated instead of or beside their source, the same bits after kills."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoint.parts import PersistedParts
from pipeline.experiment.pymodules.definitions import AverageSettings
from pipeline.store.compare import first_difference, read_any
from pipeline.training.averages import _Follower
from tests.crash.campaign import live
from tests.support.experiments import FILES, tree, write_experiment
from tests.support.running import run_inside, run_process
from tests.support.verbs import call

DATA = Path("experiment_results/tiny/data")
_TRUNK = FILES["pymodules/modules/trunk.py"]
# Writes the weights of the trunk after every update to a file.
_WATCHED = (FILES["pymodules/optim_sched/trunk.py"] or "").replace(
    "return AdamW([{",
    """def keep(optimizer, arguments, options):
                steps.append([weight.detach().clone() for weight in modules["trunk"].parameters()])
                torch.save(steps, os.environ["KEPT_STEPS"])

            steps = []
            optimizer = AdamW([{""",
)
_HOOK = "\n            optimizer.register_step_post_hook(keep)\n            return optimizer"


def average(**settings: Any) -> dict[str, str | None]:
    return {"pymodules/modules/ema.py": f"settings = { ({'average_of': 'trunk', **settings})!r}\n"}


def write(home: Path, files: dict[str, str | None], **training: Any) -> Path:
    write_experiment(home, files=files, training={"checkpoint_every_steps": 1, **training})
    return home


def weights(home: Path, module: str, pool: str = "last") -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = read_any(home / DATA / f"module_ckps/{pool}/{module}.pt")
    return state


def followed(home: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Train, and return the trunk's weights after each update, and the average at the end."""
    monkeypatch.setenv("KEPT_STEPS", str(home / "steps.pt"))
    text = _WATCHED.replace(
        "lr=0.01)", "lr=0.01)\n            optimizer.register_step_post_hook(keep)\n            return optimizer"
    )
    text = "import os\n\nimport torch\n" + "\n".join(line[8:] for line in text.splitlines()) + "\n"
    write(home, {**average(**settings), "pymodules/optim_sched/trunk.py": text})
    run_inside(home)
    return torch.load(home / "steps.pt"), weights(home, "ema")


def test_moving_average_follows_its_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decay warms up: the first updates count more than those that follow."""
    steps, found = followed(tmp_path, monkeypatch, decay=0.8)
    names = [
        name
        for name, _ in torch.nn.Sequential(
            torch.nn.Linear(6, 8, bias=False), torch.nn.BatchNorm1d(8)
        ).named_parameters()
    ]
    expected = [weights(tmp_path, "trunk", "init")[name].double() for name in names]
    for number, after in enumerate(steps, 1):
        decay = min(0.8, (1 + number) / (10 + number))
        expected = [decay * one + (1 - decay) * two.double() for one, two in zip(expected, after, strict=True)]
    assert len(steps) == 15
    for name, wanted in zip(names, expected, strict=True):
        torch.testing.assert_close(found[name].double(), wanted, rtol=1e-5, atol=1e-6)
    # Buffers are those of the source.
    assert torch.equal(found["1.running_mean"], weights(tmp_path, "trunk")["1.running_mean"])
    # An average of weights is in no optimizer, and is not trained.
    assert set(read_any(tmp_path / DATA / "optim_ckps/trunk.pt")["state"]) == {0, 1, 2}


def test_equal_weights_from_an_epoch_on_are_a_plain_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every second update from epoch 2 on: what SWA is."""
    steps, found = followed(tmp_path, monkeypatch, decay=None, start_epoch=2, every_steps=2)
    taken = [after[0].double() for after in steps[5:]][1::2]
    assert len(taken) == 5
    torch.testing.assert_close(found["0.weight"].double(), torch.stack(taken).mean(dim=0), rtol=1e-5, atol=1e-6)


def values(home: Path, register: str) -> list[float]:
    found: list[float] = read_any(home / DATA / f"loss_reg_data/val/{register}/epoch_data.npz")["means"].tolist()
    return found


def test_average_is_evaluated_instead_of_its_source_or_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside has registers of its own, with the values that instead has; the training is the same without."""
    homes = {name: tmp_path / name for name in ("instead", "beside", "none")}
    run_inside(write(homes["instead"], average(decay=0.9)))
    run_inside(write(homes["beside"], average(decay=0.9, evaluate="beside")))
    run_inside(write(homes["none"], {}))
    assert values(homes["beside"], "ema/loss_a") == values(homes["instead"], "loss_a")
    assert values(homes["beside"], "loss_a") == values(homes["none"], "loss_a")
    assert values(homes["instead"], "loss_a") != values(homes["none"], "loss_a")
    for name in ("instead", "beside"):
        assert torch.equal(weights(homes[name], "trunk")["0.weight"], weights(homes["none"], "trunk")["0.weight"])
        assert torch.equal(weights(homes[name], "ema")["0.weight"], weights(homes["beside"], "ema")["0.weight"])
    # Everyone who reads results knows the registers of the average.
    frozen = json.loads((homes["beside"] / "experiment_results/tiny/settings/loss_registers.json").read_text())
    assert "ema/error" in [entry["name"] for entry in frozen["loss_registers"] if isinstance(entry, dict)]
    assert call(homes["beside"], "status", "tiny") == 0
    assert "ema/loss_a" in capsys.readouterr().out
    assert call(homes["beside"], "report", "tiny") == 0
    # evaluate swaps as the run did.
    assert call(homes["instead"], "evaluate", "tiny", "--pool", "last", "--json") == 0
    said = capsys.readouterr().out
    found = json.loads(said[said.index("{") :])["values"]
    assert found["loss_a"]["mean"] == values(homes["instead"], "loss_a")[-1]


def test_stopper_may_follow_a_register_of_an_average(tmp_path: Path) -> None:
    """The pool of the best epoch is chosen by it, and holds the average."""
    stopper = """
        from pipeline.components import RegisterEarlyStopper

        early_stopper = RegisterEarlyStopper("ema/error", max_epochs=2)
    """
    files = {**average(evaluate="beside"), "pymodules/early_stopper.py": stopper}
    run_inside(write(tmp_path, files))
    assert weights(tmp_path, "ema", "best").keys() == weights(tmp_path, "trunk", "best").keys()


def test_batchnorm_of_an_average_is_computed_for_its_weights(tmp_path: Path) -> None:
    """The statistics are those of the averaged weights over training batches, and differ from the source's."""
    run_inside(write(tmp_path, average(decay=None, update_bn=6)))
    found, source = weights(tmp_path, "ema"), weights(tmp_path, "trunk")
    # The commit of the last evaluation has them; it holds the files of the end.
    assert not torch.equal(found["1.running_mean"], source["1.running_mean"])
    assert int(found["1.num_batches_tracked"]) == 6
    assert torch.equal(found["1.running_mean"], weights(tmp_path, "ema", "best")["1.running_mean"]) or (
        values(tmp_path, "loss_a")[-1] != min(values(tmp_path, "loss_a"))
    )


def test_statistics_are_computed_with_all_other_modules_as_in_an_evaluation(tmp_path: Path) -> None:
    """Also before the first training epoch, and after a resume at an evaluation: nothing depends on the mode before."""
    text = (FILES["pymodules/module_transforms/a.py"] or "").replace(
        "outputs = modules",
        'assert modules[self.head].training is modules["trunk"].training\n                outputs = modules',
    )
    files = {**average(update_bn=3, evaluate="beside"), "pymodules/module_transforms/a.py": text}
    assert run_inside(write(tmp_path, files)).is_finished


def test_average_that_is_not_evaluated_can_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """evaluate --average swaps it in, and names those there are."""
    run_inside(write(tmp_path, average(decay=0.5, evaluate="beside")))
    capsys.readouterr()
    assert call(tmp_path, "evaluate", "tiny", "--pool", "last", "--average", "ema", "--json") == 0
    found = json.loads(capsys.readouterr().out)["values"]
    assert found["loss_a"]["mean"] == values(tmp_path, "ema/loss_a")[-1]
    assert call(tmp_path, "evaluate", "tiny", "--average", "em") == 2
    assert "No average 'em'; there are ema. Did you mean 'ema'?" in capsys.readouterr().err


def test_buffers_that_come_and_grow_are_followed() -> None:
    """A cache that is not saved is left alone, and a saved buffer may be another tensor than before."""
    source, follower = torch.nn.Linear(2, 2), None
    source.register_buffer("cache", torch.zeros(0), persistent=False)
    source.register_buffer("late", None)
    follower = copy.deepcopy(source)
    rule = _Follower(source, follower, AverageSettings("source", decay=0.5))
    source.cache = torch.zeros(7)
    source.late = torch.ones(3)
    rule.follow(1)
    source.late.fill_(2)
    rule.follow(1)
    assert torch.equal(follower.late, torch.full((3,), 2.0))
    assert follower.cache.numel() == 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"decay": 0.9}, {"decay": None, "start_epoch": 2, "update_bn": 5}], ids=str)
def test_exact_gives_the_same_bits_on_one_to_five_processes(tmp_path: Path, settings: dict[str, Any]) -> None:
    """An average is a function of weights, which are the same on all ranks."""
    homes = {
        nproc: write(tmp_path / str(nproc), average(**settings), gradient_reduction="exact") for nproc in (1, 2, 3, 5)
    }
    for nproc, home in homes.items():
        done = run_process(home, nproc=None if nproc == 1 else nproc)
        assert done.returncode == 0, done.stderr
    differences = {nproc: first_difference(homes[1] / DATA, home / DATA) for nproc, home in homes.items()}
    assert differences == dict.fromkeys(homes)


ENGINES = [{"gradient_reduction": "exact"}, {}, {"parallelism": "fsdp"}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"decay": 0.9}, {"decay": None, "update_bn": 5, "evaluate": "beside"}], ids=str)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, engine: dict[str, Any], settings: dict[str, Any]) -> None:
    """Killed at two processes inside epochs and writes, averages and their clocks continue where they were."""
    undisturbed, killed = (write(tmp_path / name, average(**settings), **engine) for name in ("undisturbed", "killed"))
    done = run_process(undisturbed, nproc=2)
    assert done.returncode == 0, done.stderr
    draw = random.Random(4)
    assert any(life.was_killed for life in [live(killed, 2, aim, draw) for aim in ("random", "write", "random")])
    assert run_process(killed, "--auto", nproc=2).returncode == 0
    assert first_difference(undisturbed / DATA, killed / DATA) is None


def test_clock_of_an_average_must_be_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its number of updates a resumed average would warm up again: this test would notice."""
    whole, parts, broken = (write(tmp_path / name, average(decay=0.9)) for name in ("whole", "parts", "broken"))
    run_inside(whole)
    for home in (parts, broken):
        run_inside(home, "--stop-after-epoch", "1")
    run_inside(parts, "--resume")
    assert first_difference(whole / DATA, parts / DATA) is None
    load = PersistedParts.load_run_values
    monkeypatch.setattr(
        PersistedParts,
        "load_run_values",
        lambda self, saved: load(self, {name: value for name, value in saved.items() if name != "averages"}),
    )
    run_inside(broken, "--resume")
    assert first_difference(whole / DATA, broken / DATA) is not None


_UNCOPIED = """
    from torch import nn
    from torch.nn.utils import weight_norm

    module = nn.Sequential(weight_norm(nn.Linear(6, 8, bias=False)), nn.BatchNorm1d(8))
"""
MISTAKES: dict[str, tuple[dict[str, str | None], str]] = {
    "unknown source": (average(average_of="trnk"), "average_of names 'trnk', but the trained modules are head_a"),
    "frozen source": (average(average_of="stem"), "must name a trained module, but stem is frozen"),
    "itself": (average(average_of="ema"), "must name a trained module, but ema is an average itself"),
    "in a circle": (
        {**average(average_of="other"), "pymodules/modules/other.py": 'settings = {"average_of": "ema"}\n'},
        "must name a trained module, but other is an average itself",
    ),
    "decay of one": (average(decay=1), "must be a number from 0 to below 1, or None for equal weights, but is 1"),
    "negative decay": (average(decay=-0.1), "must be a number from 0 to below 1"),
    "no such evaluation": (average(evaluate="with"), 'must be "instead", "beside" or None, but is \'with\''),
    "start before the first epoch": (average(start_epoch=0), "must be an integer of 1 or more, but is 0"),
    "a key of modules": (average(frozen=True), "is not for averages; allowed are average_of, decay"),
    "a key of averages": (
        {"pymodules/modules/trunk.py": (_TRUNK or "").replace('"frozen": False', '"decay": 0.9')},
        "is for averages: it needs average_of",
    ),
    "a module of its own": (
        {"pymodules/modules/ema.py": (_TRUNK or "").replace('"frozen": False', '"average_of": "trunk"')},
        "module must not be defined, because average_of makes it a copy of its source",
    ),
    "a source that cannot be copied": (
        {**average(), "pymodules/modules/trunk.py": _UNCOPIED},
        "average_of needs a copy of its source, but copying it raises RuntimeError",
    ),
    "no evaluations": (
        {**average(update_bn=2), "settings/training.json": '{"evaluation_interval": 0, "max_epochs": 1}'},
        "update_bn needs evaluations, in which it is done, but evaluation_interval is 0",
    ),
    "two instead of one": (
        {**average(), "pymodules/modules/swa.py": 'settings = {"average_of": "trunk", "decay": None}\n'},
        "evaluates instead of trunk, as modules/ema.py does already",
    ),
}


@pytest.mark.parametrize(("files", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_found_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str | None], said: str
) -> None:
    """One sentence with the file, and nothing is written."""
    write(tmp_path, files)
    before = tree(tmp_path)
    assert call(tmp_path, "check", "tiny") == 2
    assert said in capsys.readouterr().err
    assert tree(tmp_path) == before
