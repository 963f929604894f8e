"""Hooks: called at their moments, committed with what they change, the same bits after kills and on any processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.checkpoint.parts import PersistedParts
from pipeline.store.compare import first_difference, read_any
from tests.support.experiments import FILES, tree, write_experiment
from tests.support.running import run_inside, run_process
from tests.support.verbs import call

DATA = Path("experiment_results/tiny/data")
Files = dict[str, str | None]

# The trunk's first layer is frozen and in no optimizer; head_b is frozen and in one.
FROZEN: Files = {
    "pymodules/modules/trunk.py": FILES["pymodules/modules/trunk.py"].replace(
        "settings =", "module[0].requires_grad_(False)\n        settings ="
    ),
    "pymodules/modules/head_b.py": """
        from torch import nn

        module = nn.Linear(8, 1).requires_grad_(False)
    """,
    "pymodules/optim_sched/trunk.py": FILES["pymodules/optim_sched/trunk.py"].replace(
        'modules["trunk"].parameters()', 'modules["trunk"][1].parameters()'
    ),
}
# Unfreezes head_b at the beginning of epoch 2 and adds the trunk's first layer after a step within it. Draws, counts
# and looks at losses. A run with KILL_AT=MOMENT,EPOCH,STEP is killed there.
ACTING = """
    import os
    import signal

    import torch

    from pipeline.components import BaseHook, load_json, save_json


    class Acting(BaseHook):
        def __init__(self):
            self.calls = []

        def note(self, moment, state):
            at = state.position
            value = state.losses["val"]["error"].epoch_means[-1:]
            self.calls.append([moment, at.epoch, at.step, at.global_step, value])
            if os.environ.get("KILL_AT") == f"{moment},{at.epoch},{at.step}":
                os.kill(os.getpid(), signal.SIGKILL)

        def at_start(self, state):
            self.note("at_start", state)
            state.modules["head_a"].bias.mul_(1 + torch.rand(()).item())

        def before_train_epoch(self, state):
            self.note("before_train_epoch", state)
            if state.position.epoch == 2:
                state.modules["head_b"].requires_grad_(True)

        def after_train_step(self, state):
            self.note("after_train_step", state)
            if (state.position.epoch, state.position.step) == (2, 2):
                layer = state.modules["trunk"][0].requires_grad_(True)
                group = {"params": layer.parameters(), "name": "layer", "lr": 0.003}
                state.optimizers["trunk"].add_param_group(group)

        def after_train_epoch(self, state):
            self.note("after_train_epoch", state)
            state.modules["head_a"].weight.mul_(0.99)

        def after_evaluation(self, state):
            self.note("after_evaluation", state)
            for group in state.optimizers["heads"].param_groups:
                group["lr"] *= 0.9 + 0.1 * torch.rand(()).item()

        def save(self, folder):
            save_json(folder, {"calls": self.calls})

        def load(self, folder):
            self.calls = load_json(folder)["calls"]


    hook = Acting()
