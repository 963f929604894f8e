"""The loop of a run: stage → next → commit, until the early stopper ends it or someone asks to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.monitoring.journal import EPOCH
from pipeline.progress import EVALUATION, TRAINING, Progress
from pipeline.session import TrainingSession
from pipeline.store.changes import Changes
from pipeline.system.accelerators import memory_in_mb
from pipeline.system.formatting import shown_duration
from pipeline.system.logging import LOGGER
from pipeline.system.seeding import seed_generators
from pipeline.tracking.log_lines import shown_losses, shown_rates, train_line, val_line
from pipeline.tracking.progress_bar import ProgressBar
from pipeline.tracking.publisher import Publisher
from pipeline.tracking.startup_summary import latest_values
from pipeline.tracking.step_timer import Pace
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.engines.base import StepRequests
from pipeline.training.training import StepReport

# What the policies decide after an epoch; the names are shown if ranks do not agree.
_IMPROVEMENT = "improvement() of early_stopper.py"
_STOP = "early_stop() of early_stopper.py"
_KEEPS = "save_checkpoints() of checkpoint_saver.py"


class Loop:
    """Runs stages from a committed place on; every commit names the place that follows."""

    def __init__(self, session: TrainingSession, publisher: Publisher, run_state: dict[str, Any]) -> None:
        self._m = session
        self._publisher = publisher
        self._settings = session.experiment.settings
        self._components = session.experiment.components
        self.best: dict[str, Any] = run_state.get("best", {})
        self._committed_at = time.monotonic()
        self._pace = Pace()
        self._kept_pools: list[str] = []

    def run(self, progress: Progress, stop_after_epoch: int | None) -> Progress:
        """Return where the run ended: finished, or at the place from which it will continue."""
        while not progress.is_finished:
            if self._m.processes.any(self._m.stop_requests.asked(epoch_ends=progress.stage == TRAINING)):
                return progress
            if stop_after_epoch is not None and progress.stage == TRAINING and progress.epoch > stop_after_epoch:
                self._m.stop_requests.reason = f"epoch {stop_after_epoch} is complete"
                return progress
            completed = self._train(progress) if progress.stage == TRAINING else self._evaluate(progress)
            if completed == progress or completed.step:
                return completed
            progress = completed
        return progress

    def _train(self, progress: Progress) -> Progress:
        """Train one epoch; return what follows, or the step at which all ranks agreed to stop."""
        epoch = progress.epoch
        total = len(self._m.training.plan)
        updates = self._settings.logging.train_updates
        enabled = self._shows_bars
        self._publisher.begin_epoch() if progress.step == 0 else None
        self._get_ready_for(self._m.runners[0])
        self._pace.begin_epoch(progress.step)
        with ProgressBar(f"train {epoch}", total, progress.step, updates, enabled=enabled) as bar:
            for report in self._m.training.run(epoch, progress.step, self._requests):
                self._after_step(epoch, report)
                bar.advance()
                is_last = report.step == total
                if not is_last and (report.outcome.stop or self._is_commit_due(report)):
                    here = progress.at_step(report.step)
                    self._m.training.flush()
                    self._commit(self._m.parts.running_epoch, here)
                    if report.outcome.stop:
                        self._note_epoch("train", epoch)
                        return here
        if self._settings.training.evaluation_interval:
            following = progress.next(evaluate=self._evaluates(epoch))
        else:
            following = self._judge(progress)
        self._note_epoch("train", epoch)
        was_judged = not self._settings.training.evaluation_interval
        self._commit(lambda: self._trained_epoch(epoch), following, was_judged=was_judged)
        return following

    def _get_ready_for(self, runner: BatchRunner) -> None:
        """Let a commit come to its end before workers are forked: they would inherit the locks of its thread, held."""
        if runner.starts_workers:
            self._m.commits.wait()

    def _evaluates(self, epoch: int) -> bool:
        """Return whether an evaluation follows; the last epoch, where the early stopper knows it, always has one."""
        is_last = epoch == getattr(self._components.early_stopper, "max_epochs", None)
        return is_last or epoch % self._settings.training.evaluation_interval == 0

    def _trained_epoch(self, epoch: int) -> Changes:
        changes = self._m.parts.trained_epoch(epoch, self._m.store.current.files)
        if self._settings.training.evaluation_interval:
            return changes
        return changes | self._evaluated_epoch(epoch)

    def _evaluate(self, progress: Progress) -> Progress:
        """Evaluate one epoch; return what follows, or the same place if all ranks agreed to stop."""
        epoch = progress.epoch
        stage = self._m.evaluation
        if not self._settings.training.evaluation_interval:
            return self._without_validation(progress)
        self.report(progress)
        self._get_ready_for(self._m.runners[1])
        self._pace.begin_epoch(0)
        updates = self._settings.logging.eval_updates
        with ProgressBar(f"val {epoch}", stage.num_rounds, 0, updates, enabled=self._shows_bars) as bar:
            for stopped in stage.run(epoch, self._m.stop_requests.asked):
                if stopped:
                    return progress
                self._m.commits.poll()
                bar.advance()
        if self._m.processes.is_rank_zero:
            self._publisher.keep_images(epoch, lambda: self._m.pictures.take(epoch))
        elif self._m.experiment.is_sharded:
            # No rank can run a sharded module alone.
            self._m.pictures.take(epoch)
        following = self._judge(progress)
        self._note_epoch("val", epoch)
        values = shown_losses(self._m.records.losses, "val", self._weights())
        LOGGER.info(val_line(epoch, stage.num_rounds, values))
        self._commit(lambda: self._evaluated_epoch(epoch), following, was_judged=True)
        return following

    def _evaluated_epoch(self, epoch: int) -> Changes:
        return self._m.parts.evaluated_epoch(epoch, self._kept_pools, self._m.store.current.files)

    def _without_validation(self, progress: Progress) -> Progress:
        """Only epoch 0 comes here: there is nothing to judge before the first training epoch."""
        following = progress.next()
        self._commit(Changes, following)
        return following

    def _judge(self, progress: Progress) -> Progress:
        """Ask the policies what the latest epoch means."""
        losses = self._m.records.losses
        weighter = self._components.loss_weighter
        stopper = self._components.early_stopper
        saver = self._components.checkpoint_saver
        seed_generators(self._settings.training.seed, "judge", progress.epoch)
        stopper.update(losses, weighter)
        saver.update(losses, weighter, stopper)
        own = {
            _IMPROVEMENT: bool(stopper.improvement()),
            _KEEPS: bool(saver.save_checkpoints()),
            _STOP: bool(stopper.early_stop()),
        }
        decisions = self._m.ranks.agree(own, f"after epoch {progress.epoch}")
        self._kept_pools = ["best"] if decisions[_IMPROVEMENT] else []
        if decisions[_KEEPS]:
            self._kept_pools.append(f"epoch_{progress.epoch}")
        if decisions[_IMPROVEMENT]:
            self.best = {"epoch": progress.epoch, "values": latest_values(losses, "val")}
        return progress.next(evaluate=False, stop=decisions[_STOP])

    def _requests(self) -> StepRequests:
        return StepRequests(
            stop=self._m.stop_requests.asked(), commit=self._m.processes.is_rank_zero and self._is_late()
        )

    def _is_late(self) -> bool:
        minutes = self._settings.training.checkpoint_every_minutes
        return minutes is not None and time.monotonic() - self._committed_at >= 60 * minutes

    def _is_commit_due(self, report: StepReport) -> bool:
        every = self._settings.training.checkpoint_every_steps
        return report.outcome.commit or (every is not None and report.step % every == 0)

    def _after_step(self, epoch: int, report: StepReport) -> None:
        self._m.commits.poll()
        self._pace.add(report.step, report.seconds, report.data_seconds)
        if report.outcome.skipped:
            LOGGER.warning(
                "Epoch %d, step %d skipped on all ranks: a loss or gradient is not finite.", epoch, report.step
            )
        every = self._settings.logging.every_steps
        if report.step % every == 0 or report.step == report.num_steps:
            self._m.training.flush()
            self._log_step(epoch, report, (report.step - 1) % every + 1)
        if self._m.processes.is_rank_zero and self._m.status.is_due():
            self.report(Progress(TRAINING, epoch, report.step), **self._speed(epoch, report))

    def _log_step(self, epoch: int, report: StepReport, num_steps: int) -> None:
        values = {
            "lr": shown_rates(self._m.experiment.learning_rates()),
            "eta": shown_duration(self._eta(epoch, report)),
            "time": f"{report.seconds:.3f}",
            "data_time": f"{report.data_seconds:.3f}",
            "memory": str(memory_in_mb(self._m.processes.device)),
        }
        losses = shown_losses(self._m.records.losses, "train", self._weights(), num_steps)
        LOGGER.info(train_line(epoch, (report.step, report.num_steps), values, losses, report.outcome.norm))

    def _eta(self, epoch: int, report: StepReport) -> float:
        """Return the seconds left: of the experiment if its last epoch is known, else of the epoch."""
        last_epoch = getattr(self._components.early_stopper, "max_epochs", None) or epoch
        num_steps = report.num_steps - report.step + max(0, last_epoch - epoch) * report.num_steps
        return self._pace.seconds_for(num_steps)

    def _speed(self, epoch: int, report: StepReport) -> dict[str, Any]:
        """Return what the status file says of a running epoch besides its place."""
        return {
            "num_steps": report.num_steps,
            "max_epochs": getattr(self._components.early_stopper, "max_epochs", None),
            "step_seconds": self._pace.step_seconds,
            "eta": self._eta(epoch, report),
            "epoch_eta": self._pace.seconds_for(report.num_steps - report.step),
            "memory": memory_in_mb(self._m.processes.device),
        }

    def _note_epoch(self, split: str, epoch: int) -> None:
        if self._m.processes.is_rank_zero:
            memory = memory_in_mb(self._m.processes.device)
            self._m.journal.note(EPOCH, split=split, epoch=epoch, memory=memory, **self._pace.epoch())

    def _weights(self) -> dict[str, float]:
        return {
            name: float(self._components.loss_weighter.get_loss_weight(name)) for name in self._settings.register_names
        }

    def _commit(self, changes: Callable[[], Changes], progress: Progress, *, was_judged: bool = False) -> None:
        """Let rank zero commit, and all write their shards; what is permanent is published once it is complete.

        Ranks compare themselves first. Files that components save are compared only once they have judged an epoch:
        it takes a call of ``save`` on every rank.
        """
        self._m.ranks.compare(f"before the commit at {progress}", saves=was_judged)
        if self._m.parts.is_sharded:
            folders = self._m.processes.on_rank_zero(lambda: self._begin_commit(changes, progress))
            self._m.processes.on_all_ranks(lambda: self._m.parts.write_shards(folders))
        elif self._m.processes.is_rank_zero:
            self._begin_commit(changes, progress)
        if self._m.processes.is_rank_zero:
            batch = self._publisher.collect(self.recorded_epoch(progress))
            self._m.commits.complete(lambda: self._publisher.send(batch))
            self.report(progress)
        self._committed_at = time.monotonic()

    def _begin_commit(self, changes: Callable[[], Changes], progress: Progress) -> dict[str, Path]:
        return self._m.commits.begin(changes, progress, self._run_state())

    def commit_prepared(self, progress: Progress) -> None:
        self._commit(self._m.parts.prepared, progress)

    @staticmethod
    def recorded_epoch(progress: Progress) -> int:
        """Return the epoch whose steps the records hold."""
        is_running = progress.stage == EVALUATION or progress.step or progress.is_finished
        return progress.epoch if is_running else progress.epoch - 1

    def _run_state(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "time": time.strftime("%Y-%m-%d %H:%M:%S%z"),
            **self._m.parts.save_run_values(),
        }

    def report(self, progress: Progress, state: str = "running", **more: Any) -> None:
        """Let the status file say where the run is."""
        if self._m.processes.is_rank_zero:
            last = latest_values(self._m.records.losses, "val")
            self._m.status.write(state=state, progress=progress.as_json(), last=last, best=self.best, **more)

    @property
    def _shows_bars(self) -> bool:
        return self._settings.logging.progress_bar and self._m.processes.is_rank_zero
