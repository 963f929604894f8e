"""Trainings as people write them, beside a loop of plain torch on the same batches: every step has the same losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassJaccardIndex

from pipeline.distributed.processes import Processes
from pipeline.experiment.assembly import assemble
from pipeline.experiment.settings.settings import parse_settings, read_contents
from pipeline.store.compare import read_any
from pipeline.system.accelerators import CPU
from pipeline.system.seeding import seed_generators
from pipeline.training.batch_runner import BatchRunner
from pipeline.training.step_plan import create_plan
from tests.support.experiments import FILES as TINY
from tests.support.experiments import write_experiment
from tests.support.running import run_inside

RESULTS = Path("experiment_results/tiny")
IGNORED = -100
Losses = dict[str, float]


def write(home: Path, files: dict[str, str], registers: list[Any], **settings: Any) -> None:
    """Write an experiment of these files alone."""
    everything: dict[str, str | None] = {**dict.fromkeys(TINY), **files}
    training = {"grad_clip_norm": None, "max_epochs": 2, **settings.pop("training", {})}
    write_experiment(
        home, files=everything, loss_registers={"loss_registers": registers}, training=training, **settings
    )


@dataclass
class Plain:
    """What a loop of plain torch begins with: modules with the same weights, and the batches of each step."""

    modules: dict[str, nn.Module]
    steps: list[list[Any]]
    keys: list[list[tuple[Any, ...]]]


def plain(home: Path) -> Plain:
    """Return the initial weights of a finished experiment, and its batches as its own loaders give them."""
    folder = home / RESULTS
    settings = parse_settings(read_contents(folder / "settings"))
    experiment = assemble(folder / "pymodules", settings, CPU)
    experiment.create_module_transforms()
    for name, module in experiment.components.trained_modules.items():
        constant = folder / f"data/module_ckps/constant/{name}.pt"
        begun = read_any(constant) if constant.exists() else {}
        module.load_state_dict(begun | read_any(folder / f"data/module_ckps/init/{name}.pt"))
    steps, keys = [], []
    with closing(BatchRunner(experiment, Processes(), "train")) as runner:
        plan = create_plan(runner.shapes, settings, experiment.max_steps)
        for epoch in (1, 2):
            for index in range(plan.steps_of(epoch)):
                refs = plan.step(epoch, index)
                steps.append([loaded.batch for loaded in runner.load(refs, runner.points(epoch))])
                keys.append([(settings.training.seed, "step", epoch, index, place) for place in range(len(refs))])
    experiment.set_training(True)
    return Plain(experiment.components.trained_modules, steps, keys)


def check_losses(home: Path, expected: list[Losses]) -> None:
    """Compare the recorded losses of every step."""
    for register in expected[0]:
        files = [home / RESULTS / f"data/loss_reg_data/train/{register}/step_data_{epoch}.npz" for epoch in (1, 2)]
        found = np.concatenate([read_any(file)["means"] for file in files])
        np.testing.assert_allclose(found, [losses[register] for losses in expected], rtol=1e-6, atol=1e-6)


def train(
    given: Plain,
    optimizer: torch.optim.Optimizer,
    compute: Callable[[list[Any], list[tuple[Any, ...]]], dict[str, torch.Tensor]],
    after: Callable[[int], None] = lambda number: None,
    clip: float | None = None,
) -> list[Losses]:
    """Train as a script does: the mean losses of a step, one backward pass, one update."""
    losses = []
    for number, (batches, keys) in enumerate(zip(given.steps, given.keys, strict=True), 1):
        means = compute(batches, keys)
        optimizer.zero_grad()
        sum(means.values(), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_([p for module in given.modules.values() for p in module.parameters()], clip)
        optimizer.step()
        after(number)
        losses.append({name: float(mean) for name, mean in means.items()})
    return losses


SGD = """
    from torch.optim import SGD


    def create_optimizer(modules):
        return SGD([weight for module in modules.values() for weight in module.parameters()], lr=0.1, momentum=0.9)
