"""Initial weights from a checkpoint file or from another experiment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.errors import InvalidExperiment
from pipeline.experiment.initial_weights import load_initial_weights
from pipeline.experiment.pymodules.definitions import Components, ModuleDefinition, WeightSource
from pipeline.experiment.settings.settings import TrainingSettings
from pipeline.paths import ExperimentPaths
from tests.support.experiments import write_experiment
from tests.support.running import run_inside


def load(home: Path, module: nn.Module, **source: Any) -> nn.Module:
    """Fill one module from the source that these settings describe."""
    empty: dict[str, Any] = {
        name: {}
        for name in ("datasets", "data_counters", "data_transforms", "dataloaders", "module_transforms", "optim_sched")
    }
    definition = ModuleDefinition(module, source=WeightSource(**source))
    components = Components(
        modules={"net": definition}, checkpoint_saver=None, early_stopper=None, loss_weighter=None, **empty
    )
    load_initial_weights(components, ExperimentPaths(home, "tiny"), Path("pymodules"), TrainingSettings())
    return module


def refusal(home: Path, module: nn.Module, **source: Any) -> str:
    """Return the one problem that loading gives."""
    with pytest.raises(InvalidExperiment) as raised:
        load(home, module, **source)
    (problem,) = raised.value.problems
    assert problem.where == "pymodules/modules/net.py"
    return problem.what


def save(home: Path, content: Any, name: str = "net.pt") -> None:
    """Put a file among the checkpoints of a data home."""
    (home / "module_ckps").mkdir(exist_ok=True)
    torch.save(content, home / "module_ckps" / name)


def deep(num_layers: int, width: int = 2) -> nn.Module:
    """Return a module with two parameters per layer."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))


def test_weights_of_a_file_are_taken(tmp_path: Path) -> None:
    """Every value of the file is in the module afterwards."""
    save(tmp_path, (source := nn.Linear(3, 2)).state_dict())
    module = load(tmp_path, nn.Linear(3, 2), ckp_name="net.pt")
    assert torch.equal(module.weight, source.weight)
    assert torch.equal(module.bias, source.bias)


def test_suffix_may_be_left_out(tmp_path: Path) -> None:
    """A name without a suffix means a .pt file."""
    save(tmp_path, (source := nn.Linear(3, 2)).state_dict())
    assert torch.equal(load(tmp_path, nn.Linear(3, 2), ckp_name="net").weight, source.weight)


def test_nested_state_dict_is_found(tmp_path: Path) -> None:
    """Files of other trainers keep their weights under 'state_dict'."""
    save(tmp_path, {"epoch": 7, "state_dict": (source := nn.Linear(3, 2)).state_dict()})
    assert torch.equal(load(tmp_path, nn.Linear(3, 2), ckp_name="net").weight, source.weight)


def test_prefix_is_stripped(tmp_path: Path) -> None:
    """Weights saved from inside a wrapper fit the bare module."""
    source = nn.Linear(3, 2)
    save(tmp_path, {f"module.{key}": value for key, value in source.state_dict().items()})
    module = load(tmp_path, nn.Linear(3, 2), ckp_name="net", strip_prefix="module.")
    assert torch.equal(module.weight, source.weight)


def test_keys_are_renamed_by_the_longest_match(tmp_path: Path) -> None:
    """A whole key or a prefix is renamed, and the longer of two prefixes wins."""
    save(tmp_path, {"enc.w": torch.ones(2, 3), "enc.final.bias": torch.full((2,), 5.0)})
    key_map = {"enc.": "", "enc.w": "weight", "enc.final.": ""}
    module = load(tmp_path, nn.Linear(3, 2), ckp_name="net", key_map=key_map)
    assert module.weight.tolist() == [[1.0] * 3] * 2
    assert module.bias.tolist() == [5.0, 5.0]


def test_strict_names_missing_and_unexpected_keys(tmp_path: Path) -> None:
    """Both kinds of misfit are told with their keys."""
    save(tmp_path, {"weight": torch.ones(2, 3), "extra": torch.ones(1)})
    text = refusal(tmp_path, nn.Linear(3, 2), ckp_name="net")
    assert "missing (1) bias" in text
    assert "unexpected (1) extra" in text


