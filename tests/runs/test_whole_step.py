"""Losses that couple all rows of a step: the same at any number of processes, and after a kill."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.store.compare import first_difference, read_any
from tests.crash.campaign import live
from tests.runs.test_workloads import plain
from tests.support.experiments import FILES as TINY
from tests.support.experiments import write_experiment
from tests.support.running import run_inside, run_process
from tests.support.verbs import call

DATA = Path("experiment_results/tiny/data")
TRANSFORM = Path("experiment_settings/tiny/pymodules/module_transforms/views.py")
FILES: dict[str, str | None] = {
    "pymodules/datasets/views.py": """
        import torch


        class Views:
            def __getitem__(self, idx):
                generator = torch.Generator().manual_seed(idx)
                x = torch.randn(6, generator=generator)
                noise = torch.randn(2, 6, generator=generator) / 5
                return {"first": x + noise[0], "second": x + noise[1], "label": idx % 4}

            def get_split_idxs(self, split):
                return range(23) if split == "train" else range(23, 31)


        dataset = Views()
    """,
    "pymodules/datasets/values.py": """
        import torch


        class Values:
            def __getitem__(self, idx):
                x = torch.randn(6, generator=torch.Generator().manual_seed(1000 + idx))
                return {"x": x, "y": x.sum()}

            def get_split_idxs(self, split):
                return range(11) if split == "train" else range(11, 15)


        dataset = Values()
    """,
    "pymodules/dataloaders/views.py": 'train_dataloader_args = {"batch_size": 3}\n',
    "pymodules/dataloaders/values.py": 'train_dataloader_args = {"batch_size": 4}\n',
    # Dropout shows whether both passes draw the same; the buffer shows how often a batch has left a trace.
    "pymodules/modules/net.py": """
        import torch
        from torch import nn


        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
                self.register_buffer("num_calls", torch.zeros(()))
                self.scale = nn.Parameter(torch.ones(4))

            def forward(self, x):
                if self.training:
                    self.num_calls += 1
                return self.layers(x + self.num_calls / 100) * self.scale


        module = Net()
    """,
    "pymodules/modules/temperature.py": """
        import torch
        from torch import nn


        class Temperature(nn.Module):
            def __init__(self):
                super().__init__()
                self.log = nn.Parameter(torch.tensor(-1.0))

            def forward(self, similarities):
                return similarities / self.log.exp()


        module = Temperature()
    """,
    "pymodules/module_transforms/views.py": """
        import torch
        import torch.nn.functional as F

        from pipeline.components import BaseModuleTransform

        loss_registers = ["contrast", "found"]


        class ModuleTransform(BaseModuleTransform):
            def embed(self, batch, modules):
                rows = {name: modules["net"](batch[name]) for name in ("first", "second")}
                return {**rows, "label": batch["label"]}

            def loss(self, rows, modules):
                num = len(rows["label"])
                views = F.normalize(torch.cat([rows["first"], rows["second"]]) * modules["net"].scale, dim=1)
                scores = F.dropout(modules["temperature"](views @ views.T), 0.1, modules["net"].training)
                scores = scores.fill_diagonal_(float("-inf"))
                losses = F.cross_entropy(scores, torch.arange(2 * num).roll(num), reduction="none")
                found = rows["label"][scores[:num].argmax(dim=1) % num] == rows["label"]
                return {"contrast": (losses[:num] + losses[num:]) / 2, "found": found.float()}

            def predict(self, batch, modules):
                return {"rows": modules["net"](batch["first"])}

            def images(self, batch, modules):
                return {"rows": modules["net"](batch["first"])}
    """,
    "pymodules/module_transforms/values.py": """
        from pipeline.components import BaseModuleTransform

        loss_registers = ["error"]


        class ModuleTransform(BaseModuleTransform):
            def __call__(self, batch, modules):
                return {"error": (modules["net"](batch["x"]).sum(dim=1) - batch["y"]) ** 2}
    """,
    "pymodules/optim_sched/main.py": """
        from torch.optim import SGD


        def create_optimizer(modules):
            return SGD([weight for module in modules.values() for weight in module.parameters()], lr=0.05, momentum=0.9)
    """,
}
REGISTERS = ["contrast", {"name": "found", "optimize": False, "direction": "max"}, "error"]


def write(home: Path, files: dict[str, str | None] | None = None, **training: Any) -> Path:
    """Write the experiment alone: the tiny one's files are left out."""
    everything = {**dict.fromkeys(TINY), **FILES, **(files or {})}
    write_experiment(
        home,
        files=everything,
        data_loading={"step_min_items": 14},
        loss_registers={"loss_registers": REGISTERS},
        training={"grad_clip_norm": None, "max_epochs": 2, "checkpoint_every_steps": 1, **training},
    )
    return home


