"""`RunFolder`: the output folder of a run, its lock, what is true in it, and every change of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from filelock import FileLock
from peft import PeftModel
from peft.utils import CONFIG_NAME
from transformers.trainer import TRAINER_STATE_NAME

from ..data.task_stream import Task, TaskStream
from ..hub.model_card import CARD_NAME
from ..hub.publishing import RESULTS_NAME
from ..hub.saving import save_experts
from ..hub.validation import MANIFEST_NAME, read_manifest
from ..tuner.backbone import processor_facts
from ..tuner.config import LucaConfig
from ..tuner.model import tuner_of
from ..utils import LOCK_NAME, NAME_RULE, atomic_write, explain_write_errors, hold_lock, pluralize, write_json
from .arguments import CONFIG_RECIPES, RECIPES, ContinualTrainingArguments
from .metrics import MEASURED, Record, accuracy_matrix


Digests = Callable[[Task], dict[str, str]]  # of a task's train and test images

RESULTS_FORMAT = 2
MATRIX_NAME = "matrix.jsonl"
REPORT_NAME = "report.html"
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
# How a batch is divided changes nothing: `images_per_step`, of all processes together, is compared in their place.
PARTS_OF_A_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
# Fields of LucaConfig that say nothing about how an expert is trained.
NO_SETTINGS = "classes target_modules fingerprint backbone_settings processor allow_mismatch read_with".split()
RECORD_KEYS = {"name", "classes", "train_images", "test_images", "steps", "accuracy", "routing", "task_known"}
# By these a task that is in memory is found again in the folder.
IDENTITY = ("name", "train_images", "test_images", "images", "steps")


class RunFolder:
    """
    The output folder of a run, and its only writer. `results.json` decides what is true: a task that is in it has been
    learned, and its expert is whole. What was measured before the last stage is in `matrix.jsonl`, a line a stage. A
    change that takes several writes is first written down in a journal, then done, and finished or undone by
    [`~RunFolder.recover`] if it was cut off. Of several processes one is the writer.
    """

    def __init__(self, path: str | Path, is_writer: bool = True) -> None:
        self.path = Path(path).expanduser().absolute()
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
            if refusals := [error for error in gather_object([refusal]) if error is not None]:
                raise refusals[0]
            yield

    def recover(self, names: Iterable[str], deleted: Iterable[str] = ()) -> None:
        """
        Finishes a change that was cut off, removes half-written files of the run's tasks, and checks that the folder
        can be written to. Experts that were `deleted` from the model are deleted here too.
        """
        if self.is_writer:
            with explain_write_errors(self.path / RESULTS_NAME):
                self.path.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers([*names, *self.experts(), *self._read(JOURNAL_NAME).get("experts", ())])
                tempfile.TemporaryFile(dir=self.path).close()
                self._carry_out()
                for name in deleted:
                    write_json(self.path / JOURNAL_NAME, {"change": "delete", "expert": name, "experts": [name]})
                    self._carry_out()
        PartialState().wait_for_everyone()

    def experts(self) -> list[str]:
        """The experts in the folder, in their order."""
        return read_manifest(self.path).names if (self.path / MANIFEST_NAME).is_file() else []

    def pending(self) -> str | None:
        """The expert of a change that is not done: after [`~RunFolder.recover`] the others are to be measured."""
        return self._read(JOURNAL_NAME).get("expert")

    def read(
        self, settings: dict[str, Any], stream: TaskStream, digests: Digests, known: Sequence[Record], refuse: bool
    ) -> list[Record]:
        """
        The records of the run in the folder, none where there is no run. `known` are those that this run has already.
        Raises a `ValueError` for a run of another stream or of other settings, for experts of no run, and, with
        `refuse`, for a run of which none is known.
        """
        results = self.results(known)
        records, found = results.get("tasks") or [], ""
        missing = [{"settings", "tasks"} - set(results), *(RECORD_KEYS - set(record) for record in records)]
        if results.get("format", 0) > RESULTS_FORMAT:
            found = f"has the format {results['format']} of a later version. Update peft_luca, or choose"
        elif results and any(missing):
            found = f"does not hold the results of a run: there is no {min(next(filter(None, missing)))!r}. Choose"
        if found:
            raise ValueError(f"{self.path / RESULTS_NAME} {found} another output_dir.")
        learned = {record["name"] for record in records}
        paths = [self.path / task.name / CONFIG_NAME for task in stream if task.name not in learned]
        for path in [*paths, *([] if learned else [self.path / MANIFEST_NAME])]:
            if path.is_file():
                found = "is of experts that were not learned in this folder, and would be overwritten"
                raise ValueError(f"{path} {found}. Choose another output_dir.")
        if _identities(records)[: len(known)] != _identities(known):
            found = "does not hold any more what this trainer has learned there: another run was at work in it"
            raise ValueError(f"{self.path} {found}. Make a new trainer, or choose another output_dir.")
        if results and refuse and not known:
            remedy = "Choose another output_dir, delete it, or call train() without resume_from_checkpoint=False"
            raise ValueError(f"{self.path} holds a run of {pluralize(len(records), 'task')}. {remedy} to resume it.")
        if changes := changed_settings(results["settings"], settings) if results else "":
            raise ValueError(f"{self.path} holds a run with other settings ({changes}). Choose another output_dir.")
        self._check_stream(records[len(known) :], stream, digests)
        return records

    def results(self, known: Sequence[Record] = ()) -> dict[str, Any]:
        """What `results.json` holds, and what the stages measured, which is not read again for `known` records."""
        results, path = self._read(RESULTS_NAME), self.path / MATRIX_NAME
        records = results["tasks"] if {"settings", "tasks"} <= set(results) else []
        size = results.pop("matrix_bytes", 0) if records else 0
        stages = [_stage(record) for record in known[: len(records)][:-1]]
        try:
            stages += map(json.loads, path.read_bytes()[:size].splitlines()[len(stages) :] if size else ())
            for record, stage in zip(records[:-1] if size else (), stages, strict=bool(size)):
                record.update(stage)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}. Restore it, or choose another output_dir.") from error
        return results | ({"accuracy_matrix": accuracy_matrix(records)} if records else {})

    def _write(self, results: dict[str, Any]) -> None:
        there, tasks = self._read(RESULTS_NAME), results["tasks"]
        size = there.get("matrix_bytes", 0)
        new = tasks[len(there["tasks"]) - 1 if size else 0 : -1]
        with open(self.path / MATRIX_NAME, "ab") as file:
            file.truncate(size)  # a killed process may have left more
            size += file.write("".join(f"{json.dumps(_stage(record))}\n" for record in new).encode())
            file.flush()
            os.fsync(file.fileno())
        short = [{key: value for key, value in record.items() if key not in MEASURED} for record in tasks[:-1]]
        kept = {name: value for name, value in results.items() if name != "accuracy_matrix"}
        write_json(self.path / RESULTS_NAME, kept | {"tasks": [*short, *tasks[-1:]], "matrix_bytes": size})

    def _read(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}. Choose another output_dir.") from error

    def _check_stream(self, records: list[Record], stream: TaskStream, digests: Digests) -> None:
        tasks = {task.name: task for task in stream}
        for record in records:
            if record.get("deleted"):  # its images may be gone as well
                continue
            name, task = record["name"], tasks.get(record["name"])
            then = [record[key] for key in ("classes", "train_images", "test_images")]
            if task is None:
                found = f"its task {name!r} is not among {', '.join(map(repr, tasks))}"
            elif (now := [list(task.classes), len(task.train), len(task.test or ())]) != then:
                found = f"its task {name!r} has {then[1]} train images of {then[0]}, here it has {now[1]} of {now[0]}"
            elif "images" in record and record["images"] != digests(task):
                found = f"the images of its task {name!r} are other ones, or are split or labeled otherwise"
            else:
                continue
            remedy = "Give the stream of that run, with tasks that were added to it, or choose another output_dir"
            raise ValueError(f"{self.path} holds a run of another stream: {found}. {remedy}.")

    def add_expert(self, model: PeftModel, name: str, results: dict[str, Any]) -> None:
        """Saves a learned expert, and results in which its task is learned."""
        if self.is_writer:
            # Those that the model brought along are saved with the first one.
            names = [n for n in tuner_of(model).experts if n == name or not (self.path / n / CONFIG_NAME).is_file()]
            with explain_write_errors(self.path / name):
                write_json(self.path / JOURNAL_NAME, {"change": "add", "expert": name, "experts": names})
                save_experts(model, self.path, names)
        self.finish(results)

    def finish(self, results: dict[str, Any]) -> None:
        """Writes what is true after a change, which is done then."""
        PartialState().wait_for_everyone()  # the others have read the journal
        if self.is_writer:
            with explain_write_errors(self.path / RESULTS_NAME):
                self._write(results)
            with suppress(OSError):  # the next start finds nothing left to do
                (self.path / JOURNAL_NAME).unlink(missing_ok=True)

    def save(self, model: PeftModel, processing_class: Any, results: dict[str, Any] | None) -> None:
        """Saves all experts as a collection, with the image processor and the results."""
        if self.is_writer:
            with hold_lock(self._lock):
                there, here = self._read(RESULTS_NAME).get("tasks", []), (results or {}).get("tasks", [])
                is_back = any(a.get("deleted") and not b.get("deleted") for a, b in zip(there, here, strict=False))
                if is_back or _identities(here)[: len(there)] != _identities(there):
                    raise ValueError(f"{self.path} holds another run, or what became of it. Save into another folder.")
                save_experts(model, self.path)
                processing_class.save_pretrained(self.path)
                if results is not None:
                    self._write(results)

    def save_file(self, name: str, content: bytes) -> Path:
        """Saves a picture or a report."""
        path = self.path / name
        with explain_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                temporary.write_bytes(content)
        return path

    def _carry_out(self) -> None:
        """Does what is left of the change in the journal, where a deletion stays until the others are measured."""
        change, results = self._read(JOURNAL_NAME), self._read(RESULTS_NAME)
        if not change:
            return
        name = change["expert"]
        names = [n for n in change.get("experts", [name]) if NAME_RULE.fullmatch(n)]  # a folder may come from others
        live = {record["name"]: record for record in results.get("tasks", []) if not record.get("deleted")}
        if change["change"] == "delete":
            if record := live.pop(name, None):
                gone = set(record["classes"]).difference(*(other["classes"] for other in live.values()))
                self._remove_derived({name, *gone})
                results["classes"] = [label for label in results["classes"] if label not in gone]
                record |= {"deleted": True, "classes": []}
                write_json(self.path / RESULTS_NAME, results)
        if name not in live:
            if manifest := self._read(MANIFEST_NAME):
                manifest["experts"] = [expert for expert in manifest["experts"] if expert["name"] not in names]
                path = self.path / MANIFEST_NAME
                write_json(path, manifest) if manifest["experts"] else path.unlink()
            for folder in (self.path / name for name in names if (self.path / name).is_dir()):
                shutil.rmtree(folder)
        if change["change"] == "add":
            (self.path / JOURNAL_NAME).unlink()

    def _remove_derived(self, names: set[str]) -> None:
        """Removes the plots, and what else was made of the run and names an expert or a class that is to go."""
        texts = (self.path / name for name in (CARD_NAME, TRAINER_STATE_NAME, REPORT_NAME))
        for path in (*texts, *(self.path / PLOTS_NAME).glob("*.png")):
            text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
            if path.suffix == ".png" or any(name in text.replace("\\", "") for name in names):  # Markdown escapes '_'
                path.unlink()

    def _remove_leftovers(self, experts: Iterable[str]) -> None:
        """Removes what a killed process was writing: a file `.x.writing`, or an expert's folder `.x.abcd1234`."""
        names = {name for name in experts if NAME_RULE.fullmatch(name)}
        pattern = rf"\..+\.writing|\.({'|'.join(names)}|checkpoint-\d+)\.\w{{8}}"
        for folder in (self.path, self.path / PLOTS_NAME, *(self.path / name for name in names)):
            for path in folder.iterdir() if folder.is_dir() else ():
                if re.fullmatch(pattern, path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_settings(args: ContinualTrainingArguments, luca_config: LucaConfig, processor: Any) -> dict[str, Any]:
    """The settings of a run, as `results.json` holds them."""
    fields_of_config = set(LucaConfig.__annotations__) - set(NO_SETTINGS)
    values = {name: getattr(args, name) for name in SETTINGS} | {
        "images_per_step": args.train_batch_size * args.world_size * args.gradient_accumulation_steps,
        "luca_config": {name: value for name, value in asdict(luca_config).items() if name in fields_of_config},
        "processor": processor_facts(processor) or {},
    }
    return json.loads(json.dumps(values, default=dict))


def changed_settings(saved: dict[str, Any], settings: dict[str, Any]) -> str:
    """
    The settings that differ, for a message. A setting that the saving version did not have counts as its default, and
    one that this version does not have is not compared. With another router what was measured is measured again.
    """
    recipe = saved.get("recipe", "own")
    args, config = ({f.name: f.default for f in fields(kind)} for kind in (ContinualTrainingArguments, LucaConfig))
    config |= CONFIG_RECIPES.get(recipe, {})
    then = args | RECIPES.get(recipe, {}) | {"luca_config": config, "processor": settings["processor"]}
    then = _flat(then) | _flat(saved)
    parts = PARTS_OF_A_BATCH if "images_per_step" in saved else ["images_per_step"]
    free = ("router", "processor.image_processor_type", *parts)
    changed = [(name, now) for name, now in _flat(settings).items() if name not in free and then.get(name) != now]
    return ", ".join(f"{name}: {then.get(name)!r} there, {now!r} now" for name, now in changed)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by their whole names, such as `luca_config.reduction`. Empty options (`{}`, `""`) are `None`."""
    flat = dict(settings)
    for group in ("luca_config", "processor"):
        flat |= {f"{group}.{name}": value for name, value in (flat.pop(group, None) or {}).items()}
    for name, value in flat.items():
        kept = {key: option for key, option in value.items() if option is not None} if type(value) is dict else value
        flat[name] = None if kept in ({}, "") else kept
    return flat


def _identities(records: Sequence[Record]) -> list[list[Any]]:
    return [[record.get(key) for key in IDENTITY] for record in records]


def _stage(record: Record) -> dict[str, Any]:
    """What was measured when a task had been learned."""
    return {name: record[name] for name in MEASURED if name in record}
