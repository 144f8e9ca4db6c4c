"""What a person looks at after a run: its classes one by one, the pictures, and one page with all of it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment

from .. import visualization
from .._version import __version__
from ..data.feature_cache import FeatureDataset
from ..hub.model_card import FIGURES
from ..preprocessing import read_image
from ..tuner.layer import image_options
from .evaluation import predict
from .metrics import or_none, share
from .run_folder import PLOTS_NAME, REPORT_NAME


TEMPLATE = Path(__file__).with_name("report_template.html")
PAIRS, EXAMPLES, THUMBNAIL = 20, 3, 72  # pairs of confused classes on the page, images of each, pixels of an image


def class_report(trainer: Any, tests: Mapping[str, FeatureDataset]) -> dict[str, Any]:
    """See [`ContinualTrainer.class_report`]."""
    names, own = trainer.tuner.classes, trainer.tuner.layer.label_space.own
    places = [(task, row) for task, data in tests.items() for row in range(len(data))]
    none = torch.zeros(0, dtype=torch.long)
    labels = torch.cat([none, *(own[task].cpu()[data.labels] for task, data in tests.items())]).numpy()
    predicted = torch.cat([none, *(predict(trainer, data) for data in tests.values())]).numpy()
    images, answers, right = (
        np.bincount(ids, minlength=len(names)) for ids in (labels, predicted, labels[labels == predicted])
    )
    columns = zip(names, share(right, answers), share(right, images), images, strict=True)
    pairs: dict[tuple[int, int], list[int]] = {}
    for row in np.flatnonzero(labels != predicted).tolist():
        pairs.setdefault((int(labels[row]), int(predicted[row])), []).append(row)
    return {
        "classes": [
            {"class": name, "precision": or_none(precision), "recall": or_none(recall), "images": int(count)}
            for name, precision, recall, count in columns
        ],
        "confused": [
            {
                "class": names[label],
                "predicted": names[other],
                "images": len(rows),
                "share": len(rows) / int(images[label]),
                "examples": [places[row] for row in rows[:EXAMPLES]],
            }
            for (label, other), rows in sorted(pairs.items(), key=lambda pair: (-len(pair[1]), pair[0]))
        ],
    }


def save_plots(trainer: Any) -> list[Path]:
    """See [`ContinualTrainer.save_plots`]."""
    tests, files = trainer.task_features.tests(trainer.tuner.experts), []
    images, classes = _test_images(trainer, tests), class_report(trainer, tests)
    if trainer.is_world_process_zero():
        for name, figure in visualization.of_a_run(trainer.results(), trainer.model, tests, images, classes):
            files.append(trainer.folder.save_file(f"{PLOTS_NAME}/{name}.png", visualization.png(figure)))
            for callback in trainer.callback_handler.callbacks:
                if getattr(callback, "tb_writer", None) is not None:
                    callback.tb_writer.add_figure(f"plots/{name}", figure, trainer.state.global_step)
    return files


def write_report(trainer: Any) -> Path:
    """See [`ContinualTrainer.report`]."""
    tests = trainer.task_features.tests(trainer.tuner.experts)
    images, classes = _test_images(trainer, tests), class_report(trainer, tests)
    path: Path = trainer.folder.path / REPORT_NAME
    if trainer.is_world_process_zero():
        results, options = trainer.results(), image_options(trainer.model)
        pictures = (
            [
                visualization.accuracy_matrix(results),
                visualization.accuracy_over_stream(results),
                visualization.class_confusion(classes),
            ]
            if tests
            else []
        )
        confused = [
            pair | {"pictures": [_thumbnail(images[task][row], options) for task, row in pair["examples"]]}
            for pair in classes["confused"][:PAIRS]
        ]
        template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
            TEMPLATE.read_text(encoding="utf-8")
        )
        page = template.render(
            name=path.parent.name,
            version=__version__,
            router=trainer.tuner.router.name,
            results=results,
            labels=FIGURES | {"entropy_accuracy": "Accuracy after the last task, by the router entropy"},
            pictures=[_embed(visualization.png(picture)) for picture in pictures],
            classes=classes["classes"],
            confused=confused,
        )
        trainer.folder.save_file(REPORT_NAME, page.encode())
    return path


def _test_images(trainer: Any, tests: Mapping[str, Any]) -> dict[str, Any]:
    features, column = trainer.task_features, trainer.stream.image_column
    return {task.name: features.images(task, "test")[column] for task in trainer.stream if task.name in tests}


def _thumbnail(image: Any, options: Mapping[str, Any]) -> str:
    content, picture = BytesIO(), read_image(image, **options)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.convert("RGB").save(content, "PNG")
    return _embed(content.getvalue())


def _embed(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"
