"""Fixtures that every test has, and those that police what tests leave behind."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.system.logging import stop_logging
from pipeline.system.stop_requests import STOP_SIGNALS
from tests.support.experiments import write_experiment
from tests.support.running import end_launched, run_inside

# Trackers set variables of their own, and must not talk to anyone.
os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_MODE": "offline"}

# Workers of pytest-xdist are told a width, to which verbs would fold what the tests read.
os.environ.pop("COLUMNS", None)

# Under nohup or in the background, signals are ignored by whoever starts the tests, and so by all processes of theirs.
for _number in STOP_SIGNALS:
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A data home with the tiny experiment in it."""
    write_experiment(tmp_path)
    return tmp_path


@pytest.fixture
def launching_home(tmp_path: Path) -> Iterator[Path]:
    """An empty data home whose background runs are gone when the test is."""
    yield tmp_path
    end_launched(tmp_path)


@pytest.fixture(scope="session")
def begun_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data home whose tiny experiment stands after its first epoch; tests work on copies of it."""
    home = tmp_path_factory.mktemp("begun")
    write_experiment(home)
    run_inside(home, "--stop-after-epoch", "1")
    return home


@pytest.fixture
def begun(begun_once: Path, tmp_path: Path) -> Path:
    """A data home whose tiny experiment stands after its first epoch, to do anything with."""
    return Path(shutil.copytree(begun_once, tmp_path / "home", symlinks=True))


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """Undo what a run inside this process sets, and fail if a test leaks environment variables."""
    for variable in ("GORIDEEPSTYLE_DATA_HOME", "GORIDEEPSTYLE_RESULTS_HOME"):
        os.environ.pop(variable, None)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = dict(os.environ)
    sys.dont_write_bytecode, wrote = True, sys.dont_write_bytecode
    yield
    sys.dont_write_bytecode = wrote
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    stop_logging()
    for name in [name for name in sys.modules if name.startswith("_experiment_pymodules_")]:
        del sys.modules[name]
    os.environ.pop("GORIDEEPSTYLE_RESULTS_HOME", None)
    leaked = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    ours = {name for name in leaked if not name.startswith(("WANDB_", "MLFLOW_", "_MLFLOW_", "_TORCHINDUCTOR_"))}
    assert ours <= {"PYTEST_CURRENT_TEST", "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR"}
