"""Means whose divisor is data: tokens of ragged text, points without a label, losses of whole batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.distributed.processes import Processes
from pipeline.store.compare import first_difference, read_any
from pipeline.training.batch_points import EpochPoints
from pipeline.training.step_plan import PassPlan, SplitShape
from tests.crash.campaign import live
from tests.support.experiments import FILES as TINY
from tests.support.experiments import write_experiment
from tests.support.running import run_inside, run_process
from tests.support.verbs import call

DATA = Path("experiment_results/tiny/data")
NUM_POINTS = 37
NUM_WORDS = 11
IGNORED = -100

_UTILS = f"""
import torch

NUM_WORDS = {NUM_WORDS}
IGNORED = {IGNORED}


def sentence(idx):
    \"\"\"Words of one sentence; every third one has no words to learn from, and every fifth no label.\"\"\"
    generator = torch.Generator().manual_seed(idx)
    words = torch.randint(0, NUM_WORDS, (1 + idx % 7,), generator=generator)
    targets = words.roll(1)
    if idx % 3 == 0:
        targets = torch.full_like(targets, IGNORED)
    return words, targets, idx % 2 if idx % 5 else IGNORED


def pad(points):
    words, targets, labels = zip(*points)
    pad = torch.nn.utils.rnn.pad_sequence
    return {{
        "words": pad(words, batch_first=True),
        "targets": pad(targets, batch_first=True, padding_value=IGNORED),
        "labels": torch.tensor(labels),
    }}
"""
_TRANSFORM = """
import torch.nn.functional as F

from pipeline.components import BaseModuleTransform

from ..utils.text import IGNORED

loss_registers = ["token_loss", "label_loss", "size", "accuracy", "length"]


class ModuleTransform(BaseModuleTransform):
    def count_items(self, batch):
        return {
            "token_loss": (batch["targets"] != IGNORED).sum(),
            "label_loss": int((batch["labels"] != IGNORED).sum()),
        }

    def __call__(self, batch, modules):
        hidden = modules["body"](batch["words"])
        scores = modules["words"](hidden)
        labels = modules["labels"](hidden.mean(dim=1))
        losses = {
            "token_loss": F.cross_entropy(
                scores.transpose(1, 2), batch["targets"], ignore_index=IGNORED, reduction="none"
            ),
            "size": hidden.square().mean(),
            "length": batch["words"].count_nonzero(dim=1).float(),
        }
        is_labelled = batch["labels"] != IGNORED
        if is_labelled.any():
            losses["label_loss"] = F.cross_entropy(labels[is_labelled], batch["labels"][is_labelled], reduction="none")
        if not modules["body"].training:
            losses["accuracy"] = (labels.argmax(dim=1) == batch["labels"]).float()
        return losses
"""
FILES: dict[str, str | None] = {
    "pymodules/utils/text.py": _UTILS,
    "pymodules/datasets/text.py": f"""
        from pipeline.components import BaseDataset

        from ..utils.text import sentence


        class Text(BaseDataset):
            def __getitem__(self, idx):
                return sentence(idx)

            def get_split_idxs(self, split):
                return list(range({NUM_POINTS})) if split == "train" else list(range(100, 113))


        dataset = Text()
    """,
    "pymodules/modules/body.py": f"from torch import nn\n\nmodule = nn.Embedding({NUM_WORDS}, 4)\n",
    "pymodules/modules/words.py": f"from torch import nn\n\nmodule = nn.Linear(4, {NUM_WORDS})\n",
    "pymodules/modules/labels.py": "from torch import nn\n\nmodule = nn.Linear(4, 2)\n",
    "pymodules/module_transforms/text.py": _TRANSFORM,
    "pymodules/optim_sched/all.py": """
        from itertools import chain

        from torch.optim import SGD


        def create_optimizer(modules):
            return SGD(list(chain(*(module.parameters() for module in modules.values()))), lr=0.5)
    """,
}
REGISTERS = [
    "token_loss",
    "label_loss",
    {"name": "size", "per": "batch"},
    {"name": "accuracy", "optimize": False, "direction": "max"},
    {"name": "length", "optimize": False, "splits": ["val"]},
]


def write(home: Path, batch_size: int = 3, step_min_items: int = 8, num_workers: int = 0, **training: Any) -> Path:
    """Write the experiment alone: the tiny one's files are left out."""
    loader = f"""
        from ..utils.text import pad

        collate_fn = pad
        train_dataloader_args = {{"batch_size": {batch_size}, "num_workers": {num_workers}}}
    """
    files = {**dict.fromkeys(TINY), **FILES, "pymodules/dataloaders/text.py": loader}
    write_experiment(
        home,
        files=files,
        data_loading={"step_min_items": step_min_items},
        loss_registers={"loss_registers": REGISTERS},
        training={"grad_clip_norm": None, "max_epochs": 2, **training},
    )
    return home