"""
ACTS: Files = {**FROZEN, "pymodules/hooks/acting.py": ACTING}


def hook_file(text: str) -> Files:
    return {"pymodules/hooks/acting.py": text}


def write(home: Path, files: Files, **training: Any) -> Path:
    write_experiment(home, files=files, training={"checkpoint_in_background": False, **training})
    return home


def run_at(home: Path, nproc: int, *words: str, env: dict[str, str] | None = None) -> None:
    done = run_process(home, *words, nproc=nproc if nproc > 1 else None, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def calls_of(home: Path, *moments: str) -> list[list[Any]]:
    calls: list[list[Any]] = json.loads((home / DATA / "hook_data/acting/state.json").read_text())["calls"]
    return [entry for entry in calls if entry[0] in moments] if moments else calls


def test_hooks_are_called_at_their_moments(tmp_path: Path) -> None:
    """Once at the start, around every epoch, after every step, and after every evaluation but the last."""
    run_inside(write(tmp_path, ACTS))
    calls = calls_of(tmp_path)
    assert [entry[:4] for entry in calls[:3]] == [
        ["at_start", 0, 0, 0],
        ["after_evaluation", 0, 0, 0],
        ["before_train_epoch", 1, 0, 0],
    ]
    steps = calls_of(tmp_path, "after_train_step")
    per_epoch = sum(entry[1] == 1 for entry in steps)
    assert [entry[1:4] for entry in steps] == [
        [epoch, step, (epoch - 1) * per_epoch + step] for epoch in (1, 2, 3) for step in range(1, per_epoch + 1)
    ]
    assert [entry[1:4] for entry in calls_of(tmp_path, "after_train_epoch")] == [
        [epoch, per_epoch, epoch * per_epoch] for epoch in (1, 2, 3)
    ]
    assert [entry[1:4] for entry in calls_of(tmp_path, "after_evaluation")] == [
        [epoch, 0, epoch * per_epoch] for epoch in (0, 1, 2)
    ]


@pytest.mark.parametrize(
    ("interval", "evaluated"), [(0, []), (2, [0, 2])], ids=["no evaluations", "every second epoch"]
)
def test_only_an_evaluated_epoch_is_followed(tmp_path: Path, interval: int, evaluated: list[int]) -> None:
    """What follows an evaluation is called if the epoch before was evaluated, and not otherwise."""
    run_inside(write(tmp_path, ACTS, evaluation_interval=interval))
    assert [entry[1] for entry in calls_of(tmp_path, "after_evaluation")] == evaluated


def test_group_that_is_added_has_a_late_column(tmp_path: Path) -> None:
    """Its rate is recorded from the next step on, NaN before, and keeps its value while others are scheduled."""
    run_inside(write(tmp_path, ACTS))
    rates = {epoch: read_any(tmp_path / DATA / f"lr_data/trunk/step_data_{epoch}.npz") for epoch in (1, 2, 3)}
    assert "lr_layer" not in rates[1]
    np.testing.assert_array_equal(np.isnan(rates[2]["lr_layer"]), np.arange(len(rates[2]["steps"])) < 2)
    assert set(rates[3]["lr_layer"]) == {0.003}
    assert len(set(rates[3]["lr_trunk"])) > 1


KILLS = [
    ("before_train_epoch", 1, 0),
    ("after_evaluation", 1, 0),
    ("before_train_epoch", 2, 0),
    ("after_train_step", 2, 1),
    ("after_train_step", 2, 2),
    ("after_train_step", 2, 3),
    ("after_train_step", 2, 5),
    ("after_train_epoch", 2, 5),
    ("after_evaluation", 2, 0),
    ("after_train_step", 3, 2),
]


def test_resumes_within_one_process_end_with_the_same_bits(tmp_path: Path) -> None:
    """Stopped after every epoch and killed at every moment, all files end as those of a run that never stopped."""
    whole, killed = (write(tmp_path / name, ACTS) for name in ("whole", "killed"))
    run_inside(whole)
    for kill in (KILLS[2], KILLS[3], KILLS[5]):
        done = run_process(killed, "--auto", env={"KILL_AT": ",".join(map(str, kill))})
        assert done.returncode != 0, done.stdout
    run_inside(killed, "--auto")
    assert first_difference(whole / DATA, killed / DATA) is None


ENGINES: dict[str, dict[str, Any]] = {
    "fast": {},
    "exact": {"gradient_reduction": "exact"},
    "fsdp": {"parallelism": "fsdp"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_killed_run_ends_with_the_same_bits(whole_of_two: Path, tmp_path: Path, kill: tuple[str, int, int]) -> None:
    """Killed at two processes between an evaluation and a step, before and after something is unfrozen and added."""
    write(tmp_path, ACTS)
    done = run_process(tmp_path, nproc=2, env={"KILL_AT": ",".join(map(str, kill))})
    assert done.returncode != 0
    run_at(tmp_path, 2, "--resume")
    assert first_difference(whole_of_two / DATA, tmp_path / DATA) is None


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on two processes that was never killed."""
    home = write(tmp_path_factory.mktemp("whole"), ACTS)
    run_at(home, 2)
    return home


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["exact", "fsdp"])
def test_engines_continue_with_added_groups(tmp_path: Path, engine: str) -> None:
    """With exact gradients and with shards, a run that is killed twice ends like one that never was."""
    whole, killed = (write(tmp_path / name, ACTS, **ENGINES[engine]) for name in ("whole", "killed"))
    run_at(whole, 2)
    for kill in ("before_train_epoch,2,0", "after_train_step,2,3"):
        assert run_process(killed, "--auto", nproc=2, env={"KILL_AT": kill}).returncode != 0
    run_at(killed, 2, "--resume")
    assert first_difference(whole / DATA, killed / DATA) is None
    calls = calls_of(whole)
    assert calls == calls_of(killed)


