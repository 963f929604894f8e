"""Every path of an experiment, spelled once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.verbs import VERBS

# Folders of a data home.
SETTINGS_FOLDER = "experiment_settings"
RESULTS_FOLDER = "experiment_results"
LOGS_FOLDER = "experiment_logs"
# Folders below data/: the public names of committed files.
MODULE_CKPS = "module_ckps"
# Next to the pools of weights: what all pools of a module have in common, written once.
CONSTANT = "constant"
OPTIM_CKPS = "optim_ckps"
SCHED_DATA = "sched_data"
LR_DATA = "lr_data"
LOSS_REG_DATA = "loss_reg_data"
LOSS_WEIGHT_DATA = "loss_weight_data"
ARTIFACTS = "artifacts"
DATA_COUNTER_DATA = "data_counter_data"
EARLY_STOPPER_DATA = "early_stopper_data"
CHECKPOINT_SAVER_DATA = "checkpoint_saver_data"
LOSS_WEIGHTER_DATA = "loss_weighter_data"
HOOK_DATA = "hook_data"
# The steps of an epoch that is being trained are committed, but have no public name.
RUNNING_STEPS = "running"
DATA_HOME_VARIABLE = "GORIDEEPSTYLE_DATA_HOME"
RESULTS_HOME_VARIABLE = "GORIDEEPSTYLE_RESULTS_HOME"
STATE_FILE = "state.json"
LOCK_FILE = "run.lock"
STATUS_FILE = "status.json"
STARTS_FILE = "starts.jsonl"
_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_MAX_NAME_CHARACTERS = 200
# Limits of a path that was read from a file: file systems take names of 255 bytes, and no result lies as deep.
_MAX_SEGMENTS = 32
_MAX_SEGMENT_BYTES = 255
# What an experiment keeps in its own results; an experiment below another name must not look like it.
OLD_TOKEN_PREFIX = ".shared_"
RESERVED = frozenset({"pymodules", "settings", "data", "temp_data", "generations"})


def check_name(name: str, what: str = "experiment name") -> str:
    """Return ``name`` if it is a safe name; nothing else may ever become part of a path."""
    segments = name.split("/")
    if len(name) > _MAX_NAME_CHARACTERS or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise UsageError(
            f"The {what} must be at most {_MAX_NAME_CHARACTERS} letters, digits, '.', '_' or '-', grouped by '/', "
            f"and no part of it may start with '.', but it is {name!r} instead."
        )
    if RESERVED & set(segments[1:]):
        raise UsageError(
            f"In a grouped name, {', '.join(sorted(RESERVED))} must not be a part, but it is {name!r} instead."
        )
    if name in VERBS:
        raise UsageError(f"The {what} must not be the name of a verb, but it is {name!r}.")
    if name.startswith("-"):
        raise UsageError(f"The {what} must not start with '-', but it is {name!r} instead.")
    return name


def is_inside(name: str) -> bool:
    """Return whether a relative path stays below the folder it is joined to, and can exist at all."""
    segments = os.fsencode(name).split(b"/")
    is_short = len(segments) <= _MAX_SEGMENTS and all(len(segment) <= _MAX_SEGMENT_BYTES for segment in segments)
    return is_short and "\0" not in name and not {b"", b".", b".."} & set(segments)


def data_home(option: str | None) -> Path:
    """Return the data home: the option, else the environment variable, else the current directory."""
    return Path(option or os.environ.get(DATA_HOME_VARIABLE) or ".").absolute()


def results_home() -> Path | None:
    """Return the folder for all that runs write, if the option or the environment names another than the data home."""
    folder = os.environ.get(RESULTS_HOME_VARIABLE)
    return Path(folder).absolute() if folder else None


def number_variable(name: str, default: float) -> float:
    """Return a number that the environment may set."""
    text = os.environ.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise UsageError(f"The environment variable {name} must be a number, but is {text!r} instead.") from None


@dataclass(frozen=True)
class ExperimentPaths:
    """The folders of one experiment below its data home; the settings of a quick try have another name.

    What runs write may lie in a home of its own.
    """

    home: Path
    name: str
    settings_name: str = ""
    results_home: Path | None = field(default_factory=results_home)

    def __post_init__(self) -> None:
        check_name(self.name)

    @property
    def settings(self) -> Path:
        return self.home / SETTINGS_FOLDER / (self.settings_name or self.name)

    @property
    def top(self) -> Path:
        """The home of results, logs and error files."""
        return self.results_home or self.home

    @property
    def results(self) -> Path:
        return self.top / RESULTS_FOLDER / self.name

    @property
    def logs(self) -> Path:
        return self.top / LOGS_FOLDER / self.name

    @property
    def error_files(self) -> Path:
        return self.top / "experiment_torchelastic_error_files" / self.name

    @property
    def module_ckps(self) -> Path:
        return self.home / "module_ckps"

    @property
    def trash(self) -> Path:
        """Where a reset moves the results in one rename; a dot name can never be an experiment."""
        return self.top / RESULTS_FOLDER / f".reset+{self.name.replace('/', '+')}"

    def start_token(self, number: str) -> Path:
        """Where rank zero of a start writes what the other ranks must see; the next start removes what is left."""
        results = self.top / RESULTS_FOLDER
        return (results if results.is_dir() else self.top) / f"{self._token_prefix}{number}"

    def left_aside(self, number: str) -> Path:
        """Where a reset moves what it could not remove yet; the next start tries again."""
        return self.trash.with_name(f"{self._aside_prefix}{number}")

    @property
    def _token_prefix(self) -> str:
        return f".start+{self.name.replace('/', '+')}+"

    @property
    def _aside_prefix(self) -> str:
        return f".left+{self.name.replace('/', '+')}+"

    def left_behind(self) -> list[Path]:
        """Return what starts and resets that were interrupted have left next to the results, or in them."""
        tops = [top for top in (self.top, self.top / RESULTS_FOLDER) if top.is_dir()]
        prefixes = (self._token_prefix, self._aside_prefix)
        entries = [entry for top in tops for entry in top.iterdir()]
        leftovers = [entry for entry in entries if entry.name.startswith(prefixes)]
        # Earlier versions wrote tokens into the results.
        return sorted([*leftovers, *self.results.glob(f"{OLD_TOKEN_PREFIX}*")])

    @property
    def state_file(self) -> Path:
        return self.results / STATE_FILE

    @property
    def lock_file(self) -> Path:
        return self.results / LOCK_FILE

    @property
    def status_file(self) -> Path:
        return self.results / STATUS_FILE

    @property
    def starts_file(self) -> Path:
        return self.results / STARTS_FILE

    @property
    def data(self) -> Path:
        return self.results / "data"

    @property
    def temp_data(self) -> Path:
        return self.results / "temp_data"

    @property
    def generations(self) -> Path:
        return self.results / "generations"

    @property
    def log_file(self) -> Path:
        return self.logs / "train.log"

    @property
    def journal_file(self) -> Path:
        return self.logs / "journal.jsonl"

    @property
    def launch_file(self) -> Path:
        """The background launch of this experiment; it lies next to the error files, which no reset deletes."""
        return self.error_files / "launch.json"

    @property
    def launcher_log(self) -> Path:
        return self.error_files / "launcher.log"

    @property
    def batch_script(self) -> Path:
        """What was written for Slurm."""
        return self.error_files / "slurm.sh"

    @property
    def torchrun_logs(self) -> Path:
        return self.logs / "torchrun"

    @property
    def images(self) -> Path:
        return self.logs / "images"

    @property
    def report_file(self) -> Path:
        return self.logs / "report.html"

    def other(self, name: str) -> ExperimentPaths:
        """Return the paths of another experiment in the same data home."""
        return ExperimentPaths(self.home, name, results_home=self.results_home)


def pool_file(data: Path, pool: str, module: str) -> Path:
    """Return where one module of a weight pool below a data folder is: a folder if it is in shards, else a file."""
    folder = data / MODULE_CKPS / pool / module
    return folder if folder.is_dir() else folder.with_name(f"{module}.pt")


def all_experiments(home: Path, folder: str, marker: str) -> list[str]:
    """Return the names of all experiments below ``home/folder``: folders that hold ``marker``."""
    top = home / folder
    names = []
    for path, folders, files in os.walk(top):
        name = Path(path).relative_to(top).as_posix()
        if marker in files or marker in folders:
            # No experiment lies inside another one.
            folders.clear()
            names.append(name)
        # What an experiment that is just being opened keeps may have files of the marker's name too.
        skipped = RESERVED if name != "." else frozenset()
        # In place: os.walk descends into what is left in this very list.
        folders[:] = sorted(segment for segment in folders if _SEGMENT.fullmatch(segment) and segment not in skipped)
    return sorted(name for name in names if name != ".")


def settings_names(home: Path) -> list[str]:
    return all_experiments(home, SETTINGS_FOLDER, "pymodules")


def results_names(home: Path) -> list[str]:
    return all_experiments(results_home() or home, RESULTS_FOLDER, STATE_FILE)