"""


def sgd(modules: dict[str, nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.1, momentum=0.9)


RAGGED = """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from pipeline.components import BaseDataset


    class Ragged(BaseDataset):
        def __getitem__(self, idx):
            generator = torch.Generator().manual_seed(idx)
            words = torch.randint(0, 9, (3 + idx % 6,), generator=generator)
            # The prompt is not learned.
            return words[:-1], torch.where(torch.arange(len(words) - 1) < 1, -100, words[1:])

        def get_split_idxs(self, split):
            return range(30) if split == "train" else range(30, 36)


    dataset = Ragged()
"""
PAD = """
    from torch.nn.utils.rnn import pad_sequence


    def collate_fn(points):
        words, targets = zip(*points)
        padded = pad_sequence(targets, batch_first=True, padding_value=-100)
        return {"words": pad_sequence(words, batch_first=True), "targets": padded}


    train_dataloader_args = {"batch_size": 3}
"""
TOKENS = """
    import torch.nn.functional as F

    from pipeline.components import BaseModuleTransform

    loss_registers = ["loss"]


    class ModuleTransform(BaseModuleTransform):
        def count_items(self, batch):
            return {"loss": (batch["targets"] != -100).sum()}

        def __call__(self, batch, modules):
            scores = modules["net"](batch["words"]).transpose(1, 2)
            return {"loss": F.cross_entropy(scores, batch["targets"], ignore_index=-100, reduction="none")}