def return_always(home: Path) -> None:
    """Let the transform return the loss of labels for every batch, with 0 where there is no label."""
    file = home / "experiment_settings/tiny/pymodules/module_transforms/text.py"
    text = file.read_text()
    for old, new in {
        "if is_labelled.any():": "if True:",
        'labels[is_labelled], batch["labels"][is_labelled], reduction': (
            'labels, batch["labels"], ignore_index=IGNORED, reduction'
        ),
    }.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def recorded(home: Path, register: str, epoch: int = 1) -> dict[str, np.ndarray]:
    return read_any(home / DATA / f"loss_reg_data/train/{register}/step_data_{epoch}.npz")


def planned_points(batch_size: int, step_min_items: int) -> Iterator[list[list[int]]]:
    """Yield the points of each batch of each step of epoch 1."""
    shape = SplitShape("text", NUM_POINTS, batch_size, 1)
    plan = PassPlan([shape], step_min_items)
    points = EpochPoints(3, 1, "train", {"text": np.arange(NUM_POINTS)}, is_shuffled=True)
    for index in range(plan.num_steps):
        yield [list(points.batch(ref).indices) for ref in plan.step(1, index)]


def by_hand(home: Path, batch_size: int, step_min_items: int) -> list[tuple[float, float, float]]:
    """Train epoch 1 as a loop of plain torch does, in float64, and return the three means of each step."""
    text: dict[str, Any] = {}
    exec((home / "experiment_settings/tiny/pymodules/utils/text.py").read_text(), text)
    folder = home / DATA / "module_ckps/init"
    body = torch.nn.Embedding(NUM_WORDS, 4).double()
    words = torch.nn.Linear(4, NUM_WORDS).double()
    labels = torch.nn.Linear(4, 2).double()
    for name, module in {"body": body, "words": words, "labels": labels}.items():
        module.load_state_dict(read_any(folder / f"{name}.pt"))
    parameters = [*body.parameters(), *words.parameters(), *labels.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    means = []
    for batches in planned_points(batch_size, step_min_items):
        token_losses, label_losses, sizes = [], [], []
        for points in batches:
            batch = text["pad"]([text["sentence"](idx) for idx in points])
            hidden = body(batch["words"])
            is_word, is_labelled = batch["targets"] != IGNORED, batch["labels"] != IGNORED
            token_losses.append(F.cross_entropy(words(hidden)[is_word], batch["targets"][is_word], reduction="none"))
            scores = labels(hidden.mean(dim=1))
            label_losses.append(F.cross_entropy(scores[is_labelled], batch["labels"][is_labelled], reduction="none"))
            sizes.append(hidden.square().mean())
        step = [torch.cat(token_losses).mean(), torch.cat(label_losses).mean(), torch.stack(sizes).mean()]
        optimizer.zero_grad()
        sum(mean for mean in step if not mean.isnan()).backward()  # type: ignore[union-attr]
        optimizer.step()
        means.append(tuple(float(mean) for mean in step))
    return means  # type: ignore[return-value]


def check_steps(home: Path, batch_size: int, step_min_items: int) -> None:
    expected = np.array(by_hand(home, batch_size, step_min_items))
    found = np.stack([recorded(home, register)["means"] for register in ("token_loss", "label_loss", "size")], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_any_cut_into_batches_trains_like_one_loop_over_all_items(tmp_path: Path, seed: int) -> None:
    """Losses of every step, and with them the gradients before it, are those of a float64 loop of plain torch."""
    draw = random.Random(seed)
    cut = draw.randint(1, 8), draw.randint(1, 30)
    run_inside(write(tmp_path, *cut), "--stop-after-epoch", "1")
    check_steps(tmp_path, *cut)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3])
