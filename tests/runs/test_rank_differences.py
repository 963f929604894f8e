"""Ranks never diverge silently: what must be equal is compared, and a difference is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.store.compare import first_difference
from tests.support.experiments import write_experiment
from tests.support.running import ENTRY, environment, run_inside, run_process

DATA = Path("experiment_results/tiny/data")
# Weights, or a buffer, that every process draws for itself.
UNKEYED_WEIGHTS: dict[str, str | None] = {
    "pymodules/modules/head_a.py": """
        import numpy as np
        import torch
        from torch import nn

        module = nn.Linear(8, 1)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(np.random.default_rng().normal(size=(1, 8))))
        settings = {}
    """
}
UNKEYED_BUFFER: dict[str, str | None] = {
    "pymodules/modules/head_a.py": """
        import numpy as np
        import torch
        from torch import nn

        module = nn.Linear(8, 1)
        module.register_buffer("code", torch.tensor(np.random.default_rng().normal()))
        settings = {}
    """
}


@pytest.mark.parametrize(
    ("files", "reduction", "named"),
    [
        (UNKEYED_WEIGHTS, "exact", "ranks 0 and 1 differ in weight 'weight' of module 'head_a'"),
        pytest.param(UNKEYED_WEIGHTS, "fast", "in weight 'weight' of module 'head_a'", marks=pytest.mark.slow),
        (UNKEYED_BUFFER, "fast", "ranks 0 and 1 differ in buffer 'code' of module 'head_a'"),
    ],
    ids=["weights, exact", "weights, fast", "buffer, fast"],
)
def test_unequal_starts_are_refused(tmp_path: Path, files: dict[str, str | None], reduction: str, named: str) -> None:
    """Ranks that begin with other weights or buffers than rank 0 end before anything is written."""
    write_experiment(tmp_path, files=files, training={"gradient_reduction": reduction})
    done = run_process(tmp_path, nproc=2)
    assert done.returncode == 1
    assert named in done.stderr
    assert "np.random.default_rng()" in done.stderr
    assert done.stderr.count("Ranks must be equal") <= 2, "rank 0 says it, and torchrun's table repeats it"
    assert not (tmp_path / "experiment_results").exists()


def test_unequal_starts_may_be_repaired(tmp_path: Path) -> None:
    """With broadcast all ranks continue with the weights of rank 0, which is logged; later comparisons hold."""
    write_experiment(tmp_path, files=UNKEYED_WEIGHTS, training={"on_rank_difference": "broadcast"})
    done = run_process(tmp_path, "--stop-after-epoch", "1", nproc=2)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert output.count("Ranks are not equal") == 1
    assert "ranks 0 and 1 differ in weight 'weight' of module 'head_a'. All continue with what rank 0 has" in output


def test_broadcast_and_exact_are_refused_together(tmp_path: Path) -> None:
    """A rank that had to be overwritten has computed other bits, which exact rules out."""
    write_experiment(tmp_path, training={"on_rank_difference": "broadcast", "gradient_reduction": "exact"})
    done = run_process(tmp_path)
    assert done.returncode == 2
    assert 'does not go together with on_rank_difference: "broadcast"' in done.stderr


NAMED = {
    "weight": "in weight 'weight' of module 'head_a'",
    "frozen weight": "in weight '0.weight' of module 'stem'",
    "buffer": "in buffer '1.running_var' of module 'trunk'",
    "optimizer state": "in weight 'weight' of module 'head_a'",
    "optimizer step": "in state 'step' of weight 'trunk.0.weight' of optimizer 'trunk'",
    "scaler": "in the state of the gradient scaler",
    "rate": "in 'lr' of group 'heads' of optimizer 'heads'",
    "flag": "in requires_grad of 'weight' in module 'head_b'",
    "other flags": "in requires_grad of 'weight' in module 'head_a'",
    "scheduler": "in the file sched_data/trunk/state.json that save() writes",
    "weighter": "in loss weight of register 'loss_a' (loss_weighter.py)",
    "restore": "in weight '0.weight' of module 'stem'",
}


@pytest.mark.slow
def test_one_flipped_bit_on_one_of_three_ranks_is_named(tmp_path: Path) -> None:
    """Weights, buffers, optimizer states, scaler, flags, rates and components, with every engine, and after a restore.

    A flipped optimizer state has reached the weights by the next commit, and is named by them.
    """
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "-m", "tests.support.flipping"]
    done = subprocess.run(
        [*line, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 28
    for case, message in found.items():
        expected = f"rank 1 differs from ranks 0 and 2 {NAMED[case.split(', ')[1]]}"
        assert message.startswith("RanksDiffer: Ranks must be equal, but " + expected), f"{case}: {message}"


def resume_with_stale_rank(home: Path, stale: dict[Path, Path]) -> subprocess.CompletedProcess[str]:
    """Resume with two processes, of which rank 1 sees old folders in place of some others."""
    mounts = " && ".join(f"mount --bind {source} {target}" for target, source in stale.items())
    line = f"exec {sys.executable} {ENTRY} tiny --data-home {home} --resume"
    script = home / "rank.sh"
    script.write_text(f'[ "$RANK" = 1 ] && exec unshare -m sh -c "{mounts} && {line}"\n{line}\n')
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    return subprocess.run(
        [*torchrun, "sh", str(script)], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def can_mount() -> bool:
    done = subprocess.run(["unshare", "-m", "mount", "--bind", "/tmp", "/tmp"], capture_output=True, check=False)
    return done.returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs the right to mount in a namespace of its own")


@needs_mounts
def test_rank_that_sees_an_older_view_restores_the_same_commit(tmp_path: Path) -> None:
    """A machine whose cache still has the files of an older commit under their names in data/ does not read them."""
    write_experiment(tmp_path / "whole", training={"gradient_reduction": "exact"})
    write_experiment(tmp_path / "stale", training={"gradient_reduction": "exact"})
    run_inside(tmp_path / "whole")
    data = tmp_path / "stale" / DATA
    run_inside(tmp_path / "stale", "--stop-after-epoch", "1")
    older = {name: tmp_path / "older" / name for name in ("module_ckps/last", "optim_ckps", "sched_data")}
    for name, copy in older.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", data / name, copy], check=True)
    run_inside(tmp_path / "stale", "--resume", "--stop-after-epoch", "2")
    done = resume_with_stale_rank(tmp_path / "stale", {data / name: copy for name, copy in older.items()})
    assert done.returncode == 0, done.stderr
    assert first_difference(tmp_path / "whole" / DATA, data) is None


@needs_mounts
def test_rank_that_reads_other_bytes_than_were_committed_is_refused(tmp_path: Path) -> None:
    """Where even the names of a commit lead to old bytes, digests tell, and the message names the machine."""
    write_experiment(tmp_path)
    run_inside(tmp_path, "--stop-after-epoch", "1")
    generations = tmp_path / "experiment_results/tiny/generations"
    newest = max((path for path in generations.glob("*/optim_ckps")), key=lambda path: int(path.parent.name))
    older = tmp_path / "older"
    subprocess.run(["cp", "-r", newest, older], check=True)
    (older / "heads.pt").write_bytes(bytes(len((older / "heads.pt").read_bytes())))
    done = resume_with_stale_rank(tmp_path, {newest: older})
    assert done.returncode == 1
    assert "does not see the commit that rank 0 has verified" in done.stderr
    assert "heads.pt is damaged: its content is not what was committed" in done.stderr
