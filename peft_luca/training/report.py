"""What a person looks at after a run: its classes one by one, its pictures, and a page with all of it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment

from .. import visualization
from ..hub.model_card import FIGURES
from ..preprocessing import read_image
from ..tuner.layer import image_options
from .evaluation import TaskFeatures, predict
from .metrics import or_none, share
from .publishing import PublishingTrainer
from .run_folder import PLOTS_NAME, REPORT_NAME, RunFolder


TEMPLATE = Path(__file__).with_name("report_template.html")
PAIRS, EXAMPLES, THUMBNAIL = 20, 3, 72  # pairs of confused classes on the page, images of each, pixels of an image


class ReportingTrainer(PublishingTrainer):
    """A trainer of a stream that shows its run. With several processes all must call; the first one writes."""

    folder: RunFolder
    task_features: TaskFeatures
    results: Callable[[], dict[str, Any]]

    def class_report(self) -> dict[str, Any]:
        """
        How the model does on each class, with the router that is set now. Returns `classes`: `precision`, `recall` and
        test `images` of each `class`; and `confused`, most images first: the `images` of a `class` for which another
        was `predicted`, their `share` of the class's, and up to three `examples`, each a task and the image's row.
        """
        names, own, tests = self.tuner.classes, self.tuner.layer.label_space.own, self._tests()[0]
        places = [(task, row) for task, data in tests.items() for row in range(len(data))]
        parts = [torch.stack([own[task].cpu()[data.labels], predict(self, data)]) for task, data in tests.items()]
        labels, predicted = torch.cat([torch.zeros(2, 0, dtype=torch.long), *parts], dim=1).numpy()
        ids = (labels[labels == predicted], predicted, labels)
        right, answers, images = (np.bincount(column, minlength=len(names)) for column in ids)
        shares = (map(or_none, share(right, whole)) for whole in (answers, images))
        columns = dict(zip(("class", "precision", "recall", "images"), (names, *shares, images.tolist()), strict=True))
        pairs: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for row in np.flatnonzero(labels != predicted):
            pairs.setdefault((labels[row], predicted[row]), []).append(places[row])
        confused = sorted(pairs.items(), key=lambda pair: -len(pair[1]))
        return {
            "classes": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
            "confused": [
                {"class": names[label], "predicted": names[other], "images": len(found)}
                | {"share": len(found) / int(images[label]), "examples": found[:EXAMPLES]}
                for (label, other), found in confused
            ],
        }

    def save_plots(self) -> list[Path]:
        """
        Draws the pictures of [`~peft_luca.visualization`] into `plots` in the output folder, and into TensorBoard if
        the run logs to it. Returns the files.
        """
        (tests, _), classes, files = self._tests(), self.class_report(), []
        if self.is_world_process_zero():
            for name, figure in visualization.of_a_run(self.results(), self.model, tests, classes):
                files.append(self.folder.save_file(f"{PLOTS_NAME}/{name}.png", visualization.png(figure)))
                for callback in self.callback_handler.callbacks:
                    if getattr(callback, "tb_writer", None) is not None:
                        callback.tb_writer.add_figure(f"plots/{name}", figure, self.state.global_step)
        return files

    def report(self) -> Path:
        """
        Writes `report.html` into the output folder, one file that needs no network: figures, tasks, classes, the
        pictures, and images of the classes that are confused most. Returns its path.
        """
        (tests, images), report, results = self._tests(), self.class_report(), self.results()
        if self.is_world_process_zero():
            figures = visualization.of_a_run(results, self.model, tests, report)
            pictures, options = [_embed(visualization.png(figure)) for _, figure in figures], image_options(self.model)
            for pair in report["confused"][:PAIRS]:
                pair["pictures"] = [_thumbnail(images[task][row], options) for task, row in pair["examples"]]
            template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
            facts = {"name": self.folder.path.name, "labels": FIGURES, "pairs": PAIRS}
            page = template.render(results=results, report=report, pictures=pictures, **facts)
            self.folder.save_file(REPORT_NAME, page.encode())
        return self.folder.path / REPORT_NAME

    def _tests(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Task → [CLS] of its test images, and the images."""
        features, stream = self.task_features, self.task_features.stream
        tests = features.tests(self.tuner.experts)
        return tests, {t.name: features.images(t, "test")[stream.image_column] for t in stream if t.name in tests}


def _thumbnail(image: Any, options: Mapping[str, Any]) -> str:
    content, picture = BytesIO(), read_image(image, **options)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.convert("RGB").save(content, "PNG")
    return _embed(content.getvalue())


def _embed(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"
