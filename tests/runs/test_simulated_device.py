"""Real runs on a simulated accelerator, which keeps its tensors apart, executes late and counts.

Everything is compared with the same run on the CPU: the device computes with the CPU's kernels, so that each byte
must be the same. A wait that is missing anywhere leaves garbage in what is committed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.proof.experiments import write_deep
from tests.runs.test_averages import average
from tests.runs.test_counted_items import write as write_counted
from tests.runs.test_metrics import MEASURED
from tests.support.experiments import FILES, tree, write_experiment
from tests.support.running import BackgroundRun, environment, run_process
from tests.support.simulated.environment import SIMULATED

ROOT = Path(__file__).parents[2]


def data_of(home: Path, name: str = "tiny") -> dict[str, bytes]:
    return {path: content for path, (content, _) in tree(home / "experiment_results" / name / "data").items()}


def finished(home: Path, *words: str, nproc: int | None = None, simulated: bool = True, name: str = "tiny") -> str:
    """Run to the end and return what was printed."""
    done = run_process(home, *words, nproc=nproc, env=SIMULATED if simulated else None, name=name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f" on {'sim' if simulated else 'cpu'}" in done.stdout
    return done.stdout


def on_both(tmp_path: Path, *words: str, nproc: int | None = None, **settings: object) -> tuple[Path, Path]:
    """Run the tiny experiment on the simulated device and on the CPU; return both data homes."""
    homes = tmp_path / "sim", tmp_path / "cpu"
    for home in homes:
        write_experiment(home, **settings)
        finished(home, *words, nproc=nproc, simulated=home.name == "sim")
    return homes


def counted(*words: str) -> list[dict[str, int]]:
    """Return the counts of the steps of a run, or of a loop written by hand, on the simulated device."""
    line = [sys.executable, "-m", "tests.proof.counting", *words]
    done = subprocess.run(line, cwd=ROOT, env=environment(SIMULATED), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps: list[dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return steps


def steps_of(home: Path, name: str) -> list[dict[str, int]]:
    """Train one epoch on the simulated device and return the counts of its steps."""
    return counted(name, "--data-home", str(home), "--stop-after-epoch", "1")


def test_device_behaves_like_an_accelerator() -> None:
    """Late execution, garbage before a wait, tensors apart, no use after a fork, counts: the device's own checks."""
    line = [sys.executable, "-m", "tests.support.simulated.self_check"]
    done = subprocess.run(line, cwd=ROOT, env=environment(SIMULATED), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_run_has_the_bits_of_the_cpu(tmp_path: Path) -> None:
    """BatchNorm, dropout, a frozen module, clipping, pinned batches, commits in the background, evaluation."""
    sim, cpu = on_both(tmp_path)
    assert data_of(sim) == data_of(cpu)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [None, 2])
def test_counts_metrics_and_averages_have_the_bits_of_the_cpu(tmp_path: Path, nproc: int | None) -> None:
    """Items that the data counts, states on the device and on the host, an EMA with BatchNorm of its own."""
    files = {**MEASURED, **average(decay=0.9, evaluate="beside", update_bn=3)}
    writers: dict[str, Callable[[Path], object]] = {
        "measured": partial(write_experiment, files=files),
        "counted": write_counted,
    }
    for name, write in writers.items():
        homes = tmp_path / name / "sim", tmp_path / name / "cpu"
        for home in homes:
            write(home)
            finished(home, nproc=nproc, simulated=home.name == "sim")
        assert data_of(homes[0]) == data_of(homes[1])


def test_files_of_foreground_commits_name_no_device(tmp_path: Path) -> None:
    """A machine without the device reads them with plain torch.load."""
    sim, cpu = on_both(tmp_path, "--stop-after-epoch", "1", training={"checkpoint_in_background": False})
    assert data_of(sim) == data_of(cpu)


def test_cpu_can_be_asked_for_beside_an_accelerator(tmp_path: Path) -> None:
    """The first block says why the run is not on the accelerator."""
    write_experiment(tmp_path)
    done = run_process(tmp_path, "--stop-after-epoch", "0", "--device", "cpu", env=SIMULATED)
    assert done.returncode == 0, done.stderr
    assert "processes: 1 on cpu (--device cpu)" in done.stdout


