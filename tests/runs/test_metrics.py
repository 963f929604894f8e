"""Metrics over whole splits: recorded, stopped by, shown, evaluated in shards, with the same bits however it is cut."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.classification import BinaryAccuracy
from torchmetrics.regression import SpearmanCorrCoef
from torchmetrics.wrappers import MinMaxMetric

from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.experiment.pymodules.definitions import MetricDefinition
from pipeline.store.compare import first_difference, read_any
from pipeline.training.metrics import MetricAccumulator, is_gathered
from tests.crash.campaign import live
from tests.support.experiments import FILES, tree, write_experiment
from tests.support.running import run_inside, run_process
from tests.support.verbs import call

DATA = Path("experiment_results/tiny/data")
METRICS = ("r2", "side", "signs", "spearman", "extremes", "batches")
_TRANSFORM = FILES["pymodules/module_transforms/a.py"]
assert _TRANSFORM
_FEEDING = _TRANSFORM.replace(
    'return {self.register: difference**2, "error": difference.detach().abs()}',
    """sides = (batch["y"] > 0).long()
                losses = {self.register: difference**2, "error": difference.detach().abs()}
                if not modules["trunk"].training:
                    losses["r2"] = {"predictions": outputs, "targets": batch["y"]}
                    losses["side"] = (outputs, sides)
                    losses["signs"] = ((outputs > 0).long(), sides)
                    losses["spearman"] = (outputs, batch["y"])
                    losses["extremes"] = outputs
                    losses["batches"] = (outputs, batch["y"])
                return losses""",
).replace('"error"]', f'"error"]\n        metrics = {list(METRICS)}', 1)
_TRANSFORM_B = (FILES["pymodules/module_transforms/b.py"] or "").replace(
    '"error"]', f'"error"]\n        metrics = {list(METRICS)}', 1
)
_R2 = "from pipeline.components import R2\n\nmetric = R2()\n"
MEASURED: dict[str, str | None] = {
    "pymodules/module_transforms/a.py": _FEEDING,
    "pymodules/module_transforms/b.py": _TRANSFORM_B,
    "pymodules/metrics/r2.py": _R2,
    "pymodules/metrics/side.py": "from pipeline.components import AUROC\n\nmetric = AUROC()\n",
    "pymodules/metrics/signs.py": "from torchmetrics.classification import BinaryF1Score\n\nmetric = BinaryF1Score()\n",
    "pymodules/metrics/spearman.py": """
        from torchmetrics.regression import SpearmanCorrCoef

        metric = SpearmanCorrCoef()
        direction = "max"
    """,
    "pymodules/metrics/extremes.py": """
        from pipeline.components import BaseMetric

        names = ["largest", "smallest"]
        direction = {"largest": "max", "smallest": "min"}


        class Extremes(BaseMetric):
            combine = {"high": "max", "low": "min"}

            def update(self, outputs):
                return {"high": outputs.max(), "low": outputs.min()}

            def compute(self, state):
                return {"largest": state["high"], "smallest": state["low"].item()}


        metric = Extremes()
    """,
    # Knows nothing of states that could be combined: it must see every batch itself, in their order.
    "pymodules/metrics/batches.py": """
        class FirstError:
            def reset(self):
                self.errors = []

            def update(self, outputs, targets):
                self.errors.append(float((outputs - targets).abs().sum()))

            def compute(self):
                return self.errors[0] + len(self.errors)


        metric = FirstError()
        direction = "min"
    """,
    "pymodules/early_stopper.py": """
        from pipeline.components import RegisterEarlyStopper

        early_stopper = RegisterEarlyStopper("r2", max_epochs=3)
    """,
}
# Those that may be evaluated in shards.
SHARDED = {**MEASURED, "pymodules/metrics/batches.py": _R2, "pymodules/metrics/spearman.py": _R2}


def write(home: Path, files: dict[str, str | None] = MEASURED, **settings: Any) -> Path:
    write_experiment(home, files=files, **settings)
    return home


def values_of(home: Path, register: str) -> list[float]:
    values: list[float] = read_any(home / DATA / f"loss_reg_data/val/{register}/epoch_data.npz")["means"].tolist()
    return values


def test_metrics_are_registers_of_evaluations_for_everyone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records, log, best, status, compare, report and evaluate show them; the frozen copy lists them."""
    run_inside(write(tmp_path))
    best = int(np.argmax(values_of(tmp_path, "r2")))
    assert len(values_of(tmp_path, "r2")) == 4
    assert all(0 <= value <= 1 for value in values_of(tmp_path, "side"))
    assert all(np.array(values_of(tmp_path, "largest")) > np.array(values_of(tmp_path, "smallest")))
    assert not (tmp_path / DATA / "loss_reg_data/train/r2").exists()
    line = (tmp_path / "experiment_logs/tiny/train.log").read_text().split("Epoch(val) [3]")[1].splitlines()[0]
    assert f"r2: {values_of(tmp_path, 'r2')[-1]:.4f}" in line
    frozen = json.loads((tmp_path / "experiment_results/tiny/settings/loss_registers.json").read_text())
    listed = {entry["name"]: entry for entry in frozen["loss_registers"] if isinstance(entry, dict)}
    assert listed["smallest"]["direction"] == "min"
    assert listed["signs"] == {
        "name": "signs", "optimize": False, "direction": "max", "per": "split", "splits": ["val"]
    }  # fmt: skip
    capsys.readouterr()
    assert call(tmp_path, "status", "tiny") == 0
    assert f"best (epoch {best})" in capsys.readouterr().out
    assert call(tmp_path, "compare", "tiny", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tiny"]["last r2"] == values_of(tmp_path, "r2")[-1]
    assert call(tmp_path, "evaluate", "tiny", "--pool", "last", "--json") == 0
    found = json.loads(capsys.readouterr().out)["values"]
    assert {name: found[name]["mean"] for name in ("r2", "signs", "spearman")} == {
        name: values_of(tmp_path, name)[-1] for name in ("r2", "signs", "spearman")
    }
    assert '"r2"' in (tmp_path / "experiment_logs/tiny/report.html").read_text()


def test_values_are_those_of_the_whole_split(tmp_path: Path) -> None:
    """Predictions of an evaluation, put through each metric at once, give what was recorded."""
    text = (
        _FEEDING
        + "\n            def predict(self, batch, modules):\n                "
        + (
            'outputs = modules[self.head](modules["trunk"](modules["stem"](batch["x"])))[:, 0]\n                '
            'return {"outputs": outputs, "y": batch["y"]}\n'
        )
    )
    run_inside(write(tmp_path, {**MEASURED, "pymodules/module_transforms/a.py": text}))
    assert call(tmp_path, "evaluate", "tiny", "--pool", "last", "--out", str(tmp_path / "out.pt")) == 0
    predictions = read_any(tmp_path / "out.pt")["predictions"]
    outputs = torch.cat([torch.as_tensor(predictions[name]["outputs"]) for name in "ab"])
    targets = torch.cat([torch.as_tensor(predictions[name]["y"]) for name in "ab"])
    theirs = SpearmanCorrCoef()
    theirs.update(outputs, targets)
    assert values_of(tmp_path, "spearman")[-1] == pytest.approx(float(theirs.compute()), abs=1e-5)
    errors = (outputs.double() - targets.double()).square().sum()
    total = (targets.double() - targets.double().mean()).square().sum()
    assert values_of(tmp_path, "r2")[-1] == pytest.approx(float(1 - errors / total), abs=1e-9)
    first = float((outputs[:4] - targets[:4]).abs().sum())
    assert values_of(tmp_path, "batches")[-1] == pytest.approx(first + 5, abs=1e-4)


def test_shards_are_merged_to_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However many shards there are; a merge away from the experiment says what it lacks."""
    run_inside(write(tmp_path, SHARDED), "--stop-after-epoch", "1")
    assert call(tmp_path, "evaluate", "tiny", "--json") == 0
    whole = capsys.readouterr().out.split('"values"')[1]
    for count in (2, 3, 7):
        files = [str(tmp_path / f"{index}_{count}.npz") for index in range(count)]
        for index, file in enumerate(files):
            assert call(tmp_path, "evaluate", "tiny", "--shard", f"{index}/{count}", "--out", file) == 0
        capsys.readouterr()
        assert call(tmp_path, "evaluate", "--merge", *files, "--json") == 0
        assert capsys.readouterr().out.split('"values"')[1] == whole
    assert call(tmp_path / "experiment_logs", "evaluate", "--merge", *files) == 2
    assert "need the code of 'tiny' as it was" in capsys.readouterr().err


def test_metric_that_sees_all_batches_is_not_evaluated_in_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence names it and the way out."""
    run_inside(write(tmp_path), "--stop-after-epoch", "1")
    assert call(tmp_path, "evaluate", "tiny", "--shard", "0/2", "--out", str(tmp_path / "x.npz")) == 2
    assert "must see the whole split, so it cannot be evaluated in shards" in capsys.readouterr().err


@pytest.mark.slow
def test_exact_gives_the_same_bits_on_one_to_five_processes(tmp_path: Path) -> None:
    """States are combined along the positions of the batches, whoever evaluates them."""
    homes = {nproc: write(tmp_path / str(nproc), training={"gradient_reduction": "exact"}) for nproc in (1, 2, 3, 5)}
    for nproc, home in homes.items():
        done = run_process(home, nproc=None if nproc == 1 else nproc)
        assert done.returncode == 0, done.stderr
    differences = {nproc: first_difference(homes[1] / DATA, home / DATA) for nproc, home in homes.items()}
    assert differences == dict.fromkeys(homes)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"gradient_reduction": "exact"}, {}, {"parallelism": "fsdp"}], ids=str)
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, engine: dict[str, Any]) -> None:
    """Values of metrics decide which pool is the best, so they are recorded once and for all."""
    undisturbed, killed = (write(tmp_path / name, training=engine) for name in ("undisturbed", "killed"))
    done = run_process(undisturbed, nproc=2)
    assert done.returncode == 0, done.stderr
    draw = random.Random(9)
    assert any(life.was_killed for life in [live(killed, 2, aim, draw) for aim in ("write", "random", "write")])
    assert run_process(killed, "--auto", nproc=2).returncode == 0
    assert first_difference(undisturbed / DATA, killed / DATA) is None


