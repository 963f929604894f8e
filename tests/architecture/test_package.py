"""What is shipped: a wheel that works outside the checkout, and a tree that says nothing it should not."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing but the built wheel, which sees this one's packages behind it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    wheel = next(folder.glob("*.whl"))
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True, capture_output=True
    )
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    theirs = next((folder / "venv/lib").glob("python*/site-packages"))
    kept = [
        path
        for path in Path(ours).iterdir()
        if not path.name.startswith(("training_pipeline", "_training", "__editable"))
    ]
    for path in kept:
        if not (theirs / path.name).exists() and path.suffix != ".pth":
            (theirs / path.name).symlink_to(path)
    return folder


def test_wheel_works_outside_the_checkout(installed: Path) -> None:
    """From the wheel alone a new experiment is written from the shipped example and trained."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    home = installed / "home"
    home.mkdir()

    def call(*words: str) -> str:
        line = [str(installed / "venv/bin/python"), *words]
        done = subprocess.run(line, cwd=home, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "digits" in call("-m", "pipeline", "new", "--list")
    call("-m", "pipeline", "new", "mine")
    assert str(installed) in call("-c", "import pipeline; print(pipeline.__file__)")
    trained = call("-m", "training_pipeline", "mine", "--stop-after-epoch", "0")
    assert "stopped at epoch 1" in trained
    assert "report: " in trained
    assert "stopped since" in call("-m", "pipeline", "status", "mine")


def test_core_needs_few_packages() -> None:
    """The dependencies are the five that the project allows itself."""
    text = (ROOT / "pyproject.toml").read_text()
    block = text.split("dependencies = [")[1].split("]")[0]
    names = {line.strip().strip('",').split(">")[0] for line in block.splitlines() if line.strip()}
    assert names == {"torch", "numpy", "jsonschema", "filelock", "tqdm"}
