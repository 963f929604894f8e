"""What the campaigns share: each experiment runs undisturbed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.crash.experiment import prepare
from tests.support.running import run_process


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the home of the experiment after an undisturbed run with so many processes."""

    @cache
    def run(nproc: int) -> Path:
        home = tmp_path_factory.mktemp(f"undisturbed_{nproc}")
        prepare(home)
        done = run_process(home, nproc=nproc)
        assert done.returncode == 0, done.stderr
        return home

    return run