def test_any_number_of_processes_trains_like_one_loop(tmp_path: Path, nproc: int) -> None:
    """Ranks with more tokens weigh more: no mean of means is taken anywhere."""
    done = run_process(write(tmp_path, 2, 11), "--stop-after-epoch", "1", nproc=nproc)
    assert done.returncode == 0, done.stderr
    check_steps(tmp_path, 2, 11)


def test_records_hold_what_was_counted(tmp_path: Path) -> None:
    """Items are tokens, labels, batches or points, and steps without any have no mean."""
    run_inside(write(tmp_path, 3, 1))
    tokens = recorded(tmp_path, "token_loss")
    expected = [sum((idx % 7) + 1 for batch in batches for idx in batch if idx % 3) for batches in planned_points(3, 1)]
    assert tokens["items"].tolist() == expected
    assert np.isnan(tokens["means"]).tolist() == [items == 0 for items in expected]
    assert set(recorded(tmp_path, "size")["items"].tolist()) == {1}
    # Training never returned it, so no item counts.
    assert set(recorded(tmp_path, "accuracy")["items"].tolist()) == {0}
    assert not (tmp_path / DATA / "loss_reg_data/train/length").exists()
    val = read_any(tmp_path / DATA / "loss_reg_data/val/length/epoch_data.npz")
    assert val["items"].tolist() == [13, 13, 13]
    counted = read_any(tmp_path / DATA / "loss_reg_data/val/token_loss/epoch_data.npz")
    assert set(counted["items"].tolist()) == {sum((idx % 7) + 1 for idx in range(100, 113) if idx % 3)}


def test_shards_of_an_evaluation_are_merged_with_their_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A merge gives the values of a whole evaluation to the last bit."""
    run_inside(write(tmp_path), "--stop-after-epoch", "1")
    shards = [str(tmp_path / f"{index}.npz") for index in range(3)]
    for index, file in enumerate(shards):
        assert call(tmp_path, "evaluate", "tiny", "--shard", f"{index}/3", "--out", file) == 0
    capsys.readouterr()
    assert call(tmp_path, "evaluate", "tiny", "--json") == 0
    whole = capsys.readouterr().out
    assert call(tmp_path, "evaluate", "--merge", *shards, "--json") == 0
    merged = capsys.readouterr().out
    assert whole.partition('"values"')[2] == merged.partition('"values"')[2]


@pytest.mark.slow
def test_exact_gives_the_same_bits_on_one_to_five_processes(tmp_path: Path) -> None:
    """Counts are integers, so nothing about them depends on who counts which batch."""
    homes = {nproc: write(tmp_path / str(nproc), 2, 11, gradient_reduction="exact") for nproc in (1, 2, 3, 5)}
    for nproc, home in homes.items():
        done = run_process(home, nproc=None if nproc == 1 else nproc)
        assert done.returncode == 0, done.stderr
    differences = {nproc: first_difference(homes[1] / DATA, home / DATA) for nproc, home in homes.items()}
    assert differences == dict.fromkeys(homes)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"gradient_reduction": "exact"}, {}, {"parallelism": "fsdp"}], ids=str)
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, engine: dict[str, Any]) -> None:
    """Killed at two processes with workers that count ahead, a run ends like one that was left alone."""
    undisturbed, killed = (write(tmp_path / name, 2, 11, num_workers=1, **engine) for name in ("undisturbed", "killed"))
    for home in (undisturbed, killed) if "parallelism" in engine else ():
        return_always(home)
    done = run_process(undisturbed, nproc=2)
    assert done.returncode == 0, done.stderr
    draw = random.Random(3)
    lives = [live(killed, 2, aim, draw) for aim in ("random", "write", "random")]
    assert any(life.was_killed for life in lives)
    assert run_process(killed, "--auto", nproc=2).returncode == 0
    assert first_difference(undisturbed / DATA, killed / DATA) is None


def test_only_counting_costs_a_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sum of counts per step where the data counts, and none elsewhere."""
    sums: list[int] = []
    original = Processes.sum_async

    def count(self: Processes, tensor: torch.Tensor) -> Callable[[], object]:
        sums.append(tensor.dtype == torch.int64)
        return original(self, tensor)

    monkeypatch.setattr(Processes, "sum_async", count)
    run_inside(write(tmp_path / "counted"), "--stop-after-epoch", "1")
    assert sum(sums) == len(recorded(tmp_path / "counted", "token_loss")["steps"])
    sums.clear()
    write_experiment(tmp_path / "plain")
    run_inside(tmp_path / "plain", "--stop-after-epoch", "1")
    assert not sum(sums)