@pytest.mark.slow
def test_shards_train_as_whole_modules_do(tmp_path: Path) -> None:
    """What hooks change of shards is what they change of whole modules, up to rounding."""
    sharded, whole = (write(tmp_path / name, ACTS, **ENGINES[name]) for name in ("fsdp", "fast"))
    run_at(sharded, 2)
    run_at(whole, 1)
    for module in ("trunk", "head_a", "head_b"):
        expected = read_any(whole / DATA / f"module_ckps/last/{module}.pt")
        found = read_any(sharded / DATA / "module_ckps/last" / module)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_exact_gives_the_same_bits_on_one_to_three_processes(tmp_path: Path) -> None:
    """What hooks draw, see and change does not depend on the number of processes."""
    homes = {nproc: write(tmp_path / str(nproc), ACTS, **ENGINES["exact"]) for nproc in (1, 2, 3)}
    for nproc, home in homes.items():
        run_at(home, nproc)
    differences = {nproc: first_difference(homes[1] / DATA, home / DATA) for nproc, home in homes.items()}
    assert differences == dict.fromkeys(homes)


@pytest.mark.parametrize("left_out", ["param_groups", "hook_data"])
def test_state_of_hooks_must_be_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    """A resume without the names of groups, or without what a hook saved, does not end with the same bits."""
    home = write(tmp_path, ACTS)
    run_inside(home, "--stop-after-epoch", "2")
    if left_out == "param_groups":
        monkeypatch.setattr(PersistedParts, "prepare_tensors", lambda self, saved: None)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            run_inside(home, "--resume")
        return
    restore = PersistedParts.restore

    def without_hooks(self: PersistedParts, *arguments: Any) -> None:
        self.__dict__["_folder_parts"] = [part for part in self._folder_parts if not part.path.startswith("hook_data")]
        restore(self, *arguments)

    monkeypatch.setattr(PersistedParts, "restore", without_hooks)
    run_inside(home, "--resume")
    whole = write(tmp_path / "whole", ACTS)
    monkeypatch.undo()
    run_inside(whole)
    assert first_difference(whole / DATA, home / DATA) is not None


def test_adding_a_hook_changes_no_draws_of_another(tmp_path: Path) -> None:
    """Each draws from generators of its own key, so that two runs with and without another have the same weights."""
    drawing = ACTING.replace("class Acting", "class Drawing").replace("Acting()", "Drawing()")
    idle = """
        import torch

        from pipeline.components import BaseHook


        class Idle(BaseHook):
            def at_start(self, state):
                torch.rand(7)

            def after_evaluation(self, state):
                torch.rand(5)


        hook = Idle()
    """
    both = {**FROZEN, **hook_file(drawing), "pymodules/hooks/a.py": idle}
    homes = {"one": write(tmp_path / "one", {**FROZEN, **hook_file(drawing)}), "both": write(tmp_path / "both", both)}
    for home in homes.values():
        run_inside(home, "--stop-after-epoch", "1")
    assert first_difference(homes["one"] / DATA, homes["both"] / DATA) is None


def test_hook_need_not_inherit(tmp_path: Path) -> None:
    """A class with save, load and one moment is a hook."""
    plain = """
        import json


        class Counter:
            calls = 0

            def after_train_epoch(self, state):
                self.calls += 1

            def save(self, folder):
                (folder / "state.json").write_text(json.dumps({"calls": self.calls}))

            def load(self, folder):
                self.calls = json.loads((folder / "state.json").read_text())["calls"]


        hook = Counter()
    """
    run_inside(write(tmp_path, hook_file(plain)))
    assert json.loads((tmp_path / DATA / "hook_data/acting/state.json").read_text()) == {"calls": 3}