"""
LANGUAGE = {
    "pymodules/datasets/text.py": RAGGED,
    "pymodules/dataloaders/text.py": PAD,
    "pymodules/module_transforms/text.py": TOKENS,
    "pymodules/modules/net.py": """
        from torch import nn

        module = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 9))
    """,
}


def mean_over_tokens(given: Plain) -> Callable[[list[Any], list[Any]], dict[str, torch.Tensor]]:
    def compute(batches: list[Any], keys: list[Any]) -> dict[str, torch.Tensor]:
        scores = [given.modules["net"](batch["words"]).flatten(0, 1) for batch in batches]
        targets = [batch["targets"].flatten() for batch in batches]
        return {"loss": F.cross_entropy(torch.cat(scores), torch.cat(targets), ignore_index=IGNORED)}

    return compute


def test_language_model_with_accumulation_clipping_and_a_cosine(tmp_path: Path) -> None:
    """Workload 1: epochs of steps, four batches per update, rates that follow steps, a mean over tokens."""
    cosine = """
        from torch.optim import AdamW
        from torch.optim.lr_scheduler import CosineAnnealingLR

        from pipeline.components import TorchScheduler


        def create_optimizer(modules):
            return AdamW(modules["net"].parameters(), lr=0.01, fused=False)


        def create_scheduler(optimizer):
            return TorchScheduler(CosineAnnealingLR(optimizer, T_max=12), per="step")
    """
    loading = {"step_min_items": 12, "steps_per_epoch": 6}
    files = {**LANGUAGE, "pymodules/optim_sched/main.py": cosine}
    write(tmp_path, files, ["loss"], data_loading=loading, training={"grad_clip_norm": 0.5})
    run_inside(tmp_path)
    given = plain(tmp_path)
    assert [len(batches) for batches in given.steps] == [4] * 12
    optimizer = torch.optim.AdamW(given.modules["net"].parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    losses = train(given, optimizer, mean_over_tokens(given), lambda number: schedule.step(), clip=0.5)
    check_losses(tmp_path, losses)


def test_fine_tuning_on_ragged_text_with_masked_prompts(tmp_path: Path) -> None:
    """Workload 7: batches are padded to their longest text, and the mean is one over the words that are learned."""
    write(tmp_path, {**LANGUAGE, "pymodules/optim_sched/main.py": SGD}, ["loss"], data_loading={"step_min_items": 7})
    run_inside(tmp_path)
    given = plain(tmp_path)
    check_losses(tmp_path, train(given, sgd(given.modules), mean_over_tokens(given)))


def test_low_rank_adapters_on_a_frozen_layer(tmp_path: Path) -> None:
    """Workload 7: only the factors beside a fixed weight are trained, and commits hold nothing else of that layer."""
    files = {
        "pymodules/datasets/points.py": """
            import torch


            class Points:
                def __getitem__(self, idx):
                    inputs = torch.randn(12, generator=torch.Generator().manual_seed(idx))
                    return {"x": inputs, "label": (inputs[:4].abs().argmax())}

                def get_split_idxs(self, split):
                    return range(60) if split == "train" else range(60, 70)


            dataset = Points()
        """,
        "pymodules/dataloaders/points.py": 'train_dataloader_args = {"batch_size": 6}\n',
        "pymodules/modules/net.py": """
            import torch
            from torch import nn


            class LowRank(nn.Module):
                def __init__(self, layer, rank):
                    super().__init__()
                    self.layer = layer.requires_grad_(False)
                    self.down = nn.Linear(layer.in_features, rank, bias=False)
                    self.up = nn.Linear(rank, layer.out_features, bias=False)
                    nn.init.zeros_(self.up.weight)

                def forward(self, inputs):
                    return self.layer(inputs) + self.up(self.down(inputs))


            module = nn.Sequential(LowRank(nn.Linear(12, 32), 3), nn.Tanh(), LowRank(nn.Linear(32, 32), 3), nn.Tanh(),
                nn.Linear(32, 4))
        """,
        "pymodules/module_transforms/points.py": """
            import torch.nn.functional as F

            from pipeline.components import BaseModuleTransform

            loss_registers = ["loss"]


            class ModuleTransform(BaseModuleTransform):
                def __call__(self, batch, modules):
                    return {"loss": F.cross_entropy(modules["net"](batch["x"]), batch["label"], reduction="none")}
        """,
        "pymodules/optim_sched/main.py": """
            from torch.optim import AdamW


            def create_optimizer(modules):
                return AdamW([weight for weight in modules["net"].parameters() if weight.requires_grad], lr=0.02)
        """,
    }
    write(tmp_path, files, ["loss"], data_loading={"step_min_items": 6})
    run_inside(tmp_path)
    given = plain(tmp_path)
    network = given.modules["net"]
    constant = read_any(tmp_path / RESULTS / "data/module_ckps/constant/net.pt")
    assert list(constant) == ["0.layer.weight", "0.layer.bias", "2.layer.weight", "2.layer.bias"]

    def compute(batches: list[Any], keys: list[Any]) -> dict[str, torch.Tensor]:
        (batch,) = batches
        return {"loss": F.cross_entropy(network(batch["x"]), batch["label"])}

    optimizer = torch.optim.AdamW([weight for weight in network.parameters() if weight.requires_grad], lr=0.02)
    losses = train(given, optimizer, compute)
    check_losses(tmp_path, losses)
    found = read_any(tmp_path / RESULTS / "data/module_ckps/last/net.pt")
    for name, weight in network.state_dict().items():
        torch.testing.assert_close((constant | found)[name], weight, rtol=1e-5, atol=1e-6)


def test_diffusion_with_a_moving_average(tmp_path: Path) -> None:
    """Workload 2: noise of random levels, and an average that follows every update."""
    files = {
        "pymodules/datasets/points.py": """
            import torch


            class Points:
                def __getitem__(self, idx):
                    return {"x": torch.randn(2, generator=torch.Generator().manual_seed(idx))}

                def get_split_idxs(self, split):
                    return range(40) if split == "train" else range(40, 48)


            dataset = Points()
        """,
        "pymodules/dataloaders/points.py": 'train_dataloader_args = {"batch_size": 8}\n',
        "pymodules/modules/net.py": """
            from torch import nn

            module = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 2))
        """,
        "pymodules/modules/ema.py": 'settings = {"average_of": "net", "decay": 0.7}\n',
        "pymodules/module_transforms/points.py": """
            import torch

            from pipeline.components import BaseModuleTransform

            loss_registers = ["loss"]


            class ModuleTransform(BaseModuleTransform):
                def __call__(self, batch, modules):
                    level = torch.rand(len(batch["x"]), 1)
                    noise = torch.randn_like(batch["x"])
                    noisy = level.sqrt() * batch["x"] + (1 - level).sqrt() * noise
                    found = modules["net"](torch.cat([noisy, level], 1))
                    return {"loss": (found - noise).square().mean(dim=1)}
        """,
        "pymodules/optim_sched/main.py": SGD,
    }
    write(tmp_path, files, ["loss"], data_loading={"step_min_items": 8})
    run_inside(tmp_path)
    given = plain(tmp_path)
    network = given.modules["net"]
    average = {name: weight.detach().clone() for name, weight in network.named_parameters()}

    def compute(batches: list[Any], keys: list[Any]) -> dict[str, torch.Tensor]:
        (batch,), (key,) = batches, keys
        seed_generators(*key)
        level = torch.rand(len(batch["x"]), 1)
        noise = torch.randn_like(batch["x"])
        found = network(torch.cat([level.sqrt() * batch["x"] + (1 - level).sqrt() * noise, level], 1))
        return {"loss": (found - noise).square().mean()}

    def follow(number: int) -> None:
        decay = min(0.7, (1 + number) / (10 + number))
        for name, weight in network.named_parameters():
            average[name] = decay * average[name] + (1 - decay) * weight.detach()

    check_losses(tmp_path, train(given, sgd(given.modules), compute, follow))
    found = read_any(tmp_path / RESULTS / "data/module_ckps/last/ema.pt")
    for name, weight in average.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def images() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the validation images as the dataset below makes them."""
    for idx in range(20, 28):
        generator = torch.Generator().manual_seed(idx)
        image = torch.randn(1, 6, 6, generator=generator)
        labels = torch.randint(0, 3, (6, 6), generator=generator)
        yield image, labels.masked_fill(torch.rand(6, 6, generator=generator) < idx / 40, IGNORED)