def change(home: Path, changes: dict[str, str], file: Path = TRANSFORM) -> Path:
    """Replace words in a file of the experiment."""
    text = (home / file).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (home / file).write_text(text)
    return home


def recorded(home: Path, register: str, split: str = "train") -> np.ndarray:
    """Return the means of all steps, or of all evaluations."""
    folder = home / DATA / "loss_reg_data" / split / register
    files = [folder / "epoch_data.npz"] if split == "val" else sorted(folder.glob("step_data_*.npz"))
    return np.concatenate([read_any(file)["means"] for file in files])


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"precision": "bf16"}], ids=str)
def test_exact_gives_the_same_bits_on_one_to_five_processes(tmp_path: Path, mode: dict[str, Any]) -> None:
    """Rows are put into plan order and the weights of the loss have one owner, so the number of ranks plays no part."""
    homes = {nproc: write(tmp_path / str(nproc), gradient_reduction="exact", **mode) for nproc in (1, 2, 3, 5)}
    for nproc, home in homes.items():
        done = run_process(home, nproc=None if nproc == 1 else nproc)
        assert done.returncode == 0, done.stderr
    differences = {nproc: first_difference(homes[1] / DATA, home / DATA) for nproc, home in homes.items()}
    assert differences == dict.fromkeys(homes)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3])
def test_fast_differs_by_rounding_only(tmp_path: Path, nproc: int) -> None:
    """Gradients that DDP divides by the number of ranks are those of one process, also that of the temperature."""
    run_inside(write(tmp_path / "one"))
    done = run_process(write(tmp_path / "many"), nproc=nproc)
    assert done.returncode == 0, done.stderr
    for register in ("contrast", "error"):
        alone, together = (recorded(tmp_path / name, register) for name in ("one", "many"))
        np.testing.assert_allclose(together, alone, rtol=1e-4)
    temperatures = [
        read_any(tmp_path / name / DATA / "module_ckps/last/temperature.pt")["log"] for name in ("one", "many")
    ]
    torch.testing.assert_close(*temperatures)
    assert abs(temperatures[0] + 1) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"gradient_reduction": "exact"}], ids=str)
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, mode: dict[str, Any]) -> None:
    """Killed at two processes between and inside steps, a run ends like one that was left alone."""
    undisturbed, killed = (write(tmp_path / name, max_epochs=4, **mode) for name in ("undisturbed", "killed"))
    done = run_process(undisturbed, nproc=2)
    assert done.returncode == 0, done.stderr
    draw = random.Random(3)
    lives = [live(killed, 2, aim, draw) for aim in ("random", "write", "random")]
    assert any(life.was_killed for life in lives)
    assert run_process(killed, "--auto", nproc=2).returncode == 0
    assert first_difference(undisturbed / DATA, killed / DATA) is None


def test_gradient_is_that_of_one_big_batch(tmp_path: Path) -> None:
    """In float64, one update from eight batches moves every weight as one batch of all points would."""
    files = {
        "pymodules/datasets/values.py": None,
        "pymodules/dataloaders/values.py": None,
        "pymodules/module_transforms/values.py": None,
        "pymodules/modules/net.py": """
            import torch
            from torch import nn


            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
                    self.scale = nn.Parameter(torch.rand(4))

                def forward(self, x):
                    return self.layers(x.double()) * self.scale


            module = Net().double()
        """,
    }
    home = write(tmp_path, files)
    change(home, {", 0.1, modules": ", 0.0, modules"})
    change(home, {"torch.tensor(-1.0)": "torch.tensor(-1.0).double()"}, TRANSFORM.parents[1] / "modules/temperature.py")
    settings = ["data_loading.step_min_items=23", 'loss_registers.loss_registers=["contrast", "found"]']
    run_inside(home, "--stop-after-epoch", "1", *(word for setting in settings for word in ("--set", setting)))
    given = plain(home)
    net, temperature = given.modules["net"], given.modules["temperature"]
    (batches, _) = given.steps
    assert len(batches) == 8
    views = torch.cat([net(batch[name]) for name in ("first", "second") for batch in batches])
    views = F.normalize(views * net.scale, dim=1)
    scores = temperature(views @ views.T).fill_diagonal_(float("-inf"))
    F.cross_entropy(scores, torch.arange(46).roll(23)).backward()  # type: ignore[no-untyped-call]
    for name, module in given.modules.items():
        moved = read_any(home / DATA / f"module_ckps/last/{name}.pt")
        for key, weight in module.named_parameters():
            assert weight.grad is not None
            assert weight.grad.abs().max() > 0
            torch.testing.assert_close(weight - moved[key], 0.05 * weight.grad, rtol=1e-12, atol=1e-15)


