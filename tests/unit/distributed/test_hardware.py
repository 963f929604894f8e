"""What ranks compute with is described and compared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.distributed import hardware
from pipeline.distributed.hardware import Hardware, compare_hardware, describe_hardware
from pipeline.distributed.processes import Processes
from pipeline.errors import InvalidExperiment

CPU = torch.device("cpu")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Hardware]:
    """Three ranks that are what a test makes of them."""
    known = [describe_hardware(CPU)] * 3
    monkeypatch.setattr(Processes, "gather", lambda self, value: known)
    return known


def test_libraries_are_read_from_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of MKL and oneDNN come from torch's own description; without them they are unknown."""
    text = (
        "PyTorch built with:\n"
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) 64 architecture\n"
        "  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71)\n"
    )
    monkeypatch.setattr(torch.__config__, "show", lambda: text)
    described = describe_hardware(CPU)
    assert (described.mkl, described.onednn) == ("2024.2-Product Build 20240605", "3.12.0")
    monkeypatch.setattr(torch.__config__, "show", lambda: "PyTorch built with:\n  - GCC 13.3\n")
    described = describe_hardware(CPU)
    assert (described.mkl, described.onednn, described.cuda, described.cudnn) == (None, None, None, None)


def test_numpy_that_does_not_say_its_blas_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name and version are known where numpy reports them."""
    assert describe_hardware(CPU).blas
    monkeypatch.setattr(hardware.numpy, "show_config", lambda mode: {"Build Dependencies": {}})
    assert describe_hardware(CPU).blas is None


def test_variables_that_pin_vector_units_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is set is named with its value, in a fixed order."""
    for name in hardware._CPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert describe_hardware(CPU).cpu_variables == ""
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert describe_hardware(CPU).cpu_variables == "MKL_CBWR=AVX2 OPENBLAS_CORETYPE=Haswell"


def test_gpu_is_described_with_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, CUDA and cuDNN are those of the GPU; the CPU of its machine is described as well."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    described = describe_hardware(torch.device("cuda", 0))
    assert (described.device, described.cuda, described.cudnn) == ("A100", "12.8", "91002")
    assert described.cpu == describe_hardware(CPU).cpu


def test_equal_ranks_are_fine(ranks: list[Hardware]) -> None:
    """Nothing is said of them."""
    assert compare_hardware(Processes(), is_exact=True) == ""
    assert compare_hardware(Processes(), is_exact=False) == ""


def test_unequal_ranks_are_refused_with_exact(ranks: list[Hardware]) -> None:
    """Each difference is a problem with both values, their ranks and the remedy; every rank has the same refusal."""
    ranks[1] = replace(ranks[1], device="Old", cpu="Old", threads=64)
    with pytest.raises(InvalidExperiment) as refusal:
        compare_hardware(Processes(), is_exact=True)
    assert refusal.value.is_shared
    model, threads = refusal.value.problems
    assert (
        f"exact needs the same device on every rank, but it is {ranks[0].cpu} on ranks 0, 2 and Old on rank 1"
        in str(model)
    )
    assert "use machines of one kind" in model.fix
    assert f"but it is {ranks[0].threads} on ranks 0, 2 and 64 on rank 1" in threads.what
    assert "set threads in training.json" in threads.fix


def test_unequal_cpus_with_equal_gpus_are_refused_with_exact(ranks: list[Hardware]) -> None:
    """Data transforms run on the CPU."""
    ranks[:] = [replace(rank, device="A100", cpu=f"CPU {number}") for number, rank in enumerate(ranks)]
    with pytest.raises(
        InvalidExperiment, match="same cpu on every rank, but it is CPU 0 on rank 0 and CPU 1 on rank 1"
    ):
        compare_hardware(Processes(), is_exact=True)


def test_unequal_ranks_are_one_warning_with_fast(ranks: list[Hardware]) -> None:
    """One line names all that is unequal."""
    ranks[2] = replace(ranks[2], cpu_capability="DEFAULT", mkl=None)
    warning = compare_hardware(Processes(), is_exact=False)
    assert f"cpu_capability is {ranks[0].cpu_capability} on ranks 0, 1 and DEFAULT on rank 2" in warning
    assert f"mkl is {ranks[0].mkl} on ranks 0, 1 and none on rank 2" in warning
    assert "\n" not in warning
