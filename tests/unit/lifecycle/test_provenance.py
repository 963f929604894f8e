"""Provenance: what each start of an experiment ran on."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from pipeline.distributed.hardware import Hardware, describe_hardware
from pipeline.distributed.processes import Processes
from pipeline.errors import PipelineError
from pipeline.lifecycle.provenance import describe_start
from pipeline.lifecycle.starts import differences, read_starts, record_start
from pipeline.paths import ExperimentPaths
from pipeline.progress import TRAINING, Progress
from pipeline.system.accelerators import cpu_model
from pipeline.system.disk import Disk


@pytest.fixture
def paths(tmp_path: Path) -> ExperimentPaths:
    """An experiment with the folders in which starts are written."""
    found = ExperimentPaths(tmp_path, "tiny")
    found.temp_data.mkdir(parents=True)
    return found


def git(folder: Path, *words: str) -> str:
    """Run git in a folder and return what it prints."""
    names = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    return subprocess.run(
        ["git", *names, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_start_tells_what_it_ran_on() -> None:
    """Command, host, processes, devices, vector units, threads and versions are all there."""
    start = describe_start(Processes(), Progress(TRAINING, 2, 5))
    assert start["command"] == sys.argv
    assert start["host"] == socket.gethostname()
    assert (start["world_size"], start["backend"], len(start["devices"])) == (1, "none", 1)
    versions = (torch.__version__, numpy.__version__, platform.python_version())
    assert (start["torch"], start["numpy"], start["python"]) == versions
    assert start["from"] == {"stage": TRAINING, "epoch": 2, "step": 5}
    assert start["devices"] == start["cpus"] == [cpu_model()]
    assert start["cpu_capabilities"] == [torch.backends.cpu.get_cpu_capability()]
    assert (start["threads"], start["deterministic"]) == (torch.get_num_threads(), False)
    assert {"mkl", "onednn", "blas", "cuda", "cudnn", "cpu_variables"} <= set(start)


def test_unequal_ranks_are_recorded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is the same everywhere is written once; the rest in rank order."""
    hardware = describe_hardware(torch.device("cpu"))
    monkeypatch.setattr(Processes, "gather", lambda self, value: [value, _with_more_threads(value)])
    start = describe_start(Processes(), Progress())
    assert start["threads"] == [hardware.threads, hardware.threads + 1]
    assert (start["torch"], start["cpus"]) == (hardware.torch, [hardware.cpu] * 2)


def _with_more_threads(value: object) -> object:
    return replace(value, threads=value.threads + 1) if isinstance(value, Hardware) else value


def test_commit_and_dirty_flag_are_those_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean checkout is clean, and one new file makes it dirty."""
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "first")
    monkeypatch.chdir(tmp_path)
    start = describe_start(Processes(), Progress())
    assert (start["git_commit"], start["git_dirty"]) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "new").touch()
    assert describe_start(Processes(), Progress())["git_dirty"] is True


def test_folder_outside_a_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git there is nothing to tell, and no error."""
    monkeypatch.chdir(tmp_path)
    start = describe_start(Processes(), Progress())
    assert (start["git_commit"], start["git_dirty"]) == (None, None)


def test_machine_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without git is no error either."""
    monkeypatch.setattr("pipeline.lifecycle.provenance._run_git", lambda *words: None)
    assert describe_start(Processes(), Progress())["git_commit"] is None


def test_starts_are_added_and_never_changed(paths: ExperimentPaths) -> None:
    """Each start is one line behind those before it."""
    record_start(paths, {"pid": 1}, Disk(), paths.temp_data)
    first = paths.starts_file.read_bytes()
    record_start(paths, {"pid": 2}, Disk(), paths.temp_data)
    assert paths.starts_file.read_bytes().startswith(first)
    assert read_starts(paths) == [{"pid": 1}, {"pid": 2}]


def test_experiment_that_never_started_has_no_starts(paths: ExperimentPaths) -> None:
    """No file means no starts."""
    assert read_starts(paths) == []


def test_other_machine_is_told_as_what_differs() -> None:
    """What may change bits is named with before and after; the rest is not."""
    before = {"world_size": 2, "torch": "2.6", "threads": 1, "host": "a"}
    now = {"world_size": 4, "torch": "2.7", "threads": 1, "host": "b"}
    assert list(differences(before, now).values()) == ["world_size 2 → 4", "torch 2.6 → 2.7"]


def test_devices_differ_by_their_kind() -> None:
    """More of the same devices are no difference; another kind among them is."""
    assert differences({"devices": ["A100", "A100"]}, {"devices": ["A100"]}) == {}
    assert differences({"devices": ["A100"]}, {"devices": ["H100", "A100"]}) == {
        "devices": "devices A100 → H100 on rank 0 and A100 on rank 1"
    }


def test_same_machine_differs_in_nothing() -> None:
    """A resume under the same conditions has nothing to warn of."""
    start = describe_start(Processes(), Progress())
    assert differences(start, describe_start(Processes(), Progress())) == {}


def test_starts_that_cannot_be_read_are_not_overwritten(paths: ExperimentPaths) -> None:
    """What cannot be read is told, because the next start would replace it."""
    paths.starts_file.mkdir()
    with pytest.raises(PipelineError, match=r"starts\.jsonl cannot be read: Is a directory"):
        record_start(paths, {"pid": 1}, Disk(), paths.temp_data)