def test_segmentation_with_ignored_pixels_and_miou(tmp_path: Path) -> None:
    """Workload 4: images have different numbers of valid pixels; mIoU of the whole split stops the training."""
    files = {
        "pymodules/datasets/images.py": """
            import torch


            class Images:
                def __getitem__(self, idx):
                    generator = torch.Generator().manual_seed(idx)
                    image = torch.randn(1, 6, 6, generator=generator)
                    labels = torch.randint(0, 3, (6, 6), generator=generator)
                    ignored = torch.rand(6, 6, generator=generator) < idx / 40
                    return {"image": image, "labels": labels.masked_fill(ignored, -100)}

                def get_split_idxs(self, split):
                    return range(20) if split == "train" else range(20, 28)


            dataset = Images()
        """,
        "pymodules/dataloaders/images.py": 'train_dataloader_args = {"batch_size": 3}\n',
        "pymodules/modules/net.py": """
            from torch import nn

            module = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))
        """,
        "pymodules/metrics/miou.py": "from pipeline.components import MeanIoU\n\nmetric = MeanIoU(3)\n",
        "pymodules/module_transforms/images.py": """
            import torch.nn.functional as F

            from pipeline.components import BaseModuleTransform

            loss_registers = ["loss"]
            metrics = ["miou"]


            class ModuleTransform(BaseModuleTransform):
                def count_items(self, batch):
                    return {"loss": (batch["labels"] != -100).sum()}

                def __call__(self, batch, modules):
                    scores = modules["net"](batch["image"])
                    loss = F.cross_entropy(scores, batch["labels"], ignore_index=-100, reduction="none")
                    return {"loss": loss, "miou": (scores, batch["labels"])}
        """,
        "pymodules/early_stopper.py": """
            from pipeline.components import RegisterEarlyStopper

            early_stopper = RegisterEarlyStopper("miou", max_epochs=2)
        """,
        "pymodules/optim_sched/main.py": SGD,
    }
    write(tmp_path, files, ["loss"], data_loading={"step_min_items": 6})
    run_inside(tmp_path)
    given = plain(tmp_path)
    network = given.modules["net"]

    def compute(batches: list[Any], keys: list[Any]) -> dict[str, torch.Tensor]:
        scores = torch.cat([network(batch["image"]) for batch in batches])
        labels = torch.cat([batch["labels"] for batch in batches])
        return {"loss": F.cross_entropy(scores, labels, ignore_index=IGNORED)}

    check_losses(tmp_path, train(given, sgd(given.modules), compute))
    theirs = MulticlassJaccardIndex(3, ignore_index=IGNORED)
    for image, labels in images():
        theirs.update(network(image[None]), labels[None])
    recorded = read_any(tmp_path / RESULTS / "data/loss_reg_data/val/miou/epoch_data.npz")["means"]
    assert math.isclose(recorded[-1], float(theirs.compute()), abs_tol=1e-6)


