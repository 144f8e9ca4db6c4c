"""`RunFolder`: the output folder of a run, its lock, what is true in it, and every change of it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from enum import Enum
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from filelock import FileLock
from peft import PeftModel
from transformers.trainer_utils import has_length

from ..data.task_stream import TaskStream
from ..hub.publishing import RESULTS_NAME
from ..hub.saving import save_experts
from ..hub.validation import MANIFEST_NAME
from ..tuner.config import LucaConfig
from ..utils import LOCK_NAME, atomic_write, explain_write_errors, hold_lock, pluralize, write_json
from .arguments import CONFIG_RECIPES, RECIPES, ContinualTrainingArguments
from .metrics import Record


RESULTS_FORMAT = 1
JOURNAL_NAME = ".journal.json"
PLOTS_NAME = "plots"
# What decides how a run's experts turn out. A run is resumed only with the same values.
SETTINGS = (
    "recipe learning_rate num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps optim "
    "optim_args lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay max_grad_norm label_smoothing_factor "
    "l1_weight l1_proximal negatives augmentation augmented_views schedule_per_epoch class_mean_rows router "
    "routing_scope statistics statistics_rank statistics_random_features seed data_seed features_dtype on_bad_image "
    "bf16 fp16 adam_beta1 adam_beta2 adam_epsilon dataloader_drop_last train_sampling_strategy"
).split()
# Settings that may differ when a run is resumed: what was measured is measured again.
FREE_SETTINGS = ("router",)
# Fields of LucaConfig that say nothing about how an expert is trained.
NO_SETTINGS = "classes target_modules fingerprint backbone_settings processor allow_mismatch read_with".split()
RECORD_KEYS = {"name", "classes", "train_images", "test_images", "steps", "accuracy", "routing", "task_known"}


class RunFolder:
    """
    The output folder of a run, and its only writer. `results.json` decides what is true: a task that is in it has been
    learned, and its expert is whole. A change that takes several writes is written down in a journal first, and
    finished or undone by [`~RunFolder.recover`] if it was cut off.

    Args:
        path (`str` or `Path`): The folder. It need not exist.
        is_writer (`bool`, *optional*, defaults to `True`): Whether this process writes.
    """

    def __init__(self, path: str | Path, is_writer: bool = True) -> None:
        self.path = Path(path)
        self.is_writer = is_writer
        self._lock = FileLock(self.path / LOCK_NAME)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for one run. All processes call it, and those that write hold the lock."""
        with ExitStack() as stack:
            refusal = None
            if self.is_writer:
                try:
                    stack.enter_context(hold_lock(self._lock))
                except (RuntimeError, OSError) as error:
                    refusal = error
            refusals = [error for error in gather_object([refusal]) if error is not None]
            if refusals:
                raise refusals[0]
            yield

    # ---- reading -------------------------------------------------------------------------------------------------

    def recover(self, names: Iterable[str]) -> None:
        """
        Finishes a change that was cut off, removes half-written files, and checks that the folder can be written to.

        Args:
            names (`list[str]`): The tasks of the run.
        """
        if self.is_writer:
            with explain_write_errors(self.path / RESULTS_NAME):
                self.path.mkdir(parents=True, exist_ok=True)
                files = "|".join(map(re.escape, (RESULTS_NAME, MANIFEST_NAME, JOURNAL_NAME, *names)))
                for path in self.path.iterdir():
                    if re.fullmatch(rf"\.({files})\.(\w{{8}}|writing)", path.name):
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                tempfile.TemporaryFile(dir=self.path).close()
                if (self.path / JOURNAL_NAME).is_file():
                    self._finish(json.loads((self.path / JOURNAL_NAME).read_text(encoding="utf-8")))
        PartialState().wait_for_everyone()

    def read(self, settings: dict[str, Any], stream: TaskStream, refuse: bool = False) -> list[Record]:
        """
        The records of the run in the folder; none where there is no run.

        Args:
            settings (`dict`): [`run_settings`] of the run that wants to resume it.
            stream ([`TaskStream`]): Its stream.
            refuse (`bool`, *optional*, defaults to `False`): Refuse to resume any run.

        Raises:
            ValueError: the folder holds a run of another stream or of other settings.
        """
        path = self.path / RESULTS_NAME
        if not path.is_file():
            return []
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            records, saved = results["tasks"], results["settings"]
            if results["format"] > RESULTS_FORMAT:
                raise ValueError(f"it has the format {results['format']} of a later version of peft_luca")
            missing = sorted(key for record in records for key in RECORD_KEYS - set(record))
            if missing:
                raise ValueError(f"a task has no {missing[0]!r}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} does not hold the results of a run: {error!r}. Choose another output_dir."
            ) from error
        if refuse:
            raise ValueError(
                f"{self.path} holds a run of {pluralize(len(records), 'task')}. Choose another output_dir, delete it, "
                "or call train() without resume_from_checkpoint=False to resume it."
            )
        changes = ", ".join(
            f"{name}: {there!r} there, {here!r} now" for name, there, here in changed_settings(saved, settings)
        )
        if changes:
            raise ValueError(f"{self.path} holds a run with other settings ({changes}). Choose another output_dir.")
        self._check_stream(records, stream)
        return list(records)

    def _check_stream(self, records: list[Record], stream: TaskStream) -> None:
        tasks = {task.name: task for task in stream}
        for record in records:
            if record.get("deleted"):  # its images may be gone as well
                continue
            task = tasks.get(record["name"])
            if task is None:
                raise ValueError(
                    f"{self.path} holds a run of another stream: its task {record['name']!r} is not among "
                    f"{', '.join(map(repr, tasks))}. Choose another output_dir."
                )
            images = [len(task.train) if has_length(task.train) else None, 0 if task.test is None else len(task.test)]
            now = [task.name, list(task.classes), *images]
            then = [record[key] for key in ("name", "classes", "train_images", "test_images")]
            if now != then:
                raise ValueError(
                    f"{self.path} holds a run of another stream: its task {then[0]!r} has {then[2]} train images of "
                    f"{then[1]}, here {now[0]!r} has {now[2]} of {now[1]}. Choose another output_dir."
                )

    # ---- changes -------------------------------------------------------------------------------------------------

    def add_expert(self, model: PeftModel, name: str, results: dict[str, Any]) -> None:
        """Saves a learned expert, and results in which its task is learned."""
        if self.is_writer:
            with explain_write_errors(self.path / name):
                self._begin({"change": "add", "expert": name})
                save_experts(model, self.path, [name])
            with explain_write_errors(self.path / RESULTS_NAME):
                write_json(self.path / RESULTS_NAME, results)
                (self.path / JOURNAL_NAME).unlink()

    def delete_expert(self, name: str, results: dict[str, Any]) -> None:
        """Deletes an expert, and writes results in which it is deleted."""
        if self.is_writer:
            with explain_write_errors(self.path):
                change = {"change": "delete", "expert": name, "results": results}
                self._begin(change)
                self._finish(change)

    def save(self, model: PeftModel, processing_class: Any, results: dict[str, Any] | None) -> None:
        """Saves all experts as a collection, with the image processor and the results."""
        if self.is_writer:
            save_experts(model, self.path)
            processing_class.save_pretrained(self.path)
            if results is not None:
                write_json(self.path / RESULTS_NAME, results)

    def save_figure(self, name: str, figure: Any) -> Path:
        """Saves a matplotlib figure among the plots."""
        path = self.path / PLOTS_NAME / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            figure.savefig(temporary, dpi=120, format="png")
        return path

    def _begin(self, change: dict[str, Any]) -> None:
        write_json(self.path / JOURNAL_NAME, change)

    def _finish(self, change: dict[str, Any]) -> None:
        """Does what is left of a change in the journal. An expert whose task is not in the results is half-saved."""
        name, results = change["expert"], self.path / RESULTS_NAME
        if change["change"] == "delete":
            write_json(results, change["results"])
        records = json.loads(results.read_text(encoding="utf-8"))["tasks"] if results.is_file() else []
        if not any(record["name"] == name and not record.get("deleted") for record in records):
            manifest = self.path / MANIFEST_NAME
            if manifest.is_file():
                content = json.loads(manifest.read_text(encoding="utf-8"))
                content["experts"] = [expert for expert in content["experts"] if expert["name"] != name]
                write_json(manifest, content) if content["experts"] else manifest.unlink()
            if (self.path / name).is_dir():
                shutil.rmtree(self.path / name)
        (self.path / JOURNAL_NAME).unlink()