def hook_of(moment: str, body: str, imports: str = "") -> Files:
    return hook_file(
        f"""
        import os
        {imports}
        from pipeline.components import BaseHook


        class Acting(BaseHook):
            def {moment}(self, state):
                {body}


        hook = Acting()
        """
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "body", "differs"),
    [
        ("after_train_step", 'state.modules["head_a"].bias.add_(int(os.environ["RANK"]))', "weight 'bias'"),
        (
            "before_train_epoch",
            'state.modules["head_b"].requires_grad_(os.environ["RANK"] == "0")',
            "requires_grad of 'weight' in module 'head_b'",
        ),
        (
            "after_train_epoch",
            'state.optimizers["heads"].param_groups[0]["lr"] += int(os.environ["RANK"])',
            "'lr' of group 'heads' of optimizer 'heads'",
        ),
        (
            "before_train_epoch",
            """if os.environ["RANK"] == "0":
                    layer = {"params": state.modules["trunk"][0].parameters(), "name": "layer"}
                    state.optimizers["trunk"].add_param_group(layer)""",
            "of group 'layer' of optimizer 'trunk'",
        ),
    ],
    ids=["weights", "flags", "rates", "groups"],
)
def test_hook_that_acts_on_one_rank_is_reported(tmp_path: Path, moment: str, body: str, differs: str) -> None:
    """The message says what differs and names the hook as a likely reason."""
    write(tmp_path, {**FROZEN, **hook_of(moment, body)})
    done = run_process(tmp_path, nproc=2)
    assert done.returncode == 1
    assert differs in done.stderr
    assert "a hook that acts by rank, batch or time: hooks/acting.py" in done.stderr


REFUSED = {
    "a layer is added": (
        'state.modules["head_a"].register_parameter("new", torch.nn.Parameter(torch.zeros(1)))',
        "must leave the set, shapes and types of parameters and buffers as they are, but 'new' of module 'head_a' "
        "was added",
    ),
    "a weight is replaced": (
        'state.modules["head_a"].bias = torch.nn.Parameter(torch.zeros(1))',
        "'bias' of module 'head_a' is another object now",
    ),
    "a weight grows": (
        'state.modules["head_a"].bias.data = torch.zeros(2)',
        "'bias' of module 'head_a' was (1,) float32 and is (2,) float32 now",
    ),
    "a buffer is removed": (
        'del state.modules["trunk"][1].running_mean',
        "'1.running_mean' of module 'trunk' was removed",
    ),
    "a group without a name": (
        'state.optimizers["trunk"].add_param_group({"params": state.modules["trunk"][0].parameters()})',
        "must give a param group a 'name' of its own, but the names are ['trunk', None]",
    ),
    "a group is removed": (
        'state.optimizers["trunk"].param_groups.clear()',
        "may add param groups, but has removed or changed others of optimizer 'trunk'",
    ),
    "a foreign parameter": (
        'state.optimizers["trunk"].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "name": "x"})',
        "has added a parameter to optimizer 'trunk' that no trained module has",
    ),
    "two owners": (
        'state.optimizers["trunk"].add_param_group({"params": state.modules["head_a"].parameters(), "name": "x"})',
        "has added head_a.weight, which is in heads and trunk then",
    ),
    "unfrozen and forgotten": (
        'state.modules["trunk"].requires_grad_(True)',
        "has unfrozen trunk.0.weight, which no optimizer has",
    ),
}


@pytest.mark.parametrize("moment", ["at_start", "after_train_step"])
@pytest.mark.parametrize(("body", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_hooks_must_leave_alone_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], moment: str, body: str, said: str
) -> None:
    """One sentence with the hook's file and the moment; nothing of it is committed."""
    files = {**FROZEN, **hook_of(moment, body, "import torch")}
    write(tmp_path, files)
    with pytest.raises(Exception, match=r"hooks/acting\.py") as raised:
        run_inside(tmp_path)
    assert said in str(raised.value)
    assert f": {moment} " in str(raised.value)
    assert "fix:" in str(raised.value)