_LABELS = 'int((batch["labels"] != IGNORED).sum())'
_RETURN = '        return {\n            "token_loss": (batch'
_NUMBERED = _RETURN.replace("        return", '        self.num = getattr(self, "num", 0) + 1\n        return')
_NUMBERED = _NUMBERED.replace(": (batch", ": self.num * (batch")


@pytest.mark.slow
def test_absent_registers_are_refused_with_shards(tmp_path: Path) -> None:
    """Another rank would wait for gradients that never come; the sentence comes before that."""
    done = run_process(write(tmp_path, 1, 4, parallelism="fsdp"), nproc=2)
    assert done.returncode == 1
    assert "must return label_loss for every batch with parallelism: fsdp, also without any items" in done.stderr


MISTAKES: dict[str, tuple[str, str, str]] = {
    "negative": (
        'int((batch["labels"] != IGNORED).sum())',
        "-1",
        "must return an integer of 0 or more for 'label_loss'",
    ),
    "not integer": ('int((batch["labels"] != IGNORED).sum())', "0.5", "for 'label_loss', but returned 0.5"),
    "unknown": ('"label_loss": int(', '"labl_loss": int(', "but has 'labl_loss'"),
    "fewer values than items": (
        '"token_loss": (batch["targets"] != IGNORED).sum()',
        '"token_loss": 10_000',
        "must return a value for each of the 10000 items that count_items gave for 'token_loss'",
    ),
    "more values than items": (
        '"token_loss": (batch["targets"] != IGNORED).sum()',
        '"token_loss": 1',
        "must count every value, but counts 1 for 'token_loss'",
    ),
    "other at the second call": (_RETURN, _NUMBERED, "must return the same for the same batch"),
    "absent though counted": ("if is_labelled.any():", "if False:", "all of its loss_registers"),
}


@pytest.mark.parametrize(("old", "new", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_found_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    """One sentence with the file, and nothing is written."""
    write(tmp_path)
    file = tmp_path / "experiment_settings/tiny/pymodules/module_transforms/text.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    assert call(tmp_path, "check", "tiny") == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(file) in error
    assert [path.name for path in tmp_path.iterdir()] == ["experiment_settings"]


def test_register_for_evaluations_cannot_be_optimised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two contradict each other, and the line says which of them to remove."""
    write(tmp_path)
    file = tmp_path / "experiment_settings/tiny/settings/loss_registers.json"
    file.write_text('{"loss_registers": ["token_loss", {"name": "length", "splits": ["val"]}]}')
    assert call(tmp_path, "check", "tiny") == 2
    assert "register 'length' must be recorded in training to be optimised" in capsys.readouterr().err


def test_check_says_what_is_held_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The price of a divisor that is data is named before it is paid."""
    assert call(write(tmp_path), "check", "tiny") == 0
    assert "items: counted by text, so each process holds all" in capsys.readouterr().out