def test_not_strict_takes_what_fits(tmp_path: Path) -> None:
    """Missing keys keep their own values, unexpected ones are left."""
    save(tmp_path, {"weight": torch.ones(2, 3), "extra": torch.ones(1)})
    module = nn.Linear(3, 2)
    bias = module.bias.clone()
    load(tmp_path, module, ckp_name="net", strict=False)
    assert module.weight.tolist() == [[1.0] * 3] * 2
    assert torch.equal(module.bias, bias)


@pytest.mark.parametrize("strict", [True, False])
def test_differing_shapes_never_pass(tmp_path: Path, strict: bool) -> None:
    """A shape that does not fit is told with both shapes, strict or not."""
    save(tmp_path, {"weight": torch.ones(4, 3), "bias": torch.ones(2)})
    text = refusal(tmp_path, nn.Linear(3, 2), ckp_name="net", strict=strict)
    assert "differing shapes (1) weight (4, 3) instead of (2, 3)" in text


def test_refused_weights_leave_the_module_alone(tmp_path: Path) -> None:
    """A module is filled whole or not at all."""
    save(tmp_path, {"weight": torch.ones(2, 3), "bias": torch.ones(9)})
    module = nn.Linear(3, 2)
    weight = module.weight.clone()
    refusal(tmp_path, module, ckp_name="net")
    assert torch.equal(module.weight, weight)


class Versioned(nn.Linear):
    """Saves a version with its weights, and takes none but its own."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: dict[str, int]) -> None:
        if state["version"] < 2:
            raise ValueError(f"version {state['version']} is too old")


def test_state_that_a_module_refuses_is_a_problem_of_its_file(tmp_path: Path) -> None:
    """An author's own words stand with the file and the module, and nothing crashes."""
    save(tmp_path, Versioned(3, 2).state_dict() | {"_extra_state": {"version": 1}})
    assert "version 1 is too old" in refusal(tmp_path, Versioned(3, 2), ckp_name="net.pt")


def test_first_ten_misfits_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    """A wholly different network does not flood the terminal."""
    save(tmp_path, deep(8, width=3).state_dict())
    text = refusal(tmp_path, deep(8, width=2), ckp_name="net")
    assert "differing shapes (16)" in text
    assert "and 6 more" in text
    assert text.count("instead of") == 10


def test_missing_file_lists_those_that_exist(tmp_path: Path) -> None:
    """The message names the path, the files there are and the nearest one."""
    save(tmp_path, {}, "resnet.pt")
    text = refusal(tmp_path, nn.Linear(1, 1), ckp_name="resnt.pt")
    assert str(tmp_path / "module_ckps/resnt.pt") in text
    assert "there are resnet.pt. Did you mean 'resnet.pt'?" in text


def test_missing_folder_of_checkpoints_is_told(tmp_path: Path) -> None:
    """Without any files the message says so."""
    assert "there are no files" in refusal(tmp_path, nn.Linear(1, 1), ckp_name="net")


def test_file_that_holds_no_weights_is_told(tmp_path: Path) -> None:
    """A tensor alone is no set of weights."""
    save(tmp_path, torch.ones(3))
    assert "must hold a dict of tensors, but holds Tensor" in refusal(tmp_path, nn.Linear(1, 1), ckp_name="net")


@pytest.mark.parametrize("num_bytes", [100, -1])
def test_torn_file_is_told(tmp_path: Path, num_bytes: int) -> None:
    """A download that broke off is refused with its name."""
    save(tmp_path, nn.Linear(50, 50).state_dict())
    path = tmp_path / "module_ckps/net.pt"
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert f"{path} must" in refusal(tmp_path, nn.Linear(50, 50), ckp_name="net")