UNFREEZE = "from pipeline.components import UnfreezeAt\n\nhook = UnfreezeAt({})\n"
_SAVELESS = """
    class Hook:
        def after_train_step(self, state):
            pass


    hook = Hook()
"""
_PLATEAU = """
    from torch.optim import SGD
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    from pipeline.components import TorchScheduler, WarmupScheduler


    def create_optimizer(modules):
        params = [*modules["head_a"].parameters(), *modules["head_b"].parameters()]
        return SGD([{{"name": "heads", "params": params}}], lr=0.02, momentum=0.9)


    def create_scheduler(optimizer):
        return {}
"""


def plateau(scheduler: str) -> Files:
    return {"pymodules/optim_sched/heads.py": _PLATEAU.format(scheduler)}


MISTAKES: dict[str, tuple[Files, str]] = {
    "no save": (hook_file(_SAVELESS), "hook must have the methods save(folder), load(folder), but Hook has not"),
    "wrong signature": (
        hook_file(ACTING.replace("after_train_step(self, state)", "after_train_step(self, state, epoch)")),
        "after_train_step must take one argument: after_train_step(state)",
    ),
    "no moment": (
        hook_of("after_step", "pass"),
        "must define one of at_start, before_train_epoch, after_train_step, after_train_epoch, after_evaluation, but "
        "Acting has none of them. Did you mean 'after_train_step'?",
    ),
    "one object in two files": (
        {**ACTS, "pymodules/hooks/again.py": "from .acting import hook\n"},
        "must be an object of its own, but is that of hooks/acting.py",
    ),
    "unknown module": (hook_file(UNFREEZE.format('2, "trnk"')), "names module 'trnk', which does not exist"),
    "frozen module": (hook_file(UNFREEZE.format('2, "stem"')), "names module 'stem', which is frozen or an average"),
    "no such parameter": (
        hook_file(UNFREEZE.format('2, "trunk", "0.*", "9.*"')),
        "has pattern '9.*', which matches none of 0.weight, 1.weight, 1.bias",
    ),
    "unknown optimizer": (
        hook_file(UNFREEZE.format('2, "trunk", optimizer="trunks"')),
        "names optimizer 'trunks', but there are heads, trunk. Did you mean 'trunk'?",
    ),
    "in no optimizer": (
        {**FROZEN, **hook_file(UNFREEZE.format('2, "trunk", "0.*"'))},
        "unfreezes parameters that are in no optimizer: 0.weight",
    ),
    "in an optimizer already": (
        {**FROZEN, **hook_file(UNFREEZE.format('2, "trunk", optimizer="trunk", lr=0.1'))},
        "adds parameters to 'trunk' that are in an optimizer: 1.weight, 1.bias",
    ),
    "rate without an optimizer": (
        hook_file(UNFREEZE.format('2, "trunk", lr=0.1')),
        "lr and group are of a new param group, which needs optimizer.",
    ),
    "plateau without a register": (
        plateau("TorchScheduler(ReduceLROnPlateau(optimizer))"),
        "ReduceLROnPlateau follows a register of evaluations, but none is named",
    ),
    "plateau as it is": (
        plateau("ReduceLROnPlateau(optimizer)"),
        'return TorchScheduler(ReduceLROnPlateau(…), register="loss")',
    ),
    "unknown register": (
        plateau('TorchScheduler(ReduceLROnPlateau(optimizer), register="los_a")'),
        "ReduceLROnPlateau follows register 'los_a', but there are error, loss_a, loss_b. Did you mean 'loss_a'?",
    ),
    "unknown register after a warm-up": (
        plateau('WarmupScheduler(optimizer, 1, TorchScheduler(ReduceLROnPlateau(optimizer), register="x"))'),
        "ReduceLROnPlateau follows register 'x'",
    ),
    "other direction": (
        plateau('TorchScheduler(ReduceLROnPlateau(optimizer, mode="max"), register="loss_a")'),
        "ReduceLROnPlateau has mode 'max', but register 'loss_a' has direction 'min'",
    ),
    "no evaluations": (
        {
            **plateau('TorchScheduler(ReduceLROnPlateau(optimizer), register="loss_a")'),
            "settings/training.json": '{"evaluation_interval": 0, "max_epochs": 1}',
        },
        "ReduceLROnPlateau follows evaluations, but evaluation_interval is 0",
    ),
}