def test_metric_may_be_listed_with_the_registers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its direction then stands there; that it is neither optimised nor trained on need not be said."""
    listed = ["loss_a", "loss_b", {"name": "error", "optimize": False}]
    r2: dict[str, Any] = {"name": "r2", "per": "split", "direction": "min"}
    home = write(tmp_path, loss_registers={"loss_registers": [*listed, r2]})
    assert run_inside(home).is_finished
    assert np.argmin(values_of(home, "r2")) == read_any(home / DATA / "early_stopper_data/state.json")["best_epoch"]
    write(tmp_path / "wrong", loss_registers={"loss_registers": [*listed, {**r2, "optimize": True}]})
    assert call(tmp_path / "wrong", "check", "tiny") == 2
    assert "register 'r2' is of a metric, which evaluations compute" in capsys.readouterr().err


def test_what_a_metric_may_gather_is_counted_per_evaluation(tmp_path: Path) -> None:
    """A long training has many evaluations, on every rank."""
    definition = MetricDefinition(SimpleNamespace(update=print, compute=print, reset=print), ("x",), {"x": "max"})
    accumulator = MetricAccumulator({"x": definition}, tmp_path, Processes())
    for _ in range(3):
        accumulator.add(0, {"x": torch.zeros(80)})
        gathering = accumulator._adapters["x"]
        assert gathering._num_bytes == 320  # type: ignore[attr-defined]
        accumulator.gather()


def test_metrics_that_hold_others_see_all_batches_themselves() -> None:
    """Their states are those of the metric inside, which the wrapper does not show."""
    assert is_gathered(MinMaxMetric(BinaryAccuracy()))
    assert not is_gathered(BinaryAccuracy())


def test_undefined_value_is_never_an_improvement(tmp_path: Path) -> None:
    """AUROC of one class is NaN: recorded, and no epoch becomes the best by it."""
    files = {
        **MEASURED,
        "pymodules/module_transforms/a.py": _FEEDING.replace("(outputs, sides)\n", "(outputs, sides * 0)\n", 1),
        "pymodules/early_stopper.py": (MEASURED["pymodules/early_stopper.py"] or "").replace('"r2"', '"side"'),
    }
    run_inside(write(tmp_path, files))
    assert np.isnan(values_of(tmp_path, "side")).all()
    assert not (tmp_path / DATA / "module_ckps/best").exists()


MISTAKES: dict[str, tuple[dict[str, str | None], str]] = {
    "no number": (
        {"pymodules/metrics/r2.py": f"{_R2}metric.compute = lambda state: 'x'\n"},
        "but raises TypeError: compute must return a number for 'r2', but returned 'x'",
    ),
    "several numbers without names": (
        {"pymodules/metrics/r2.py": f"{_R2}metric.compute = lambda state: {{'a': 1}}\n"},
        "compute must return values for r2, but has a",
    ),
    "name of a register": (
        {"pymodules/metrics/r2.py": f'{_R2}names = ["error"]\n'},
        "names has 'error', which is a register already",
    ),
    "name of another metric": (
        {"pymodules/metrics/r2.py": f'{_R2}names = ["side"]\n'},
        "'side', which metrics/",
    ),
    "fed by nothing": (
        {"pymodules/metrics/more.py": _R2},
        "must be named in metrics of a module transform, but is in none",
    ),
    "unknown metric": (
        {"pymodules/module_transforms/b.py": _TRANSFORM_B.replace("'r2'", "'r3'")},
        "metrics has 'r3', but there are batches, extremes, r2",
    ),
    "not returned": (
        {"pymodules/module_transforms/a.py": _FEEDING.replace('losses["side"] =', 'losses.get("side"),', 1)},
        "must return the arguments of its metrics",
    ),
    "unknown way to combine": (
        {"pymodules/metrics/r2.py": f'{_R2}metric.combine = "mean"\n'},
        "combine must be one of sum, min, max, cat, but for 'rows' it is 'mean'",
    ),
    "a class": ({"pymodules/metrics/r2.py": "from pipeline.components import R2\n\nmetric = R2"}, "write R2(…)"),
    "neither better nor worse": (
        {"pymodules/metrics/r2.py": f'{_R2}direction = "up"\n'},
        "direction must be \"min\" or \"max\" for 'r2', but is 'up'",
    ),
}


@pytest.mark.parametrize(("files", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_found_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str | None], said: str
) -> None:
    """One sentence with the file, and nothing is written."""
    write(tmp_path, {**MEASURED, **files})
    before = tree(tmp_path)
    assert call(tmp_path, "check", "tiny") == 2
    assert said in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_metric_that_fails_in_training_is_explained(tmp_path: Path) -> None:
    """The run ends with the file of the metric, and the last commit is intact."""
    write(tmp_path, {**MEASURED, "pymodules/metrics/r2.py": f"{_R2}metric.compute = lambda state: 1 / 0\n"})
    with pytest.raises(PipelineError, match=r"metrics/r2\.py:4: compute of the metric must work, but raises ZeroDiv"):
        run_inside(tmp_path)