VIEWS = """
    import torch


    class Views:
        def __getitem__(self, idx):
            generator = torch.Generator().manual_seed(idx)
            x = torch.randn(6, generator=generator)
            noise = torch.randn(2, 6, generator=generator) / 5
            return {"first": x + noise[0], "second": x + noise[1], "label": idx % 4}

        def get_split_idxs(self, split):
            return range(22) if split == "train" else range(22, 30)


    dataset = Views()
"""
TEMPERATURE = """
    import torch
    from torch import nn


    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = nn.Parameter(torch.tensor(-1.0))

        def forward(self, similarities):
            return similarities / self.log.exp()


    module = Temperature()
"""
ENCODER = """
    from torch import nn

    module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
"""
SIMCLR = {
    "pymodules/datasets/views.py": VIEWS,
    "pymodules/dataloaders/views.py": 'train_dataloader_args = {"batch_size": 3}\n',
    "pymodules/modules/net.py": ENCODER,
    "pymodules/modules/temperature.py": TEMPERATURE,
    "pymodules/module_transforms/views.py": """
        import torch
        import torch.nn.functional as F

        from pipeline.components import BaseModuleTransform

        loss_registers = ["loss"]


        class ModuleTransform(BaseModuleTransform):
            def embed(self, batch, modules):
                return {name: F.normalize(modules["net"](batch[name]), dim=1) for name in ("first", "second")}

            def loss(self, rows, modules):
                num = len(rows["first"])
                views = torch.cat([rows["first"], rows["second"]])
                scores = modules["temperature"](views @ views.T).fill_diagonal_(float("-inf"))
                losses = F.cross_entropy(scores, torch.arange(2 * num).roll(num), reduction="none")
                return {"loss": (losses[:num] + losses[num:]) / 2}
    """,
    "pymodules/optim_sched/main.py": SGD,
}