@pytest.mark.parametrize(
    "step_min_items",
    [pytest.param(4, id="one batch"), pytest.param(16, id="four batches", marks=pytest.mark.slow)],
)
def test_step_adds_few_kernels_and_waits_once(tmp_path: Path, step_min_items: int) -> None:
    """A model with as many BatchNorm layers as a ResNet-50: a tenth more kernels at most, one wait of the host."""
    settings = {"data_loading": {"step_min_items": step_min_items}, "logging": {"text": {"every_steps": 1000}}}
    write_deep(tmp_path, **settings, training={"checkpoint_every_steps": None})
    steps = steps_of(tmp_path, "deep")
    assert {step["waits"] for step in steps} == {1}
    by_hand = counted("--by-hand", str(step_min_items // 4))
    assert max(step["kernels"] for step in steps[1:]) <= 1.1 * by_hand[-1]["kernels"]


def test_number_of_buffers_and_registers_does_not_make_the_host_wait(tmp_path: Path) -> None:
    """Constant buffers, a weighter that looks at each step, and clipping: still one wait per step."""
    module = """
from torch import nn
import torch

layers = [nn.Conv2d(1, 1, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 1)]
module = nn.Sequential(*layers)
for number in range(24):
    module.register_buffer(f"mask_{number}", torch.ones(3))
"""
    write_deep(
        tmp_path,
        module=module,
        training={"checkpoint_every_steps": None, "grad_clip_norm": 1e-6},
        logging={"text": {"every_steps": 1000}},
        data_loading={"step_min_items": 16},
    )
    weighter = tmp_path / "experiment_settings" / "deep" / "pymodules" / "loss_weighter.py"
    weighter.write_text(
        "from pipeline.components import MovingAverageLossWeighter\n\n"
        "loss_weighter = MovingAverageLossWeighter(decay=0.8)\n"
    )
    first, *others = steps_of(tmp_path, "deep")
    # The first batch of each dataset is compared by value.
    assert first["waits"] <= 2
    assert {step["waits"] for step in others} == {1}


def test_scaled_gradients_do_not_make_the_host_wait(tmp_path: Path) -> None:
    """With fp16 the scaler's own step would wait a second time; as long as nothing overflows, the host waits once."""
    module = "from torch import nn\n\nmodule = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 1))\n"
    training = {"checkpoint_every_steps": None, "precision": "fp16"}
    logging = {"text": {"every_steps": 1000}}
    folder = write_deep(tmp_path, module=module, training=training, logging=logging, data_loading={"step_min_items": 4})
    transform = folder / "pymodules/module_transforms/a.py"
    transform.write_text(transform.read_text().replace("difference**2,", "difference**2 * 1e-3,"))
    assert {step["waits"] for step in steps_of(tmp_path, "deep")} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_two_processes_have_the_bits_of_the_cpu(tmp_path: Path, reduction: str, precision: str) -> None:
    """Collectives in the queue, the scaler, autocast and the tree of exact sums."""
    training = {"gradient_reduction": reduction, "precision": precision}
    sim, cpu = on_both(tmp_path, nproc=2, training=training)
    differing = [path for path, content in data_of(cpu).items() if data_of(sim).get(path) != content]
    assert differing == []


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [None, 2, 3])
def test_exact_resumes_on_the_device_after_kills(tmp_path: Path, nproc: int | None) -> None:
    """Killed twice inside an epoch and resumed with other numbers of processes, it ends as the CPU left alone."""
    training = {"gradient_reduction": "exact"}
    for home in ("sim", "cpu"):
        write_experiment(tmp_path / home, training=training)
    finished(tmp_path / "cpu", simulated=False)
    state_file = tmp_path / "sim" / "experiment_results" / "tiny" / "state.json"
    for generation in (4, 8):
        with BackgroundRun(tmp_path / "sim", "--auto", nproc=nproc, env=SIMULATED) as run:
            run.wait_for(lambda wanted=generation: committed(state_file) >= wanted)
            run.kill()
    finished(tmp_path / "sim", "--auto", nproc=2)
    assert data_of(tmp_path / "sim") == data_of(tmp_path / "cpu")


@pytest.mark.slow
def test_evaluation_on_the_device_has_the_values_of_the_cpu(tmp_path: Path) -> None:
    """The verb reads the same weights and prints the same numbers."""
    write_experiment(tmp_path)
    finished(tmp_path, "--stop-after-epoch", "1")
    words = ["evaluate", "tiny", "--pool", "last", "--json", "--data-home", str(tmp_path)]
    line = [sys.executable, "-m", "pipeline", *words]
    printed = [
        subprocess.run(line, cwd=ROOT, env=environment(env), capture_output=True, text=True, check=True).stdout
        for env in (SIMULATED, {})
    ]
    assert printed[0] == printed[1]


def committed(state_file: Path) -> int:
    return int(json.loads(state_file.read_text())["generation"]) if state_file.exists() else 0


def test_next_batch_is_loaded_while_the_device_works(tmp_path: Path) -> None:
    """Loading and copying are hidden behind the kernels of the step before."""
    write_deep(tmp_path, training={"checkpoint_every_steps": None}, logging={"text": {"every_steps": 1000}})
    steps = steps_of(tmp_path, "deep")
    assert all(step["loads_while_busy"] for step in steps)


BATCH_OBJECTS = """
from collections import UserDict

import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

train_dataloader_args = {"batch_size": 4}
eval_dataloader_args = {"batch_size": 4}


class Moving:
    def __init__(self, values):
        self.values = values

    def to(self, device):
        return Moving(self.values.to(device))


def collate_fn(points):
    batch = default_collate(points)
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    return UserDict(x=Moving(batch["x"]), y=batch["y"], packed=packed)
"""
TAKES_OBJECTS = """
from torch.nn.utils.rnn import PackedSequence

from pipeline.components import BaseModuleTransform

loss_registers = ["loss_a", "error"]


class ModuleTransform(BaseModuleTransform):
    def __call__(self, batch, modules):
        assert isinstance(batch["packed"], PackedSequence)
        images = batch["x"].values[:, None, None, :].expand(-1, 1, 6, 6)
        difference = modules["trunk"](images)[:, 0] - batch["y"] * batch["packed"].data[0]
        return {"loss_a": difference**2, "error": difference.detach().abs()}
"""


def test_batches_may_be_objects_that_move_themselves(tmp_path: Path) -> None:
    """A mapping that is no dict, an object with a method to, and torch's PackedSequence reach the device."""
    for home in ("sim", "cpu"):
        pymodules = write_deep(tmp_path / home) / "pymodules"
        (pymodules / "dataloaders" / "a.py").write_text(BATCH_OBJECTS)
        (pymodules / "module_transforms" / "a.py").write_text(TAKES_OBJECTS)
        finished(tmp_path / home, "--stop-after-epoch", "1", simulated=home == "sim", name="deep")
    assert data_of(tmp_path / "sim", "deep") == data_of(tmp_path / "cpu", "deep")


def test_loss_on_the_host_is_named_at_the_first_batch(tmp_path: Path) -> None:
    """Not 64 steps later, when losses are collected."""
    pymodules = write_deep(tmp_path) / "pymodules"
    transform = pymodules / "module_transforms" / "a.py"
    transform.write_text(transform.read_text().replace("difference.detach().abs()", "difference.detach().abs().cpu()"))
    done = run_process(tmp_path, name="deep", env=SIMULATED)
    assert done.returncode == 1
    assert "must return 'error' on the device of the run, sim:0, but it is on cpu" in done.stderr


def test_out_of_memory_names_dataset_shapes_and_batch_size(tmp_path: Path) -> None:
    """One sentence and what to do about it, instead of an allocator's table."""
    write_deep(tmp_path)
    done = run_process(tmp_path, name="deep", env={**SIMULATED, "SIMULATED_DEVICE_BYTES": "100000"})
    assert done.returncode == 1
    assert (
        "Out of memory on sim:0 in a batch of dataset 'a' with batch_size 4: x (4, 6) float32, y (4,) float32, "
        "idx (4,) int64.\n  fix: lower batch_size in pymodules/dataloaders/a.py"
    ) in done.stderr
    assert "Traceback" not in done.stderr


EQUAL_DATASETS = {
    f"pymodules/datasets/{name}.py": """
    from ..utils.points import Points

    dataset = Points(50, 0)
"""
    for name in ("a", "b")
}
PLAIN = {
    "pymodules/data_transforms/a.py": """
        from pipeline.components import BaseDataTransform

        TrainDataTransform = EvalDataTransform = BaseDataTransform
    """,
    "pymodules/modules/trunk.py": """
        from torch import nn

        module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU())
        settings = {}
    """,
}


def with_batches_of(size: int) -> dict[str, str | None]:
    loading = f"train_dataloader_args = {{'batch_size': {size}}}\neval_dataloader_args = {{'batch_size': 4}}\n"
    files: dict[str, str | None] = {**EQUAL_DATASETS, **PLAIN}
    return files | {f"pymodules/dataloaders/{name}.py": loading for name in ("a", "b")}


@pytest.mark.slow
def test_synchronised_batchnorm_with_two_datasets_is_that_of_larger_batches(tmp_path: Path) -> None:
    """All ranks run the same dataset at the same time: two of them with batches of 4 are one with batches of 8."""
    settings: dict[str, object] = {"data_loading": {"step_min_items": 16}}
    # Of 8 and 16 training points. A step is then a b b a: neighbouring batches are not of one dataset.
    sizes: dict[str, str | None] = {
        f"pymodules/datasets/{name}.py": f"from ..utils.points import Points\n\ndataset = Points({size}, 0)\n"
        for name, size in (("a", 10), ("b", 20))
    }
    files = {**with_batches_of(4), **sizes}
    write_experiment(tmp_path / "two", files=files, training={"sync_batchnorm": True}, **settings)
    finished(tmp_path / "two", nproc=2)
    write_experiment(tmp_path / "one", files={**with_batches_of(8), **sizes}, **settings)
    finished(tmp_path / "one", simulated=False)
    for register in ("loss_a", "loss_b"):
        records = [
            tmp_path / home / "experiment_results/tiny/data/loss_reg_data/train" / register / "step_data_1.npz"
            for home in ("two", "one")
        ]
        curves = [np.load(record)["means"] for record in records]
        # The second step has no batch of a.
        assert np.allclose(*curves, rtol=1e-4, equal_nan=True)


@pytest.mark.slow
def test_uneven_steps_with_synchronised_batchnorm_are_refused(tmp_path: Path) -> None:
    """A rank without a batch of the dataset would never enter the layer, and the others would wait for it."""
    write_experiment(tmp_path, training={"sync_batchnorm": True})
    done = run_process(tmp_path, nproc=2, env=SIMULATED)
    assert done.returncode == 1
    assert "multiple of the 2 processes, but step " in done.stderr


@pytest.mark.slow
def test_rank_that_is_killed_ends_the_others_within_seconds(tmp_path: Path) -> None:
    """A kernel that waits for a lost peer never ends, and torchrun would kill its host only after 30 seconds."""
    write_experiment(tmp_path, training={"checkpoint_every_steps": 1})
    state_file = tmp_path / "experiment_results" / "tiny" / "state.json"
    with BackgroundRun(tmp_path, nproc=2, env=SIMULATED) as run:
        run.wait_for(lambda: committed(state_file) >= 3)
        began = time.monotonic()
        os.kill(run.worker_pids()[1], signal.SIGKILL)
        run.process.wait(timeout=60)
        seconds = time.monotonic() - began
        output = run.output.read_text()
    assert "Ended because another process of this run has failed or was killed. The last commit is intact" in output
    assert seconds < 25


@pytest.mark.slow
def test_proof_for_people_with_a_gpu_runs_here(tmp_path: Path) -> None:
    """Every promise that the simulated device can keep is kept, and the table says which it cannot."""
    line = [sys.executable, "-m", "tests.proof", "--simulated"]
    done = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed, 0 failed, 2 not tried" in done.stdout


SHOWS = """
    def predict(self, batch, modules):
        return {"sums": batch["x"].sum(1)}

    def images(self, batch, modules):
        return {"row": batch["x"][:1, None, :].sigmoid().expand(1, 6, 6)}
"""


@pytest.mark.slow
def test_verbs_read_the_device(tmp_path: Path) -> None:
    """check, predictions, images, a replayed step and the proof of a resume bring tensors to the host."""
    pymodules = write_deep(tmp_path) / "pymodules"
    transform = pymodules / "module_transforms" / "a.py"
    transform.write_text(transform.read_text() + SHOWS)

    def call(*words: str) -> str:
        line = [sys.executable, "-m", "pipeline", *words, "--data-home", str(tmp_path)]
        done = subprocess.run(line, cwd=ROOT, env=environment(SIMULATED), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "1 on sim" in call("check", "deep")
    finished(tmp_path, "--stop-after-epoch", "1", name="deep")
    assert list((tmp_path / "experiment_logs" / "deep").rglob("*.png"))
    predictions = tmp_path / "predictions.npz"
    call("evaluate", "deep", "--pool", "last", "--out", str(predictions))
    assert any("sums" in name for name in np.load(predictions).files)
    call("replay", "deep", "--epoch", "1", "--step", "2", "--save", str(tmp_path / "step"))
    assert "bit" in call("verify-resume", "deep")


@pytest.mark.slow
def test_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    """They wait for it in a kernel, as for one that was killed: only a rank that has finished says farewell."""
    text = FILES["pymodules/module_transforms/a.py"].replace(
        "outputs = modules",
        # An evaluation would wait in a collective of the host, which notices.
        'assert os.environ["RANK"] == "0" or not modules["trunk"].training, "boom"\n                outputs = modules',
    )
    text = text.replace("from pipeline.components", "import os\n\n        from pipeline.components", 1)
    write_experiment(tmp_path, files={"pymodules/module_transforms/a.py": text})
    done = run_process(tmp_path, nproc=2, env=SIMULATED)
    assert done.returncode == 1
    assert "AssertionError: boom" in done.stderr
    assert "Ended because another process of this run has failed or was killed" in done.stdout + done.stderr
