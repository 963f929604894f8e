"""Whatever is typed or found on disk is understood or refused with a message, and nothing else happens."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.__main__ import main
from pipeline.arguments import Arguments, parse_arguments
from pipeline.checkpoint.records import Records
from pipeline.errors import InvalidExperiment, PipelineError, UnreadableFile, UsageError
from pipeline.experiment.settings.settings import LossRegister, parse_settings, read_contents
from pipeline.lifecycle.mode import choose_action, inspect_results
from pipeline.lifecycle.reset import open_fresh, reset
from pipeline.lifecycle.starts import read_starts, record_start
from pipeline.paths import ExperimentPaths, check_name
from pipeline.progress import TRAINING, Progress
from pipeline.serialization.torch_files import load_tensors
from pipeline.store.changes import Changes
from pipeline.store.lock import RunLock, check_free, read_owner
from pipeline.store.manifest import MANIFEST_FILE, read_sealed_json, sealed_json
from pipeline.store.store import SEALED_FILE, ResultsStore, is_settled
from pipeline.system.disk import Disk, bytes_writer
from tests.support.experiments import SETTINGS, tree, write_experiment

often = settings(derandomize=True, deadline=None, max_examples=300)
sometimes = settings(derandomize=True, deadline=None, max_examples=100)

NAMES = st.text(max_size=30) | st.text(alphabet="ab./-_~ \\\0\n+", max_size=12) | st.from_regex(r"[a-z.]+(/[a-z.]+)*")
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**63, 1e308, 5e-324])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["..", "../x", "/etc/x", "1/x", ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
DEEP = st.sampled_from([b"[" * 100_000, b'{"a":' * 20_000, b"[" * 400 + b"]" * 400])
TEXTS = VALUES.map(lambda value: json.dumps(value).encode())
BYTES = st.binary(max_size=60) | TEXTS | TEXTS.map(lambda text: b"\xef\xbb\xbf" + text) | DEEP
BYTES |= TEXTS.map(lambda text: text.decode().encode("utf-16"))
BYTES |= st.sampled_from([b"\xff", b"9" * 5000, b'{"a":1,"a":2}', b"NaN", b'{"a": Infinity}'])


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder in memory that is gone afterwards, with a canary beside the data home inside it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        (Path(name) / "canary").write_text("alive")
        (Path(name) / "home").mkdir()
        yield Path(name)
        assert (Path(name) / "canary").read_text() == "alive"
        assert {path.name for path in Path(name).iterdir()} == {"canary", "home"}


def parsed(*words: str) -> Arguments | None:
    """Return what a command line means, or None if it is refused with exit code 2 and one message."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
            return parse_arguments(list(words))
    except SystemExit as refusal:
        assert refusal.code == 2 or (refusal.code == 0 and {"-h", "--help"} & set(words))  # noqa: PT017
        assert "Traceback" not in output.getvalue()
        return None


@often
@given(NAMES)
def test_any_name_is_refused_or_leads_into_the_data_home(name: str) -> None:
    """A name is an experiment of this data home or bad usage, on the command line and as a name of its own."""
    arguments = parsed("--", name)
    try:
        paths = ExperimentPaths(Path("/home/data"), check_name(name))
    except UsageError:
        assert arguments is None
        return
    assert arguments == Arguments(name)
    for path in (paths.settings, paths.results, paths.logs, paths.error_files, paths.trash):
        assert Path(os.path.normpath(path)) == path
        assert path.is_relative_to("/home/data")


@sometimes
@given(st.from_regex(r"\A[a-z._-]{1,3}(/[a-z._-]{1,3}){0,2}\Z"))
def test_resetting_any_name_spares_all_else(name: str) -> None:
    """Whatever name is reset, what lies beside the data home and in other experiments survives."""
    if parsed("--", name) is None:
        return
    with folder() as top:
        other, paths = ExperimentPaths(top / "home", "other"), ExperimentPaths(top / "home", name)
        other.results.mkdir(parents=True)
        (other.results / "precious").write_text("alive")
        choose_action(Arguments(name, mode="reset"), paths, inspect_results(paths))
        reset(paths, Disk())
        lock = RunLock(paths)
        open_fresh(paths, Disk(), lock)
        lock.release()
        assert (other.results / "precious").read_text() == "alive"


@often
@given(st.lists(st.text(max_size=12) | st.sampled_from(["--set", "--reset", "--stop-after-epoch", "-1", "a", "--x"])))
def test_any_command_line_is_understood_or_refused(words: list[str]) -> None:
    """No list of words makes the parser crash."""
    parsed(*words or [""])