def run_settings(args: ContinualTrainingArguments, luca_config: LucaConfig) -> dict[str, Any]:
    """The settings of a run, as `results.json` holds them."""
    config = {
        name: value
        for name, value in asdict(luca_config).items()
        if name in LucaConfig.__annotations__ and name not in NO_SETTINGS
    }
    values = {name: getattr(args, name) for name in SETTINGS}
    return json.loads(json.dumps({**values, "luca_config": config}))


def changed_settings(saved: dict[str, Any], settings: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """
    Name, saved value and present value of each setting that differs. A setting that the saving version did not have
    counts as its default, and one that this version does not have is not compared.
    """
    recipe = saved.get("recipe", "own")
    args = (saved, settings, RECIPES.get(recipe, {}), ContinualTrainingArguments)
    config = (saved.get("luca_config") or {}, settings["luca_config"], CONFIG_RECIPES.get(recipe, {}), LucaConfig)
    for prefix, (there, here, of_recipe, kind) in (("", args), ("luca_config.", config)):
        defaults = {entry.name: entry.default for entry in fields(kind)} | of_recipe
        for name, now in here.items():
            if name in FREE_SETTINGS or name == "luca_config":
                continue
            then = there.get(name, defaults.get(name))
            then = then.value if isinstance(then, Enum) else then
            if _plain(then) != _plain(now):
                yield prefix + name, then, now


def _plain(value: Any) -> Any:
    """Empty options are no options: versions of transformers write `{}` or `None`."""
    return None if value in ({}, "") else value