def test_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """A malicious file is told as such, and its code has not run."""

    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "canary"),)

    save(tmp_path, {"weight": Malicious()})
    assert "would run code" in refusal(tmp_path, nn.Linear(1, 1), ckp_name="net")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_one_module_of_several_is_picked_by_name(tmp_path: Path, suffix: str) -> None:
    """A file of several modules fills a module with the one that is named."""
    modules = {name: nn.Linear(3, 2).state_dict() for name in ("left", "right")}
    save(tmp_path, modules, "both.pt")
    flat = {f"{name}.{key}": value for name, weights in modules.items() for key, value in weights.items()}
    save_file(flat, tmp_path / "module_ckps/both.safetensors")
    module = load(tmp_path, nn.Linear(3, 2), ckp_name=f"both{suffix}", module_name="right")
    assert torch.equal(module.weight, modules["right"]["weight"])
    text = refusal(tmp_path, nn.Linear(3, 2), ckp_name=f"both{suffix}", module_name="rihgt")
    assert "has no module 'rihgt'; there are left, right. Did you mean 'right'?" in text


def test_file_of_several_modules_asks_which(tmp_path: Path) -> None:
    """Without a name, a file of two modules is ambiguous; one of a single module is not."""
    modules = {name: nn.Linear(3, 2).state_dict() for name in ("left", "right")}
    save(tmp_path, modules)
    assert "holds the modules left, right; choose one with module_name" in refusal(
        tmp_path, nn.Linear(3, 2), ckp_name="net"
    )
    save(tmp_path, {"left": modules["left"]})
    assert torch.equal(load(tmp_path, nn.Linear(3, 2), ckp_name="net").weight, modules["left"]["weight"])


def test_renaming_never_makes_one_key_of_two(tmp_path: Path) -> None:
    """Two keys that would become the same are told instead of one being lost."""
    save(tmp_path, {"weight": torch.ones(2, 3), "x.weight": torch.ones(2, 3), "bias": torch.ones(2)})
    assert "two of them become 'weight'" in refusal(tmp_path, nn.Linear(3, 2), ckp_name="net", strip_prefix="x.")


def test_all_modules_that_do_not_fit_are_told_at_once(tmp_path: Path) -> None:
    """One misfit does not hide the next."""
    source = {"load_weights_from_ckp": {"ckp_name": "none.pt"}}
    text = f"from torch import nn\nmodule = nn.Linear(8, 1)\nsettings = {source}\n"
    write_experiment(tmp_path, files={f"pymodules/modules/head_{name}.py": text for name in "ab"})
    with pytest.raises(InvalidExperiment) as raised:
        run_inside(tmp_path)
    assert [problem.where[-9:] for problem in raised.value.problems] == ["head_a.py", "head_b.py"]
    assert not (tmp_path / "experiment_results").exists()


@pytest.fixture
def trained(home: Path) -> Path:
    """A data home with an experiment that has run."""
    run_inside(home)
    return home


def test_pool_of_another_experiment_is_taken(trained: Path) -> None:
    """A second experiment starts with the best weights of the first."""
    source = {"exp_name": "tiny", "ckp_pool_name": "best", "module_name": "head_b"}
    text = f"from torch import nn\nmodule = nn.Linear(8, 1)\nsettings = {{'load_weights_from_exp': {source}}}\n"
    write_experiment(trained, "second", files={"pymodules/modules/head_a.py": text})
    run_inside(trained, "--stop-after-epoch", "0", name="second")
    results = trained / "experiment_results"
    first = torch.load(results / "tiny/data/module_ckps/best/head_b.pt", weights_only=True)
    second = torch.load(results / "second/data/module_ckps/init/head_a.pt", weights_only=True)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_missing_pool_lists_those_that_exist(trained: Path) -> None:
    """The message names the pools and modules that the other experiment has."""
    source = {"exp_name": "tiny", "ckp_pool_name": "bets", "module_name": "head_a"}
    text = refusal(trained, nn.Linear(8, 1), **source)
    assert "best, epoch_2, epoch_3, frzn, init, last" in text
    text = refusal(trained, nn.Linear(8, 1), **{**source, "ckp_pool_name": "best", "module_name": "heda"})
    assert "head_a, head_b, trunk" in text


def test_name_of_another_experiment_cannot_leave_the_data_home(tmp_path: Path) -> None:
    """The name of the source is as strict as any experiment's name."""
    source = {"exp_name": "../other", "ckp_pool_name": "best", "module_name": "net"}
    assert "experiment name must" in refusal(tmp_path, nn.Linear(1, 1), **source)