KEYS = st.sampled_from(
    [f"{file}.{key}" for file in SETTINGS for key in SETTINGS[file]]
    + ["logging.progress_bar.enabled", "logging.progress_bar.train_updates", "training.lr_scaling.rule", "training."]
)
OVERRIDES = st.text(max_size=20) | st.builds(
    lambda key, value: f"{key}={value}", KEYS | st.text(max_size=10), VALUES.map(json.dumps) | st.text(max_size=10)
)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The settings folder of a valid experiment, which no test changes."""
    return write_experiment(tmp_path_factory.mktemp("valid")) / "settings"


@often
@given(st.lists(OVERRIDES, max_size=3))
def test_any_override_is_applied_or_refused(valid: Path, overrides: list[str]) -> None:
    """An override changes a setting to what its schema allows, or is refused with a message."""
    try:
        contents = read_contents(valid, tuple(overrides))
    except InvalidExperiment as refusal:
        assert str(refusal)  # noqa: PT017
        return
    parse_settings(contents)
    json.dumps(contents, allow_nan=False)
    assert max(map(abs, numbers_in(contents)), default=0) < 2**63


def numbers_in(value: Any) -> Iterator[float]:
    """Yield every number anywhere in a JSON document."""
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(inner)
    elif isinstance(value, (int, float)):
        yield value


def check_settings(name: str, content: bytes) -> None:
    """Check that settings with one file of this content are valid or refused with that file's name."""
    with folder() as top:
        target = write_experiment(top / "home") / "settings"
        (target / f"{name}.json").write_bytes(content)
        try:
            parse_settings(read_contents(target))
        except InvalidExperiment as refusal:
            assert all(f"{name}.json" in problem.where for problem in refusal.problems)  # noqa: PT017


@often
@given(st.sampled_from(sorted(SETTINGS)), BYTES)
def test_any_bytes_are_settings_or_refused(name: str, content: bytes) -> None:
    """A settings file of any content is read or told, never a crash."""
    check_settings(name, content)


@often
@given(st.sampled_from(sorted(SETTINGS)), st.data())
def test_changed_settings_are_valid_or_refused(name: str, data: st.DataObject) -> None:
    """The same holds for a valid file in which any value has become another."""
    check_settings(name, json.dumps(changed(SETTINGS[name], data)).encode())


def changed(value: Any, data: st.DataObject) -> Any:
    """Return a JSON document with one value replaced, or one key or item removed, anywhere inside."""
    if isinstance(value, (dict, list)) and value and data.draw(st.integers(0, 4)):
        keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
        key, copy = data.draw(st.sampled_from(keys)), value.copy()
        if data.draw(st.integers(0, 3)):
            copy[key] = changed(value[key], data)
        else:
            del copy[key]
        return copy
    return data.draw(VALUES)