def test_gradients_of_fp16_are_scaled_once(tmp_path: Path) -> None:
    """At the same weights, what fp16 can hold are the gradients of float32 but for its rounding."""
    files = dict.fromkeys(path for path in FILES if path.endswith("values.py"))
    names = ("--set", 'loss_registers.loss_registers=["contrast", "found"]')
    norms = []
    for precision in ("fp32", "fp16"):
        home = write(tmp_path / precision, files, precision=precision)
        change(home, {"lr=0.05": "lr=0.0"}, TRANSFORM.parents[1] / "optim_sched/main.py")
        run_inside(home, "--stop-after-epoch", "1", *names)
        norms.append(read_any(home / DATA / "lr_data/main/step_data_1.npz")["grad_norms"])
    # The first step overflows, and the scale becomes smaller.
    assert np.isfinite(norms[1]).tolist() == [False, True]
    np.testing.assert_allclose(norms[1][1], norms[0][1], rtol=0.01)


def test_first_pass_leaves_no_trace_in_buffers(tmp_path: Path) -> None:
    """Per step, BatchNorm counts each call of a batch once, and other buffers are those that one batch gives."""
    run_inside(write(tmp_path), "--stop-after-epoch", "1")
    buffers = read_any(tmp_path / DATA / "module_ckps/last/net.pt")
    # Two calls in each of 8 batches of views, and one in each of 3 batches of values.
    assert int(buffers["layers.1.num_batches_tracked"]) == 2 * 8 + 3
    # Of each step's batches, the first decides. All steps but one begin with two calls for a batch of views.
    num_steps = len(recorded(tmp_path, "contrast"))
    assert int(buffers["num_calls"]) in (2 * num_steps, 2 * num_steps - 1)


COUNTING = """
    import json

    import torch.distributed as dist
    from torch.optim import SGD

    from pipeline.components import BaseScheduler

    calls = []


    def count(name):
        original = getattr(dist, name)

        def call(*arguments, **named):
            calls.append(name)
            return original(*arguments, **named)

        setattr(dist, name, call)


    for name in ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all_single", "broadcast"):
        count(name)


    class Scheduler(BaseScheduler):
        def before_train_epoch(self, num_steps):
            calls.clear()

        def after_train_step(self, step):
            with open(FILE + str(dist.get_rank()), "a") as file:
                file.write(json.dumps(calls) + "\\n")
            calls.clear()


    def create_optimizer(modules):
        return SGD([weight for module in modules.values() for weight in module.parameters()], lr=0.05)


    def create_scheduler(optimizer):
        return Scheduler()
"""


@pytest.mark.slow
def test_coupled_rows_cost_one_collective(tmp_path: Path) -> None:
    """One all-gather per step of each rank, besides what the rows are at the first; without such a loss, none."""
    counts = tmp_path / "counts"
    home = write(tmp_path, {"pymodules/optim_sched/main.py": COUNTING.replace("FILE", repr(str(counts)))})
    change(
        home,
        {'"checkpoint_every_steps": 1': '"checkpoint_every_steps": 100'},
        TRANSFORM.parents[2] / "settings/training.json",
    )
    done = run_process(home, nproc=2)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        first, *others = [json.loads(line) for line in Path(f"{counts}{rank}").read_text().splitlines()]
        assert sorted(first) == ["all_gather", "all_gather_object"]
        assert others == [["all_gather"]] * 5
    write_without_coupling(home)
    for rank in range(2):
        Path(f"{counts}{rank}").unlink()
    done = run_process(home, "--reset", nproc=2)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert {line.strip() for line in Path(f"{counts}{rank}").read_text().splitlines()} == {"[]"}