@pytest.mark.parametrize(("files", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_found_by_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: Files, said: str
) -> None:
    """One sentence with the file, and nothing is written."""
    write(tmp_path, files)
    before = tree(tmp_path)
    assert call(tmp_path, "check", "tiny") == 2
    assert said in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize("is_stopped", [False, True], ids=["undisturbed", "stopped after every epoch"])
def test_rate_follows_a_register_of_evaluations(tmp_path: Path, is_stopped: bool) -> None:
    """Rates are those of a plain loop that steps ReduceLROnPlateau with the recorded values."""
    scheduler = 'TorchScheduler(ReduceLROnPlateau(optimizer, patience=0, threshold=0.5), register="error")'
    write(tmp_path, {**plateau(scheduler), **_TRAINED_LONGER})
    if is_stopped:
        for epoch in range(6):
            run_inside(tmp_path, "--auto", "--stop-after-epoch", str(epoch))
    run_inside(tmp_path, "--auto")
    values = read_any(tmp_path / DATA / "loss_reg_data/val/error/epoch_data.npz")["means"].tolist()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    torch_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for epoch in range(1, 6):
        torch_scheduler.step(values[epoch - 1])
        found = read_any(tmp_path / DATA / f"lr_data/heads/step_data_{epoch}.npz")["lr_heads"]
        assert set(found) == {optimizer.param_groups[0]["lr"]}
    assert optimizer.param_groups[0]["lr"] < 0.02


_TRAINED_LONGER: Files = {
    "pymodules/early_stopper.py": """
        from pipeline.components import WeightedLossEarlyStopper

        early_stopper = WeightedLossEarlyStopper(max_epochs=5)
    """
}


def read_module(home: Path, pool: str, name: str) -> dict[str, torch.Tensor]:
    """Return the weights of a module in a pool; what has not changed is in the constant file alone."""
    folder = home / DATA / "module_ckps"
    constant = folder / f"constant/{name}.pt"
    return {**(read_any(constant) if constant.exists() else {}), **read_any(folder / pool / f"{name}.pt")}


@pytest.mark.parametrize("optimizer", ["", ', optimizer="trunk", lr=0.003'])
def test_unfreeze_at_trains_from_its_epoch_on(tmp_path: Path, optimizer: str) -> None:
    """Weights stay as they were until then, also those that are added to an optimizer."""
    files = {**FROZEN, **hook_file(UNFREEZE.format(f'3, "trunk", "0.*"{optimizer}'))}
    if not optimizer:
        files["pymodules/optim_sched/trunk.py"] = FILES["pymodules/optim_sched/trunk.py"]
    run_inside(write(tmp_path, files))
    first, second, last = (read_module(tmp_path, pool, "trunk")["0.weight"] for pool in ("init", "epoch_2", "last"))
    assert torch.equal(first, second)
    assert not torch.equal(second, last)
    rates = read_any(tmp_path / DATA / "lr_data/trunk/step_data_3.npz")
    assert ("lr_trunk_from_3" in rates) == bool(optimizer)


def test_module_transform_reads_the_position_of_its_batch(tmp_path: Path) -> None:
    """The step of a training batch, step 0 in an evaluation; it cannot be changed, and counting has none."""
    text = FILES["pymodules/module_transforms/a.py"].replace(
        "outputs =",
        """at = self.position
                with open(os.environ["SEEN"], "a") as file:
                    print(modules["trunk"].training, at.epoch, at.step, at.global_step, file=file)
                outputs =""",
    )
    write(tmp_path, {"pymodules/module_transforms/a.py": "\n        import os\n" + text})
    done = run_process(tmp_path, "--stop-after-epoch", "2", env={"SEEN": str(tmp_path / "seen")})
    assert done.returncode == 0, done.stderr
    seen = [line.split() for line in dict.fromkeys((tmp_path / "seen").read_text().splitlines())]
    num_steps = max(int(step) for _, _, step, _ in seen)
    expected = [["False", "0", "0", "0"]]
    for epoch in (1, 2):
        expected += [["True", str(epoch), str(s), str((epoch - 1) * num_steps + s)] for s in range(1, num_steps + 1)]
        expected.append(["False", str(epoch), "0", str(epoch * num_steps)])
    assert seen == expected


def test_attribute_of_the_authors_is_not_a_position(tmp_path: Path) -> None:
    """An experiment that has something else of that name keeps it."""
    text = (
        FILES["pymodules/module_transforms/a.py"]
        .replace('head = "head_a"', 'head = "head_a"\n            position = "mine"')
        .replace("outputs =", 'assert self.position == "mine"\n                outputs =')
    )
    run_inside(write(tmp_path, {"pymodules/module_transforms/a.py": text}), "--stop-after-epoch", "1")


def test_report_and_status_know_groups_that_begin_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within the epoch in which a group is added, and after it."""
    write(tmp_path, ACTS)
    done = run_process(tmp_path, env={"KILL_AT": "after_train_step,2,5"})
    assert done.returncode != 0
    assert call(tmp_path, "report", "tiny") == 0
    assert call(tmp_path, "status", "tiny") == 0
    page = (tmp_path / "experiment_logs/tiny/report.html").read_text()
    assert "trunk/layer" in page


READING: Files = {
    "pymodules/datasets/b.py": """
        from pipeline.components import Position

        from ..utils.points import Points


        class Reading(Points):
            position = None

            def __getitem__(self, idx):
                point = super().__getitem__(idx)
                point["seen"] = [self.position.epoch, self.position.step, self.position.global_step]
                return point


        dataset = Reading(30, 1)
    """,
    "pymodules/module_transforms/b.py": """
        from . import a

        loss_registers = ["loss_b", "error"]


        class ModuleTransform(a.ModuleTransform):
            head = "head_b"
            register = "loss_b"

            def __call__(self, batch, modules):
                at = self.position
                expected = [at.epoch, at.step, at.global_step]
                assert [int(values[0]) for values in batch["seen"]] == expected, (batch["seen"], at)
                return super().__call__(batch, modules)
    """,
}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataset_reads_the_position_of_its_own_batch(tmp_path: Path, num_workers: int) -> None:
    """Also of one that is loaded steps ahead, in a worker, and after a resume within an epoch."""
    loading = f'train_dataloader_args = {{"batch_size": 3, "num_workers": {num_workers}}}\n'
    files = {**ACTS, **READING, "pymodules/dataloaders/b.py": loading}
    write(tmp_path, files)
    words = ("--stop-after-epoch", "2")
    done = run_process(tmp_path, *words, env={"KILL_AT": "after_train_step,1,4"})
    assert done.returncode != 0
    assert "AssertionError" not in done.stderr
    done = run_process(tmp_path, "--resume", *words)
    assert done.returncode == 0, done.stderr


def test_average_follows_hooks(tmp_path: Path) -> None:
    """It begins as what at_start leaves, and counts the updates of an optimizer that gets its source later."""
    files = {
        **ACTS,
        "pymodules/modules/head_a_ema.py": 'settings = {"average_of": "head_a", "decay": 0.9}\n',
        "pymodules/modules/late.py": """
            from torch import nn

            module = nn.Linear(8, 8).requires_grad_(False)
        """,
        "pymodules/modules/late_ema.py": 'settings = {"average_of": "late", "decay": 0.9, "evaluate": None}\n',
        "pymodules/module_transforms/a.py": FILES["pymodules/module_transforms/a.py"].replace(
            'modules["stem"](batch["x"]))',
            'modules["stem"](batch["x"])) + modules["late"](batch["x"][:, :1].repeat(1, 8))',
        ),
        "pymodules/hooks/late.py": UNFREEZE.format('3, "late", optimizer="trunk", lr=0.01'),
    }
    run_inside(write(tmp_path, files))
    pools = {
        (pool, name): read_module(tmp_path, pool, name)["weight" if "late" in name else "bias"]
        for pool in ("init", "epoch_2", "last")
        for name in ("head_a", "head_a_ema", "late", "late_ema")
    }
    assert torch.equal(pools["init", "head_a"], pools["init", "head_a_ema"])
    assert torch.equal(pools["epoch_2", "late"], pools["epoch_2", "late_ema"])
    assert not torch.equal(pools["last", "late_ema"], pools["epoch_2", "late_ema"])
    assert not torch.equal(pools["last", "late_ema"], pools["last", "late"])