def embed(net: nn.Module, batch: Any, key: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the rows of a batch, with what its key lets drop out."""
    seed_generators(*key)
    return [F.normalize(net(batch[name]), dim=1) for name in ("first", "second")]


def test_simclr_over_all_batches_of_a_step(tmp_path: Path) -> None:
    """Workload 6: every view meets those of all batches of its step, in both passes with the same dropout."""
    write(tmp_path, SIMCLR, ["loss"], data_loading={"step_min_items": 11})
    run_inside(tmp_path)
    given = plain(tmp_path)
    assert {len(batches) for batches in given.steps} == {4}

    def compute(batches: list[Any], keys: list[Any]) -> dict[str, torch.Tensor]:
        views = [embed(given.modules["net"], batch, key) for batch, key in zip(batches, keys, strict=True)]
        rows = torch.cat([view[index] for index in range(2) for view in views])
        scores = given.modules["temperature"](rows @ rows.T).fill_diagonal_(float("-inf"))
        return {"loss": F.cross_entropy(scores, torch.arange(len(rows)).roll(len(rows) // 2))}

    check_losses(tmp_path, train(given, sgd(given.modules), compute))


def test_clip_with_two_encoders_and_labels(tmp_path: Path) -> None:
    """Images and texts meet over a whole step, points with the same label are no opposites, and a weighter weighs."""
    transform = """
        import torch.nn.functional as F

        from pipeline.components import BaseModuleTransform

        loss_registers = ["image_loss", "text_loss", "found"]


        class ModuleTransform(BaseModuleTransform):
            def embed(self, batch, modules):
                rows = {name: F.normalize(modules[name](batch[name]), dim=1) for name in ("first", "second")}
                return rows | {"label": batch["label"]}

            def loss(self, rows, modules):
                scores = modules["temperature"](rows["first"] @ rows["second"].T)
                same = (rows["label"] == rows["label"][:, None]).float()
                wanted = same / same.sum(dim=1)
                return {
                    "image_loss": F.cross_entropy(scores, wanted, reduction="none"),
                    "text_loss": F.cross_entropy(scores.T, wanted, reduction="none"),
                    "found": (rows["label"][scores.argmax(dim=1)] == rows["label"]).float(),
                }
    """
    files = {name: text for name, text in SIMCLR.items() if not name.endswith("net.py")} | {
        "pymodules/modules/first.py": ENCODER.replace("0.2", "0.0"),
        "pymodules/modules/second.py": ENCODER.replace("16", "8").replace("0.2", "0.0"),
        "pymodules/module_transforms/views.py": transform,
        "pymodules/loss_weighter.py": """
            from pipeline.components import StaticLossWeighter

            loss_weighter = StaticLossWeighter({"text_loss": 0.5})
        """,
    }
    registers = ["image_loss", "text_loss", {"name": "found", "optimize": False, "direction": "max"}]
    write(tmp_path, files, registers, data_loading={"step_min_items": 11})
    run_inside(tmp_path)
    given = plain(tmp_path)
    modules = given.modules

    def compute(batches: list[Any], keys: list[Any]) -> dict[str, torch.Tensor]:
        images, texts = (
            F.normalize(modules[name](torch.cat([batch[name] for batch in batches])), dim=1)
            for name in ("first", "second")
        )
        label = torch.cat([batch["label"] for batch in batches])
        scores = modules["temperature"](images @ texts.T)
        same = (label == label[:, None]).float()
        wanted = same / same.sum(dim=1)
        return {"image_loss": F.cross_entropy(scores, wanted), "text_loss": 0.5 * F.cross_entropy(scores.T, wanted)}

    expected = train(given, sgd(modules), compute)
    check_losses(tmp_path, [{**losses, "text_loss": 2 * losses["text_loss"]} for losses in expected])


def test_detector_that_returns_losses_of_batches(tmp_path: Path) -> None:
    """Workload 5: lists of boxes of different lengths, and scalar losses as detectors return them."""
    files = {
        "pymodules/datasets/scenes.py": """
            import torch


            class Scenes:
                def __getitem__(self, idx):
                    generator = torch.Generator().manual_seed(idx)
                    return torch.randn(5, generator=generator), torch.randn(1 + idx % 4, 2, generator=generator)

                def get_split_idxs(self, split):
                    return range(21) if split == "train" else range(21, 26)


            dataset = Scenes()
        """,
        "pymodules/dataloaders/scenes.py": """
            import torch


            def collate_fn(points):
                images, boxes = zip(*points)
                return {"images": torch.stack(images), "boxes": list(boxes)}


            train_dataloader_args = {"batch_size": 4}
        """,
        "pymodules/modules/detector.py": """
            import torch
            from torch import nn


            class Detector(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.box = nn.Linear(5, 2)
                    self.score = nn.Linear(5, 1)

                def forward(self, images, boxes):
                    found = self.box(images)
                    near = [(box - place).square().mean() for box, place in zip(boxes, found)]
                    numbers = torch.tensor([float(len(box)) for box in boxes])
                    return {
                        "box_loss": torch.stack(near).mean(),
                        "score_loss": (self.score(images)[:, 0] - numbers).square().mean(),
                    }


            module = Detector()
        """,
        "pymodules/module_transforms/scenes.py": """
            from pipeline.components import BaseModuleTransform

            loss_registers = ["box_loss", "score_loss"]


            class ModuleTransform(BaseModuleTransform):
                def __call__(self, batch, modules):
                    return modules["detector"](batch["images"], batch["boxes"])
        """,
        "pymodules/optim_sched/main.py": SGD.replace("lr=0.1", "lr=0.01"),
    }
    registers = [{"name": name, "per": "batch"} for name in ("box_loss", "score_loss")]
    write(tmp_path, files, registers, data_loading={"step_min_items": 8})
    run_inside(tmp_path)
    given = plain(tmp_path)

    def compute(batches: list[Any], keys: list[Any]) -> dict[str, torch.Tensor]:
        losses = [given.modules["detector"](batch["images"], batch["boxes"]) for batch in batches]
        return {name: torch.stack([loss[name] for loss in losses]).mean() for name in losses[0]}

    optimizer = torch.optim.SGD(given.modules["detector"].parameters(), lr=0.01, momentum=0.9)
    check_losses(tmp_path, train(given, optimizer, compute))


DISTILLED = {
    "pymodules/datasets/points.py": """
        import torch


        class Points:
            def __getitem__(self, idx):
                return {"x": torch.randn(6, generator=torch.Generator().manual_seed(idx))}

            def get_split_idxs(self, split):
                return range(30) if split == "train" else range(30, 36)


        dataset = Points()
    """,
    "pymodules/dataloaders/points.py": 'train_dataloader_args = {"batch_size": 3}\n',
    "pymodules/modules/teacher.py": """
        from torch import nn

        module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        settings = {"frozen": True}
    """,
    "pymodules/modules/student.py": """
        from torch import nn

        module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        module[:4].requires_grad_(False)
    """,
    "pymodules/module_transforms/points.py": """
        import torch.nn.functional as F

        from pipeline.components import BaseModuleTransform

        loss_registers = ["loss"]


        class ModuleTransform(BaseModuleTransform):
            def __call__(self, batch, modules):
                wanted = modules["teacher"](batch["x"]).softmax(dim=1)
                return {"loss": F.cross_entropy(modules["student"](batch["x"]), wanted, reduction="none")}
    """,
    # Rates that fall from layer to layer. The first layer is added when it is unfrozen, the second is there before.
    "pymodules/optim_sched/main.py": """
        from torch.optim import AdamW
        from torch.optim.lr_scheduler import ReduceLROnPlateau

        from pipeline.components import TorchScheduler


        def create_optimizer(modules):
            student = modules["student"]
            groups = [
                {"name": "head", "params": student[4].parameters(), "lr": 0.02},
                {"name": "second", "params": student[2].parameters(), "lr": 0.01},
            ]
            return AdamW(groups, weight_decay=0.05)


        def create_scheduler(optimizer):
            return TorchScheduler(ReduceLROnPlateau(optimizer, threshold=0.9, patience=0), register="loss")
    """,
    "pymodules/hooks/first.py": """
        from pipeline.components import UnfreezeAt

        hook = UnfreezeAt(2, "student", "0.*", optimizer="main", lr=0.005)
    """,
    "pymodules/hooks/second.py": """
        from pipeline.components import UnfreezeAt

        hook = UnfreezeAt(2, "student", "2.*")
    """,
}


def test_distillation_that_unfreezes_layers_with_rates_of_their_own(tmp_path: Path) -> None:
    """Workload 9: a teacher, rates by layer, two layers that are unfrozen at epoch 2, and a plateau of evaluations."""
    write(tmp_path, DISTILLED, ["loss"], data_loading={"step_min_items": 6})
    run_inside(tmp_path)
    given = plain(tmp_path)
    student = given.modules["student"]
    assert isinstance(student, nn.Sequential)
    teacher = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)
    teacher.load_state_dict(read_any(tmp_path / RESULTS / "data/module_ckps/frzn/teacher.pt"))
    groups: list[Any] = [
        {"params": student[4].parameters(), "lr": 0.02},
        {"params": student[2].parameters(), "lr": 0.01},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=0.9, patience=0)

    def compute(batches: list[Any], keys: list[Any]) -> dict[str, torch.Tensor]:
        x = torch.cat([batch["x"] for batch in batches])
        return {"loss": F.cross_entropy(student(x), teacher(x).softmax(dim=1))}

    def evaluate() -> None:
        points = torch.stack([torch.randn(6, generator=torch.Generator().manual_seed(idx)) for idx in range(30, 36)])
        with torch.no_grad():
            schedule.step(float(compute([{"x": points}], [])["loss"]))

    def after(number: int) -> None:
        if number == len(given.steps) // 2:
            evaluate()
            student.requires_grad_(True)
            optimizer.add_param_group({"params": student[0].parameters(), "lr": 0.005})

    evaluate()
    check_losses(tmp_path, train(given, optimizer, compute, after))
    # The second evaluation is no improvement of 90 %, so the groups that were there have a tenth of their rates.
    rates = read_any(tmp_path / RESULTS / "data/lr_data/main/step_data_2.npz")
    for name, rate in (("head", 0.002), ("second", 0.001), ("student_from_2", 0.005)):
        np.testing.assert_allclose(rates[f"lr_{name}"], rate)