def write_without_coupling(home: Path) -> Path:
    """Let the same losses be computed from the rows of each batch alone."""
    call = "return self.contrast(self.rows(batch, modules), modules)"
    words = f"def __call__(self, batch, modules):\n        {call}\n\n    def rows("
    return change(home, {"def embed(": words, "def loss(": "def contrast("})


@pytest.mark.slow
def test_a_row_that_is_not_finite_skips_the_step_and_is_named(tmp_path: Path) -> None:
    """All values of the step are spoilt; the message names the points of the batch whose row it was."""
    spoil = 'rows["first"] = rows["first"] * torch.where(batch["label"] == 3, float("nan"), 1.0)[:, None]'
    guard = f'if modules["net"].training and len(batch["label"]) == 2:\n            {spoil}\n        '
    home = change(write(tmp_path), {'return {**rows, "label"': f'{guard}return {{**rows, "label"'})
    done = run_process(home, "--stop-after-epoch", "1", nproc=2)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "skipped on all ranks" in line]
    # The last batch of the epoch is the only one of two points; no other step is skipped.
    assert "contrast is not finite in a batch of dataset views (points " in line
    (batch,) = [batch for batches in plain(home).steps[:3] for batch in batches if len(batch.get("label", ())) == 2]
    points = line.split("(points ")[1].split(")")[0].split(", ")
    assert [int(point) % 4 for point in points] == batch["label"].tolist()


def test_evaluation_takes_each_batch_as_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded values are those of batches of the validation split alone; `evaluate` and predictions say the same."""
    home = write(tmp_path)
    run_inside(home, "--stop-after-epoch", "1")
    capsys.readouterr()
    assert call(home, "evaluate", "tiny", "--pool", "last", "--json", "--out", str(home / "rows.npz")) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    contrast = values["contrast"]["mean"]
    assert contrast == recorded(home, "contrast", "val")[-1]
    net, temperature = (plain(home).modules[name] for name in ("net", "temperature"))
    for name, module in {"net": net, "temperature": temperature}.items():
        module.load_state_dict(read_any(home / DATA / f"module_ckps/last/{name}.pt"))
        module.eval()
    losses = []
    for start in range(23, 31, 3):
        points = [view(idx) for idx in range(start, min(31, start + 3))]
        views = torch.cat([net(torch.stack([point[index] for point in points])) for index in range(2)])
        views = F.normalize(views * net.scale, dim=1)
        scores = temperature(views @ views.T).fill_diagonal_(float("-inf"))
        num = len(points)
        losses.append(F.cross_entropy(scores, torch.arange(2 * num).roll(num), reduction="none"))
    np.testing.assert_allclose(contrast, float(torch.cat(losses).mean()), rtol=1e-5)
    predicted = read_any(home / "rows.npz")
    assert any(array.shape == (8, 4) for array in predicted.values())


def test_metrics_are_fed_by_loss(tmp_path: Path) -> None:
    """In evaluations, loss returns under the name of a metric what its update takes; training does without."""
    home = write(
        tmp_path, {"pymodules/metrics/hits.py": "from pipeline.components import Accuracy\n\nmetric = Accuracy(4)\n"}
    )
    is_hit = "scores[:num].argmax(dim=1) % num"
    fed = f'"hits": (rows["label"][{is_hit}], rows["label"])'
    found = '"found": found.float()'
    change(
        home, {'loss_registers = ["contrast", "found"]': 'loss_registers = ["contrast", "found"]\nmetrics = ["hits"]'}
    )
    run_inside(change(home, {found: f"{found}, {fed}"}), "--stop-after-epoch", "1")
    assert recorded(home, "hits", "val").tolist() == recorded(home, "found", "val").tolist()


def view(idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two views of a point as the dataset makes them."""
    generator = torch.Generator().manual_seed(idx)
    x = torch.randn(6, generator=generator)
    noise = torch.randn(2, 6, generator=generator) / 5
    return x + noise[0], x + noise[1]


