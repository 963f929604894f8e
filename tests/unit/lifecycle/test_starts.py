"""Whether all starts together can give the bits of an uninterrupted run."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from pipeline.lifecycle.starts import Start, compare_starts, differences
from pipeline.progress import EVALUATION, TRAINING, Progress

FACTS = {
    "world_size": 1,
    "backend": "none",
    "devices": ["EPYC"],
    "cpus": ["EPYC"],
    "cpu_capabilities": ["AVX512"],
    "cpu_variables": "",
    "threads": 1,
    "deterministic": False,
    "torch": "2.13",
    "numpy": "2.4",
    "python": "3.11",
    "mkl": "2024.2",
    "onednn": "3.12",
    "blas": "openblas 0.3",
    "cuda": None,
    "cudnn": None,
}
CHANGES: dict[str, Any] = {
    "world_size": 2,
    "backend": "gloo",
    "devices": ["A100"],
    "cpu_capabilities": ["DEFAULT"],
    "cpu_variables": "MKL_CBWR=AVX2",
    "threads": 2,
    "deterministic": True,
    "torch": "2.14",
    "numpy": "2.5",
    "python": "3.12",
    "mkl": None,
    "onednn": "3.13",
    "blas": "openblas 0.4",
    "cuda": "12.8",
    "cudnn": "91002",
}
FIRST = Progress()
SECOND = Progress(TRAINING, 2)
THIRD = Progress(TRAINING, 3)


def start(place: Progress, **facts: Any) -> Start:
    record: Any = {"from": place.as_json(), **FACTS, **facts}
    return record


def doubt(*starts: Start, is_exact: bool = False) -> str:
    return compare_starts(list(starts), is_exact=is_exact).doubt


def test_same_conditions_leave_no_doubt() -> None:
    """However often a run is resumed."""
    conditions = compare_starts([start(FIRST), start(SECOND), start(THIRD)], is_exact=False)
    assert (conditions.changed, conditions.harmless, conditions.doubt) == ((), (), "")


@pytest.mark.parametrize("name", CHANGES)
def test_everything_that_bits_depend_on_voids_the_claim(name: str) -> None:
    """The doubt names what changed and the first step that may differ."""
    conditions = compare_starts([start(FIRST), start(SECOND, **{name: CHANGES[name]})], is_exact=False)
    (change,) = conditions.changed
    assert change.startswith(f"{name} ")
    assert conditions.doubt == (f"not bit-exact: {change} (first start → now); bits may differ from epoch 2, step 1 on")


def test_values_are_shown_as_people_write_them() -> None:
    """Flags are true or false, what is missing is none."""
    found = differences(FACTS, {**FACTS, "mkl": None, "deterministic": True, "cpu_variables": "MKL_CBWR=AVX2"})
    assert list(found.values()) == [
        "cpu_variables none → MKL_CBWR=AVX2",
        "deterministic false → true",
        "mkl 2024.2 → none",
    ]


def test_exact_run_may_change_its_processes() -> None:
    """The claim stays, and the change is harmless; threads are not."""
    two = {"world_size": 2, "backend": "gloo"}
    two_ranks = {name: FACTS[name] * 2 for name in ("devices", "cpus", "cpu_capabilities")}
    conditions = compare_starts([start(FIRST), start(SECOND, **two, **two_ranks)], is_exact=True)
    assert (conditions.changed, conditions.doubt) == ((), "")
    assert conditions.harmless == ("world_size 1 → 2", "backend none → gloo")
    assert "threads 1 → 2" in doubt(start(FIRST), start(SECOND, **two, threads=2), is_exact=True)


def test_start_that_deviated_is_remembered() -> None:
    """What it trained stays in the results, even if everything is back as it was."""
    conditions = compare_starts([start(FIRST), start(SECOND, threads=2), start(THIRD)], is_exact=False)
    assert conditions.changed == ("threads 2 → 1",)
    assert conditions.doubt == (
        "not bit-exact: threads 1 → 2 (first start → start 2); bits may differ from epoch 2, step 1 on"
    )


@pytest.mark.parametrize("place", [SECOND, Progress(EVALUATION, 1), Progress(TRAINING, 1, 4)])
def test_start_that_left_nothing_is_forgotten(place: Progress) -> None:
    """It was killed before a commit, or its commits were damaged and an older one went on."""
    conditions = compare_starts([start(FIRST), start(SECOND, threads=2), start(place)], is_exact=False)
    assert (conditions.changed, conditions.doubt) == (("threads 2 → 1",), "")


def test_first_start_that_left_nothing_is_not_the_one_to_compare_with() -> None:
    """A run that was killed before its first commit begins again, whatever it begins on."""
    assert doubt(start(FIRST, threads=2), start(FIRST), start(SECOND)) == ""
    assert "threads 1 → 2" in doubt(start(FIRST, threads=2), start(FIRST), start(SECOND, threads=2))


def test_evaluation_can_be_the_first_to_differ() -> None:
    """A run that is resumed between training and evaluation computes the evaluation first."""
    assert "from epoch 1, evaluation on" in doubt(start(FIRST), start(Progress(EVALUATION, 1), threads=2))


def test_facts_that_were_not_recorded_are_not_compared() -> None:
    """Starts of an older version have fewer; the first that has one is compared with."""
    names = ("world_size", "backend", "torch", "numpy", "python", "threads")
    old: Any = {"from": FIRST.as_json(), "devices": [platform.machine()], **{name: FACTS[name] for name in names}}
    conditions = compare_starts([old, start(SECOND)], is_exact=False)
    assert (conditions.changed, conditions.doubt) == ((), "")
    assert "cpu_capabilities AVX512 → AVX2 (first start → now)" in doubt(
        old, start(SECOND), start(THIRD, cpu_capabilities=["AVX2"])
    )


def test_cpu_is_named_once() -> None:
    """On CPUs the device is the CPU; beside a GPU it has a name of its own."""
    moved = {"devices": ["Xeon"], "cpus": ["Xeon"]}
    assert list(differences(FACTS, {**FACTS, **moved}).values()) == ["devices EPYC → Xeon"]
    gpu = {**FACTS, "devices": ["A100"]}
    assert list(differences(gpu, {**gpu, "cpus": ["Xeon"]}).values()) == ["cpus EPYC → Xeon"]


def test_unequal_ranks_void_the_claim() -> None:
    """Each rank computes its own update, and a resume continues with that of one."""
    odd = {"world_size": 2, "devices": ["A100", "H100"]}
    assert doubt(start(FIRST, **odd)) == (
        "not bit-exact: devices A100 on rank 0 and H100 on rank 1 (now); bits may differ from the first step on"
    )
    assert differences({"devices": ["A100", "H100"]}, {"devices": ["H100", "A100"]})


def test_starts_that_are_missing_leave_a_doubt() -> None:
    """Nothing is claimed of what is not recorded."""
    assert doubt(start(SECOND)) == "not known to be bit-exact: no start before epoch 2, step 1 is recorded"
    torn: Start = {"unreadable": "{torn"}
    assert doubt(start(FIRST), torn, start(SECOND)) == "not known to be bit-exact: line 2 of starts.jsonl is damaged"
    assert compare_starts([start(FIRST), torn, start(SECOND, threads=2)], is_exact=False).changed == ("threads 1 → 2",)
