"""What the readers of TensorBoard, W&B and MLflow themselves find below the logs of an experiment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data
from wandb.proto.wandb_internal_pb2 import Record

from pipeline.system.formatting import flat
from tests.support.wandb_files import records

Series = dict[str, list[tuple[int, float]]]
Images = dict[tuple[str, int], bytes]


def _events(logs: Path) -> Any:
    events = EventAccumulator(str(logs / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    return events


def tensorboard_series(logs: Path) -> Series:
    events = _events(logs)
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensorboard_images(logs: Path) -> Images:
    events = _events(logs)
    found = [(tag, one) for tag in events.Tags()["images"] for one in events.Images(tag)]
    images = {(tag, one.step): one.encoded_image_string for tag, one in found}
    assert len(images) == len(found), "an image is there twice"
    return images


def _rows(logs: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Return the rows of the one folder that a run leaves, as W&B's own messages tell them, and the folder."""
    (file,) = (logs / "wandb").glob("offline-run-*/run-*.wandb")
    found = [Record.FromString(content).history.item for content in records(file.read_bytes())]
    rows = [{_tag(item): json.loads(item.value_json) for item in row} for row in found if row]
    assert [row["_step"] for row in rows] == list(range(len(rows))), "W&B would drop a row"
    return file.parent, rows


def _tag(item: Any) -> str:
    return "//".join(filter(None, [item.key, *item.nested_key]))


def wandb_series(logs: Path) -> Series:
    series: Series = {}
    for row in _rows(logs)[1]:
        for tag, value in row.items():
            if tag != "step" and not tag.startswith(("_", "images/")):
                series.setdefault(tag, []).append((row["step"], value))
    return series


def wandb_images(logs: Path) -> Images:
    """Return every image from the file that its row names."""
    folder, rows = _rows(logs)
    tagged = [(row, tag) for row in rows for tag in row if tag.endswith("//path")]
    images = {
        (tag.removesuffix("//path"), row["step"]): (folder / "files" / row[tag]).read_bytes() for row, tag in tagged
    }
    assert len(images) == len(tagged), "an image is there twice"
    return images


def prepare_database(logs: Path, template: Path) -> None:
    """Copy an empty MLflow database, which takes MLflow seconds to make."""
    (logs / "mlflow").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(template, logs / "mlflow/mlflow.db")


def _mlflow_run(logs: Path) -> tuple[Any, Any]:
    client: Any = MlflowClient(f"sqlite:///{logs / 'mlflow/mlflow.db'}")
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return client, run


def mlflow_series(logs: Path) -> Series:
    client, run = _mlflow_run(logs)
    histories = {tag: client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
    return {tag: sorted((one.step, one.value) for one in history) for tag, history in histories.items()}


def mlflow_images(logs: Path) -> Images:
    folder = next((logs / "mlflow/artifacts").glob("*/artifacts"))
    files = [(file.relative_to(folder), file) for file in folder.rglob("*.png")]
    return {(str(path.parent), int(path.stem.removeprefix("step_"))): file.read_bytes() for path, file in files}


def tensorboard_parameters(logs: Path) -> dict[str, object]:
    """Return the row of the tab HPARAMS."""
    content = _events(logs).PluginTagToContent("hparams")["_hparams_/session_start_info"]
    values = parse_session_start_info_plugin_data(content).hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def wandb_parameters(logs: Path) -> dict[str, object]:
    """Return the parameters in the config of the run."""
    (file,) = (logs / "wandb").glob("offline-run-*/run-*.wandb")
    runs = [Record.FromString(content).run for content in records(file.read_bytes())]
    config = {item.key: json.loads(item.value_json) for run in runs for item in run.config.update}
    return dict(flat(config["parameters"]))


def mlflow_parameters(logs: Path) -> dict[str, object]:
    """Return the parameters of the run, which MLflow keeps as text."""
    prefix = "parameters."
    found = _mlflow_run(logs)[1].data.params.items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}
