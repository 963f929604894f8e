"""The same work as a loop prepared by Accelerate, with a line every 50 steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader, Subset

from benchmarks.turns import Job, Turn
from benchmarks.work import KINDS, Points, make_model


class Progress:
    """How far training has come: Accelerate saves it with the rest."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Training:
    def __init__(self, job: Job) -> None:
        kind = KINDS[job.kind]
        self.job, self.turn, self.progress = job, Turn(job), Progress()
        # With automatic names, save_state would not look at the names of the pools.
        steps_only = bool(job.checkpoint_every or job.resumes)
        project = ProjectConfiguration(str(job.saved), automatic_checkpoint_naming=steps_only, total_limit=1)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        model, points = make_model(kind), Points(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        workers: dict[str, Any] = {"num_workers": kind.num_workers, "persistent_workers": bool(kind.num_workers)}
        train = DataLoader(Subset(points, points.get_split_idxs("train")), kind.batch_size, shuffle=True, **workers)
        val = DataLoader(Subset(points, points.get_split_idxs("val")), kind.batch_size, **workers)
        self.model, self.optimizer, self.train, self.val = self.accelerator.prepare(model, optimizer, train, val)
        self.accelerator.register_for_checkpointing(self.progress)
        self._best = float("inf")

    def resume(self) -> None:
        self.accelerator.load_state()
        if self.job.checkpoint_every:
            # Loading does not continue the count that names the checkpoints.
            self.accelerator.project_configuration.iteration = self.progress.steps // self.job.checkpoint_every

    def run(self) -> None:
        first_epoch = self.progress.steps // len(self.train)
        for epoch in range(first_epoch, first_epoch + self.job.num_epochs):
            self.turn.wait()
            self.run_epoch(epoch)
            self.turn.done()
            if self.job.pool_period:
                self.keep(epoch)
        self.accelerator.end_training()

    def run_epoch(self, epoch: int) -> None:
        num_skipped = self.progress.steps % len(self.train)
        self.train.set_epoch(epoch)
        self.model.train()
        for batch in skip_first_batches(self.train, num_skipped) if num_skipped else self.train:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.progress.steps += 1
            if self.progress.steps % 50 == 0:
                self.accelerator.print(f"epoch {epoch} step {self.progress.steps} loss {loss.item():.4f}")
            if self.job.marks_steps:
                self.turn.step()
            if self.job.checkpoint_every and self.progress.steps % self.job.checkpoint_every == 0:
                self.accelerator.save_state()

    def evaluate(self) -> float:
        self.model.eval()
        losses = []
        for batch in self.val:
            with torch.no_grad():
                loss = F.cross_entropy(self.model(batch["x"]), batch["y"], reduction="none")
            losses.append(self.accelerator.gather_for_metrics(loss))
        return torch.cat(losses).mean().item()

    def keep(self, epoch: int) -> None:
        loss = self.evaluate()
        self.accelerator.print(f"epoch {epoch} val loss {loss:.4f}")
        if loss < self._best:
            self._best = loss
            self.accelerator.save_state(str(self.job.saved / "best"))
        self.accelerator.save_state(str(self.job.saved / "last"))
        if (epoch + 1) % self.job.pool_period == 0:
            self.accelerator.save_state(str(self.job.saved / f"epoch_{epoch}"))


def main(job: Job) -> None:
    training = Training(job)
    if job.resumes:
        training.resume()
    training.run()


if __name__ == "__main__":
    main(Job.from_environment())
