"""What bits depend on besides code and data: devices, vector units, threads and libraries; compared between ranks."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass

import numpy
import torch

from pipeline.distributed.processes import Processes
from pipeline.errors import InvalidExperiment, Problem
from pipeline.system.accelerators import cpu_model, device_name
from pipeline.system.formatting import shown_by_rank

# Environment variables that fix the vector instructions of oneDNN, MKL, numpy and OpenBLAS. ATEN_CPU_CAPABILITY is not
# among them because torch reports its effect (``cpu_capability``).
_CPU_VARIABLES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES",
    "OPENBLAS_CORETYPE",
)
_ONE_KIND = "use machines of one kind, with the same ATEN_CPU_CAPABILITY or none"
_REMEDIES = {
    "device": _ONE_KIND,
    "cpu": _ONE_KIND,
    "cpu_capability": _ONE_KIND,
    "cpu_variables": "set the same variables on every machine",
    "threads": "set threads in training.json, or the same OMP_NUM_THREADS on every machine",
}
_SAME_VERSIONS = "install the same versions on every machine"


@dataclass(frozen=True)
class Hardware:
    """What one rank computes with; None for what cannot be read or is not used."""

    device: str
    cpu: str
    cpu_capability: str
    cpu_variables: str
    threads: int
    torch: str
    numpy: str
    mkl: str | None
    onednn: str | None
    blas: str | None
    cuda: str | None
    cudnn: str | None


def describe_hardware(device: torch.device) -> Hardware:
    """Return what this rank computes with at this moment."""
    # torch has no other interface to the versions of MKL and oneDNN than this text.
    config = torch.__config__.show()
    is_cuda = device.type == "cuda"
    return Hardware(
        device=device_name(device),
        cpu=cpu_model(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        cpu_variables=" ".join(f"{name}={os.environ[name]}" for name in _CPU_VARIABLES if name in os.environ),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        numpy=numpy.__version__,
        mkl=_find(r"Math Kernel Library Version (.+?)(?: for |$)", config),
        onednn=_find(r"(?:MKL-DNN|oneDNN) v(\S+)", config),
        blas=_describe_numpy_blas(),
        cuda=(torch.version.cuda or torch.version.hip) if is_cuda else None,
        cudnn=str(torch.backends.cudnn.version()) if is_cuda else None,
    )


def _find(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1) if match else None


def _describe_numpy_blas() -> str | None:
    """Return name and version of the BLAS that numpy was built with, if numpy reports them."""
    try:
        blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"
    except (KeyError, TypeError):
        return None


def compare_hardware(processes: Processes, *, is_exact: bool) -> str:
    """Raise if ranks compute with unequal hardware or libraries and the run is exact; else return a warning or ""."""
    ranks = [asdict(hardware) for hardware in processes.gather(describe_hardware(processes.device))]
    values = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    if values["cpu"] == values["device"]:
        # Without accelerators both are the model of the CPU, which should be reported once.
        del values["cpu"]
    unequal = {name: shown_by_rank(values[name]) for name in values if len(set(values[name])) > 1}
    if unequal and is_exact:
        # Shared: every rank has gathered the same values, so rank 0 alone reports the problems.
        raise InvalidExperiment(
            [
                Problem(
                    "settings/training.json (gradient_reduction)",
                    f"exact needs the same {name} on every rank, but it is {shown}",
                    f"{_REMEDIES.get(name, _SAME_VERSIONS)}; or start an experiment with gradient_reduction: fast",
                )
                for name, shown in unequal.items()
            ]
        ).shared()
    if not unequal:
        return ""
    listed = "; ".join(f"{name} is {shown}" for name, shown in unequal.items())
    return f"Ranks are unequal: {listed}. Each rank computes its own update, so weights may drift apart by rounding."
