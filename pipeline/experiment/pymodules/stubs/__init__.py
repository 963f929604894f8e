"""The four files that every experiment has, with what belongs into them, and parameters: written by ``new --empty``.

DATASET and MODULE stand for names of the author's. What an author may leave out has no file here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.experiment.pymodules.source_files import COMPONENT_NAME

_FOLDER = Path(__file__).parent


def stub_files(datasets: Sequence[str], modules: Sequence[str]) -> dict[str, str]:
    """Return the text of every file to write, by path below the experiment's folder."""
    for name in (*datasets, *modules):
        if not COMPONENT_NAME.fullmatch(name):
            raise UsageError(f"A name of a dataset or module must be letters, digits, _ and -, but is {name!r}.")
    texts = {path.stem: path.read_text() for path in _FOLDER.glob("*.py")}
    files = {}
    for family in ("datasets", "module_transforms"):
        for dataset in datasets:
            files[f"pymodules/{family}/{dataset}.py"] = (
                texts[family].replace("DATASET", dataset).replace("MODULE", modules[0])
            )
    for module in modules:
        files[f"pymodules/modules/{module}.py"] = texts["modules"].replace("MODULE", module)
    listed = ", ".join(f'"{module}"' for module in modules)
    files["pymodules/optim_sched/main.py"] = texts["optim_sched"].replace('"MODULE"', listed)
    # What is tuned: --set parameters.lr=1e-2 changes it.
    files["settings/parameters.json"] = '{\n  "lr": 1e-3\n}\n'
    return files
