"""Files that module transforms write after an evaluation: committed with it, keyed, limited in size."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pipeline.store.compare import first_difference
from tests.crash.campaign import live
from tests.support.experiments import FILES, write_experiment
from tests.support.running import run_inside, run_process
from tests.support.verbs import call

DATA = Path("experiment_results/tiny/data")
_METHOD = """
            def artifacts(self, batch, modules, folder):
                import torch

                drawn = torch.randn(3)
                (folder / "deep").mkdir()
                (folder / "deep" / "drawn.txt").write_text(str(drawn.tolist()))
                {more}

            def __call__"""


def write(home: Path, more: str = "pass", **settings: object) -> Path:
    text = FILES["pymodules/module_transforms/a.py"].replace("\n            def __call__", _METHOD.format(more=more), 1)
    write_experiment(home, files={"pymodules/module_transforms/a.py": text}, **settings)
    return home


def artifacts(home: Path) -> dict[str, str]:
    folder = home / DATA / "artifacts"
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.txt")}


def test_each_evaluation_has_files_of_its_own(tmp_path: Path) -> None:
    """All epochs stay, with other draws each, and the training is the same as without them."""
    written = write(tmp_path / "written")
    write_experiment(tmp_path / "plain")
    run_inside(written)
    run_inside(tmp_path / "plain")
    found = artifacts(written)
    # Two datasets share the class.
    assert sorted(found) == [f"{name}/epoch_{epoch}/deep/drawn.txt" for name in "ab" for epoch in range(4)]
    assert len(set(found.values())) == 8
    assert first_difference(written / DATA / "module_ckps", tmp_path / "plain" / DATA / "module_ckps") is None
    assert call(written, "fsck", "tiny") == 0


def test_too_large_files_are_left_out_with_a_warning(tmp_path: Path) -> None:
    """The training continues, and the limit is named."""
    more = '(folder / "big.bin").write_bytes(bytes(2 << 20))'
    done = run_process(write(tmp_path, more, logging={"artifacts": {"max_mb": 1}}), "--stop-after-epoch", "1")
    assert done.returncode == 0
    said = done.stdout + done.stderr
    assert "wrote 2.0 MB, but logging.artifacts.max_mb allows 1. Training continues without artifacts of a" in said
    assert not artifacts(tmp_path)


@pytest.mark.parametrize("engine", [{}, {"parallelism": "fsdp"}], ids=["ddp", "fsdp"])
@pytest.mark.slow
def test_killed_runs_keep_the_same_files(tmp_path: Path, engine: dict[str, str]) -> None:
    """Killed in the middle of writes at two processes, a run ends with every file of one that was left alone."""
    undisturbed, killed = (write(tmp_path / name, training=engine) for name in ("undisturbed", "killed"))
    assert run_process(undisturbed, nproc=2).returncode == 0
    draw = random.Random(5)
    assert any(life.was_killed for life in [live(killed, 2, "write", draw) for _ in range(3)])
    assert run_process(killed, "--auto", nproc=2).returncode == 0
    assert len(artifacts(killed)) == 8
    assert first_difference(undisturbed / DATA, killed / DATA) is None