def commit(number: int) -> Changes:
    return Changes(
        files={"pools/last/m.pt": bytes_writer(b"%d" % number)},
        same_as={f"pools/epoch_{number}/m.pt": "pools/last/m.pt"},
        sealed={f"records/{number}.npz": bytes_writer(b"%d" % number)},
    )


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of an experiment with four commits, which no test changes."""
    paths = ExperimentPaths(tmp_path_factory.mktemp("committed"), "store")
    for needed in (paths.data, paths.generations):
        needed.mkdir(parents=True)
    lock = RunLock(paths)
    lock.acquire()
    store = ResultsStore(paths, Disk(), lock.claim)
    for number in range(1, 5):
        store.commit(commit(number), Progress(TRAINING, number), {"number": number})
    lock.release()
    return paths.results


@contextlib.contextmanager
def results_of(committed: Path) -> Iterator[ExperimentPaths]:
    with folder() as top:
        paths = ExperimentPaths(top / "home", "store")
        shutil.copytree(committed, paths.results)
        yield paths


def check_recovery(paths: ExperimentPaths) -> None:
    """Check that results are recovered to one of their commits, or refused and left as they are."""
    before, lock = tree(paths.results), RunLock(paths)
    try:
        inspect_results(paths)
        is_settled(paths)
        assert tree(paths.results) == before
        lock.acquire()
        store = ResultsStore(paths, Disk(), lock.claim)
        store.recover(lambda path: path.startswith("pools/last"))
        store.commit(commit(9), Progress(TRAINING, 9), {})
        assert (paths.data / "pools/last/m.pt").read_bytes() == b"9"
    except PipelineError:
        lock.release()
        after = tree(paths.results)
        assert {name: after[name] for name in before if name != "run.lock"} == {
            name: known for name, known in before.items() if name != "run.lock"
        }
    finally:
        lock.release()


@sometimes
@given(st.sampled_from(["state.json", f"generations/4/{MANIFEST_FILE}", f"generations/3/{SEALED_FILE}"]), BYTES)
def test_any_bytes_in_place_of_the_state_are_survived(committed: Path, name: str, content: bytes) -> None:
    """A damaged state file, manifest or list never leads anywhere but to a commit or to a refusal."""
    with results_of(committed) as paths:
        (paths.results / name).write_bytes(content)
        check_recovery(paths)


@often
@given(st.sampled_from(["state.json", f"generations/4/{MANIFEST_FILE}", f"generations/4/{SEALED_FILE}"]), st.data())
def test_sealed_nonsense_is_survived(committed: Path, name: str, data: st.DataObject) -> None:
    """A document with the right seal that makes no sense, or leads out of the results, is as good as damaged."""
    with results_of(committed) as paths:
        document = changed(read_sealed_json(paths.results / name), data)
        (paths.results / name).write_bytes(sealed_json(document if isinstance(document, dict) else {"x": document}))
        check_recovery(paths)


STATUS = {
    "state": "running",
    "progress": {"stage": "training", "epoch": 2, "step": 3},
    "last": {"loss": 0.5, "error": None},
    "best": {"epoch": 1, "values": {"loss": 0.5}},
    "updated": "2024-01-01",
}


def check_status(paths: ExperimentPaths) -> None:
    """Check that everyone can look at an experiment, in every form."""
    for words in (["store"], ["store", "--json"], []):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert main(["status", *words, "--data-home", str(paths.home)]) == 0
        assert "store" in output.getvalue()


@sometimes
@given(BYTES)
def test_any_bytes_in_place_of_the_status_are_survived(committed: Path, content: bytes) -> None:
    """A status file is only looked at: what cannot be read is not shown."""
    with results_of(committed) as paths:
        paths.status_file.write_bytes(content)
        check_status(paths)


@sometimes
@given(st.data())
def test_changed_status_is_survived(committed: Path, data: st.DataObject) -> None:
    """The same holds for a status that says something else than we would."""
    with results_of(committed) as paths:
        paths.status_file.write_text(json.dumps(changed(STATUS, data)))
        check_status(paths)


@sometimes
@given(BYTES)
def test_any_bytes_in_place_of_the_lock_are_survived(committed: Path, content: bytes) -> None:
    """The lock is what the kernel says; its content only names the owner."""
    with results_of(committed) as paths:
        paths.lock_file.write_bytes(content)
        check_free(paths)
        assert isinstance(read_owner(paths), dict)


@sometimes
@given(BYTES | st.lists(BYTES).map(b"\n".join))
def test_any_bytes_in_place_of_the_starts_are_kept(committed: Path, content: bytes) -> None:
    """What stands in the list of starts stays there, and the next start is added to it."""
    with results_of(committed) as paths:
        paths.starts_file.write_bytes(content)
        before = read_starts(paths)
        record_start(paths, {"pid": 1}, Disk(), paths.temp_data)
        assert json.dumps(read_starts(paths), sort_keys=True) == json.dumps([*before, {"pid": 1}], sort_keys=True)


REGISTERS, RATES = [LossRegister("loss")], {"main": {"all": 0.1}}


def records_file(path: Path) -> bytes:
    """Return the bytes of a segment of two recorded steps."""
    records = Records(REGISTERS, RATES)
    for number in range(2):
        records.add_step_rates(RATES, {"main": 1.0}, number > 0)
        records.add_step_losses(np.ones(1), [3])
    with path.open("wb") as file:
        records.segment(0)(file)
    return path.read_bytes()


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """Return bytes with some of them changed, cut out or doubled."""
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        end = start + data.draw(st.integers(0, 40))
        content = content[:start] + data.draw(st.binary(max_size=8) | st.just(content[start:end] * 2)) + content[end:]
    return content


def check_loading(path: Path, load: Callable[[Path], Any]) -> None:
    """Check that a file is read or refused with one sentence that names it."""
    try:
        load(path)
    except UnreadableFile as refusal:
        assert str(path) in str(refusal)  # noqa: PT017


@often
@given(st.binary(max_size=100) | st.none(), st.data())
def test_any_bytes_in_place_of_records_are_survived(content: bytes | None, data: st.DataObject) -> None:
    """Records are read back or refused by name."""
    with folder() as top:
        path = top / "home/x.npz"
        whole = records_file(path)
        path.write_bytes(damaged(whole, data) if content is None else content)
        check_loading(path, lambda one: Records(REGISTERS, RATES).load_segment(one))


@sometimes
@given(st.dictionaries(st.sampled_from(["skipped", "means/loss", "items/loss", "lr/main/all"]), VALUES))
def test_any_arrays_in_place_of_records_are_survived(arrays: dict[str, Any]) -> None:
    """Arrays that are whole but not the right ones are told as well."""
    with folder() as top:
        path = top / "home/x.npz"
        records_file(path)
        with np.load(path) as found:
            kept = dict(found.items())
        odd = {name: repr(value) if isinstance(value, (list, dict)) else value for name, value in arrays.items()}
        np.savez(path, **{**kept, **odd})
        check_loading(path, lambda one: Records(REGISTERS, RATES).load_segment(one))


@often
@given(st.data())
def test_any_bytes_in_place_of_tensors_are_survived(data: st.DataObject) -> None:
    """A file of tensors with any bytes changed is read or refused by name."""
    with folder() as top:
        path = top / "home/x.pt"
        torch.save({"weight": torch.ones(2, 2), "more": [1, "x", None]}, path)
        path.write_bytes(damaged(path.read_bytes(), data))
        check_loading(path, load_tensors)