def test_check_prints_what_the_rows_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The largest step has 12 of the 23 points; a row is two views of four floats and a label."""
    assert call(write(tmp_path), "check", "tiny") == 0
    output = capsys.readouterr().out
    assert "rows: coupled by views, so each process holds all of its batches of a step in memory" in output
    assert "rows of a step" in output
    assert "12 × 40 B = 480 B" in output


MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "no loss": ({"def loss(": "def losses("}, "must have embed and loss together, but has embed without loss"),
    "no embed": ({"def embed(": "def rows("}, "must have embed and loss together, but has loss without embed"),
    "arguments of loss": ({"def loss(self, rows, modules)": "def loss(self, rows)"}, "loss(self, rows, modules)"),
    "arguments of embed": (
        {"def embed(self, batch, modules)": "def embed(self, batch)"},
        "embed(self, batch, modules)",
    ),
    "counted items": (
        {"def embed(": "def count_items(self, batch):\n        return {}\n\n    def embed("},
        "count_items cannot be combined with embed and loss",
    ),
    "no dict": ({'return {**rows, "label": batch["label"]}': 'return rows["first"]'}, "embed must return a dict"),
    "nothing": ({'return {**rows, "label": batch["label"]}': "return {}"}, "but returned an empty dict"),
    "no tensor": ({'"label": batch["label"]}': '"label": batch["label"].tolist()}'}, "but 'label' is list"),
    "other rows": (
        {'"label": batch["label"]}': '"label": batch["label"].repeat(2)}'},
        "embed must return one row per item for 'label', here 3, but returned shape (6,)",
    ),
    "no rows": ({'"label": batch["label"]}': '"label": batch["label"].sum()}'}, "but returned shape ()"),
    "complex": ({'"label": batch["label"]}': '"label": batch["label"] * 1j}'}, "but 'label' is torch.complex64"),
    "other at the second call": (
        {"rows = {name": 'batch["first"].square_()\n        rows = {name'},
        "must return the same rows when it is called again with a batch, but 'first' differs",
    ),
    "mean": (
        {"(losses[:num] + losses[num:]) / 2": "losses.mean()"},
        "loss must return one value per row for 'contrast', here 3, but returned a tensor of shape ()",
    ),
    "absent": ({'"contrast": (': '"contrasts": ('}, "but lacks contrast"),
    "buffers": (
        {"num = len(": 'modules["net"](torch.ones(2, 6))\n        num = len('},
        "loss must not write to buffers of modules, but wrote to modules/net.py: buffer",
    ),
}


@pytest.mark.parametrize(("changes", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_found_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], said: str
) -> None:
    """One sentence with the file, and nothing is written."""
    home = change(write(tmp_path), changes)
    assert call(home, "check", "tiny") == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(home / TRANSFORM) in error
    assert [path.name for path in tmp_path.iterdir()] == ["experiment_settings"]


SETTINGS: dict[str, tuple[str, str]] = {
    "fsdp": ("training.parallelism=fsdp", "embed and loss need whole modules on every process"),
    "sync_batchnorm": ("training.sync_batchnorm=true", "but sync_batchnorm needs all processes"),
    "per batch": (
        'loss_registers.loss_registers=[{"name": "contrast", "per": "batch"}, "found", "error"]',
        "register 'contrast' is per \"batch\", but loss, which embed comes with, returns one value per row",
    ),
}


@pytest.mark.parametrize(("setting", "said"), SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_that_do_not_go_with_it_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, said: str
) -> None:
    """Sharded modules and synchronised BatchNorm need all processes in each call; a step has no value per batch."""
    assert call(write(tmp_path), "check", "tiny", "--set", setting) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_collectives_are_refused_in_loss(tmp_path: Path) -> None:
    """A rank without a batch would never call them."""
    home = change(write(tmp_path), {"num = len(": "torch.distributed.barrier()\n        num = len("})
    done = run_process(home, "--set", "training.evaluation_interval=0", nproc=2)
    assert done.returncode == 1
    assert "module_transforms/views.py must compute with its own batch alone, but calls torch.distri" in done.stderr


def test_methods_of_these_names_next_to_a_call_are_the_authors_own(tmp_path: Path) -> None:
    """A transform with __call__ may have a helper called loss or embed, as it always could."""
    home = write(tmp_path)
    write_without_coupling(home)
    run_inside(change(home, {"contrast(": "loss("}), "--stop-after-epoch", "1")
    assert np.isfinite(recorded(home, "contrast")).all()
