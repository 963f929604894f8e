"""The whole run on one page: look → decide → assemble → open → prepare or restore → loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch

from pipeline.arguments import AUTO, RESET, RESUME, Arguments, verb_line
from pipeline.checkpoint.committed_files import CommittedFiles, CommitToRead, committed_files
from pipeline.checkpoint.parts import PersistedParts, is_counted, restore_counters
from pipeline.distributed.hardware import compare_hardware
from pipeline.distributed.processes import Processes
from pipeline.errors import DamagedResults, InvalidExperiment, Problem, StateConflict, UnreadableFile, UsageError
from pipeline.experiment.assembly import Experiment, assemble, read_checked_contents
from pipeline.experiment.counting import count
from pipeline.experiment.dataset_fingerprints import Fingerprints, fingerprint_everywhere, refuse_changed_datasets
from pipeline.experiment.initial_weights import load_initial_weights
from pipeline.experiment.pymodules.loader import relocate
from pipeline.experiment.settings.settings import Contents, differing_overrides, parse_settings, read_contents
from pipeline.experiment.sharding import mesh_of
from pipeline.lifecycle.finished import finish_pending, finished_lines
from pipeline.lifecycle.frozen_copy import copy_folder, differing_files, digest_folder, refuse_edited_copy
from pipeline.lifecycle.mode import check_settings_exist, choose_action, inspect_results
from pipeline.lifecycle.provenance import describe_start
from pipeline.lifecycle.reset import check_shared, check_writable, open_fresh, reset
from pipeline.lifecycle.restarts import was_started_before
from pipeline.lifecycle.starts import compare_starts, read_starts, record_start, run_id
from pipeline.loop import Loop
from pipeline.monitoring.journal import END, START
from pipeline.paths import ExperimentPaths, data_home
from pipeline.progress import Progress
from pipeline.report.ending import reported
from pipeline.report.page import leave_report
from pipeline.session import TrainingSession, build_session
from pipeline.store.lock import RunLock
from pipeline.store.store import ResultsStore, read_current_manifest
from pipeline.system.disk import Disk
from pipeline.system.logging import LOGGER, start_console, start_file
from pipeline.system.seeding import set_deterministic
from pipeline.tracking.factory import check_installed, create_trackers, publish_rest, tracked_run
from pipeline.tracking.publisher import Publisher
from pipeline.tracking.startup_summary import WARNING_MARK, change_lines, first_block, last_block, next_line, step_lines

_SECONDS_BETWEEN_SIGNS_OF_LIFE = 20
Watch = Callable[[TrainingSession], None]


def _nobody(session: TrainingSession) -> None:
    """Watch nothing."""


def run(arguments: Arguments, processes: Processes, disk: Disk | None = None, watch: Watch | None = None) -> Progress:
    """Run an experiment as far as it goes and return where it stands; ``watch`` may put an observer into its stages."""
    paths = ExperimentPaths(data_home(arguments.data_home), arguments.experiment)
    start_console(paths.name, is_rank_zero=processes.is_rank_zero)
    found = processes.on_rank_zero(lambda: inspect_results(paths))
    if was_started_before(paths, processes):
        # The processes before this restart have done what was asked; this one continues.
        arguments = replace(arguments, mode=AUTO)
    if found.is_finished and arguments.mode != RESET:
        processes.on_rank_zero(lambda: _settle(paths, disk or Disk()))
        return Progress(found.progress.stage, found.progress.epoch) if found.progress else Progress()
    action = processes.on_rank_zero(lambda: choose_action(arguments, paths, found))
    return _Run(arguments, paths, processes, disk or Disk(), watch or _nobody).execute(action)


def _settle(paths: ExperimentPaths, disk: Disk) -> None:
    finish_pending(paths, disk, PersistedParts.is_needed, lambda epoch: publish_rest(paths, epoch, run_id(paths)))
    for line in finished_lines(paths):
        LOGGER.info(line)


class _Run:
    """One start of an experiment, fresh or continued."""

    def __init__(
        self, arguments: Arguments, paths: ExperimentPaths, processes: Processes, disk: Disk, watch: Watch
    ) -> None:
        self._arguments = arguments
        self._paths = paths
        self._processes = processes
        self._disk = disk
        self._watch = watch
        self._lock = RunLock(paths, disk)
        self._store = ResultsStore(paths, disk, self._lock.claim)
        self._started = time.monotonic()
        # Known before there is a log file to write it to.
        self._hardware_warning = ""

    def execute(self, action: str) -> Progress:
        try:
            return self._execute(action)
        finally:
            self._lock.release()

    def _execute(self, action: str) -> Progress:
        if self._processes.world_size > 1:
            check_shared(self._paths, self._processes, self._disk)
        if action == RESUME:
            session = self._continue()
            progress, run_state = self._restore(session)
        else:
            session = self._begin(action)
            progress = Progress()
            run_state = {}
            self._count(session)
        self._introduce(session, progress)
        with reported(self._paths, session.journal, session.close):
            return self._loop(session, progress, run_state)

    def _begin(self, action: str) -> TrainingSession:
        """Check everything, and only then write: a refusal leaves the disk as it was."""
        self._processes.on_rank_zero(lambda: check_settings_exist(self._paths))
        sources = self._processes.on_all_ranks(lambda: digest_folder(self._paths.settings))
        self._check_same_everywhere(sources)
        folder = self._paths.settings
        contents = self._processes.on_all_ranks(lambda: read_checked_contents(folder, self._arguments.all_overrides))
        experiment = self._assemble(folder, contents)
        self._processes.on_all_ranks(
            lambda: load_initial_weights(experiment.components, self._paths, folder / "pymodules")
        )
        session = build_session(self._paths, self._processes, experiment, self._store)
        session.ranks.compare("before the first step", is_start=True)
        session.engine.prepare()
        written = read_contents(folder / "settings")
        changed = {name: content for name, content in contents.items() if content != written[name]}
        fingerprints = fingerprint_everywhere(experiment, self._processes)
        self._processes.on_rank_zero(lambda: self._open(action, sources, changed))
        self._store.set_fingerprints(fingerprints)
        relocate(folder / "pymodules", self._paths.results / "pymodules")
        return session

    def _check_same_everywhere(self, sources: dict[str, str]) -> None:
        if any(other != sources for other in self._processes.gather(sources)):
            where = str(self._paths.settings)
            what = "must be the same on every process, but differs between them: the data home must be shared"
            raise InvalidExperiment([Problem(where, what)]).shared()

    def _open(self, action: str, sources: dict[str, str], changed: Contents) -> None:
        check_writable(self._paths)
        if action == RESET:
            reset(self._paths, self._disk)
        open_fresh(self._paths, self._disk, self._lock)
        copies = copy_folder(self._paths.settings, self._paths.results, sources, changed, self._disk)
        self._store.set_digests(copies, sources)

    def _count(self, session: TrainingSession) -> None:
        """Let rank zero count; the others hear from it often enough not to take it for dead."""
        if self._processes.is_rank_zero:
            heard = time.monotonic()
            for _ in count(session.experiment):
                if time.monotonic() - heard > _SECONDS_BETWEEN_SIGNS_OF_LIFE:
                    heard = time.monotonic()
                    self._processes.broadcast(False)
        while not self._processes.broadcast(True):
            continue

    def _continue(self) -> TrainingSession:
        """Load the frozen copy, then take the lock and bring the directory into order."""
        self._processes.on_rank_zero(self._check_copy)
        contents = self._processes.on_all_ranks(self._frozen_contents)
        self._keep_threads(contents)
        experiment = self._assemble(self._paths.results, contents)
        session = build_session(self._paths, self._processes, experiment, self._store)
        fingerprints = fingerprint_everywhere(experiment, self._processes)
        self._processes.on_rank_zero(lambda: self._recover(fingerprints))
        return session

    def _keep_threads(self, contents: Contents) -> None:
        """Continue an exact run with the number of threads it had, because bits depend on it."""
        starts = self._processes.on_rank_zero(lambda: read_starts(self._paths))
        known = [start["threads"] for start in starts if type(start.get("threads")) is int]
        if known and parse_settings(contents).training.is_exact:
            torch.set_num_threads(known[-1])

    def _check_copy(self) -> None:
        manifest = read_current_manifest(self._paths)
        if manifest:
            refuse_edited_copy(self._paths.results, manifest.copies, is_accepted=self._arguments.accept_edited_copy)

    def _frozen_contents(self) -> Contents:
        contents = read_contents(self._paths.results / "settings")
        differing = differing_overrides(contents, self._arguments.all_overrides)
        if differing:
            changes = [word for override in differing for word in ("--set", override)]
            raise UsageError(
                f"{', '.join(differing)} would change settings that are frozen since the experiment started.",
                verb_line("new", "VARIANT", self._paths.home, "--from", self._paths.name, *changes),
            )
        return contents

    def _recover(self, fingerprints: Fingerprints) -> None:
        self._lock.acquire()
        found = inspect_results(self._paths)
        if not found.exists:
            raise StateConflict(f"Experiment {self._paths.name!r} was just reset by another run.")
        if found.is_finished:
            raise StateConflict(f"Experiment {self._paths.name!r} was just finished by another run.")
        self._store.recover(PersistedParts.is_needed)
        refuse_changed_datasets(self._paths, self._store.current.fingerprints, fingerprints)
        self._store.set_fingerprints(fingerprints)
        if self._arguments.accept_edited_copy:
            self._store.set_digests(digest_folder(self._paths.results), self._store.current.sources)
        edited = differing_files(self._paths.settings, self._store.current.sources)
        if edited:
            LOGGER.warning(
                "The settings folder has changed since the start; the run continues with its frozen copy: %s. "
                "To use the changes, start again with --reset, or run a copy of the folder under another name.",
                ", ".join(edited),
            )

    def _restore(self, session: TrainingSession) -> tuple[Progress, dict[str, Any]]:
        """Bring every part back to what was committed; return where the run continues and what its loop knew."""
        commit = self._processes.on_rank_zero(lambda: self._commit_to_read(PersistedParts.is_needed))
        progress = commit.manifest.progress
        run_state = commit.manifest.run_state
        with committed_files(self._paths, self._processes, commit) as files:
            self._processes.on_all_ranks(lambda: self._load(session, files, progress))
        session.parts.load_run_values(run_state)
        session.ranks.compare("after the last commit was restored", saves=True)
        session.engine.prepare()
        return progress, run_state

    def _commit_to_read(self, is_needed: Callable[[str], bool]) -> CommitToRead:
        return CommitToRead(self._store.current, self._store.files_to_restore(is_needed), self._lock.claim.folder)

    def _load(self, session: TrainingSession, files: CommittedFiles, progress: Progress) -> None:
        try:
            session.parts.restore(files.read_state, files.folder, progress)
        except UnreadableFile as error:
            # Copies are gone when the message is read; the names in data/ stay.
            named = str(error).replace(str(files.folder), str(self._paths.data))
            raise DamagedResults(f"{named}\n  fix: restore it from a backup, or start again with --reset.") from error

    def _restore_counters(self, session: TrainingSession) -> None:
        """Let every rank load the committed counts, rank zero too, so that a run sees what a resumed one would see."""
        commit = self._processes.on_rank_zero(lambda: self._commit_to_read(is_counted))
        with committed_files(self._paths, self._processes, commit) as files:
            restore_counters(session.experiment.components, files.folder)

    def _assemble(self, folder: Path, contents: Contents) -> Experiment:
        settings = parse_settings(contents)
        if settings.training.uses_deterministic_kernels(self._processes.device.type):
            set_deterministic()
        if settings.training.threads:
            torch.set_num_threads(settings.training.threads)
        self._hardware_warning = compare_hardware(self._processes, is_exact=settings.training.is_exact)
        torch.autograd.set_detect_anomaly(self._arguments.detect_anomaly)
        self._processes.on_all_ranks(lambda: check_installed(settings.logging, folder / "settings" / "logging.json"))
        mesh = mesh_of(self._processes, settings.training)
        device = self._processes.device
        world_size = self._processes.world_size
        return self._processes.on_all_ranks(lambda: assemble(folder / "pymodules", settings, device, mesh, world_size))

    def _introduce(self, session: TrainingSession, progress: Progress) -> None:
        """Open the log, write down this start and say what is about to happen."""
        start = describe_start(self._processes, progress)
        earlier = self._processes.on_rank_zero(lambda: read_starts(self._paths))
        session.journal.start = len(earlier) + 1
        if not self._processes.is_rank_zero:
            return
        self._make_error_folder()
        start_file(self._paths.name, self._paths.log_file)
        record_start(self._paths, start, self._disk, self._lock.claim.folder)
        session.journal.note(START, at=progress.as_json())
        found = f"continues at {progress}, commit {self._store.current.generation}" if earlier else "new run"
        plan = session.training.plan
        is_exact = session.experiment.settings.training.is_exact
        conditions = compare_starts([*earlier, start], is_exact=is_exact)
        lines = [
            *first_block(self._paths, self._processes, session.experiment, found, conditions.doubt),
            *step_lines(len(plan), plan.max_batches, session.experiment, self._processes),
            *change_lines(conditions.changed, conditions.harmless, conditions.doubt, progress),
        ]
        if self._hardware_warning:
            lines.append(WARNING_MARK + self._hardware_warning)
        for line in lines:
            LOGGER.log(WARNING if line.startswith(WARNING_MARK) else INFO, line.removeprefix(WARNING_MARK))

    def _make_error_folder(self) -> None:
        """Make the folder in which torchrun may put error files; a run does not need it."""
        try:
            self._paths.error_files.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            LOGGER.warning("%s cannot be made: %s. Training continues.", self._paths.error_files, error.strerror)

    def _loop(self, session: TrainingSession, progress: Progress, run_state: dict[str, Any]) -> Progress:
        publisher = self._publisher(session, progress)
        loop = Loop(session, publisher, run_state)
        session.stop_requests.listen()
        if progress == Progress():
            progress = progress.next()
            session.experiment.initialize_schedulers()
            loop.commit_prepared(progress)
            session.commits.wait()
            self._restore_counters(session)
        session.create_module_transforms()
        self._watch(session)
        progress = loop.run(progress, self._arguments.stop_after_epoch)
        session.commits.wait()
        if self._processes.is_rank_zero:
            self._conclude(session, loop, progress)
        publisher.close()
        self._processes.barrier()
        return progress

    def _publisher(self, session: TrainingSession, progress: Progress) -> Publisher:
        publisher = Publisher(session.records, len(session.training.plan), self._paths)
        epoch = Loop.recorded_epoch(progress)
        experiment = session.experiment
        # An observed run must not appear in trackers.
        if self._processes.is_rank_zero and self._watch is _nobody:
            trackers = create_trackers(experiment.settings.logging, experiment.components.trackers)
            publisher.begin(trackers, tracked_run(self._paths, experiment.settings, run_id(self._paths)), epoch)
        if progress != Progress():
            publisher.resume(epoch)
        return publisher

    def _conclude(self, session: TrainingSession, loop: Loop, progress: Progress) -> None:
        outcome = "finished" if progress.is_finished else "stopped"
        loop.report(progress, state=outcome)
        asked_by = session.stop_requests.reason or "asked by another process"
        reason = "" if progress.is_finished else f" at {progress} ({asked_by})"
        session.journal.note(END, outcome=outcome, at=progress.as_json(), reason=session.stop_requests.reason)
        seconds = time.monotonic() - self._started
        report = leave_report(self._paths)
        for line in last_block(self._paths, f"{outcome}{reason}", seconds, loop.best, report):
            LOGGER.info(line)
        LOGGER.info(next_line(self._paths, progress))
