"""The output folder of a run: resumed after any interruption to the bit, its lock, its journal, and deletion."""

import builtins
import errno
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from datasets import DatasetDict
from filelock import FileLock
from helpers import (
    NAMES,
    assert_same,
    assert_same_experts,
    expert_tensors,
    experts_of,
    files_in,
    make_images,
    make_model,
    make_processor,
    make_splits,
    make_stream,
    make_trainer,
    make_vit,
    pixels,
    read_json,
)
from transformers import TrainerCallback

from peft_luca import LucaConfig, TaskStream, load_experts, save_expert, save_experts
from peft_luca import utils as package_utils
from peft_luca.data import feature_cache
from peft_luca.training import run_folder
from peft_luca.training.run_folder import JOURNAL_NAME, MATRIX_NAME, RunFolder
from peft_luca.utils import LOCK_NAME


FOUR = NAMES[:4]
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """[CLS] of the same images, computed once for the tests of this file."""
    return {"features_cache_dir": str(tmp_path_factory.mktemp("features")), "num_train_epochs": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """A run that was never interrupted."""
    trainer = make_trainer(tmp_path_factory.mktemp("whole") / "out", **cache)
    trainer.train()
    return trainer


@pytest.fixture
def copy(whole, out):
    """A copy of the folder of a finished run."""
    shutil.copytree(whole.folder.path, out)
    return out


class Interrupt(TrainerCallback):
    """Raises in the given task, counted from 1."""

    def __init__(self, task):
        self.task, self.begun = task, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun += 1

    def on_step_end(self, args, state, control, **kwargs):
        if self.begun == self.task:
            raise KeyboardInterrupt


def shape(matrix):
    """Which entries of an accuracy matrix were measured."""
    return [[value is not None for value in row] for row in matrix]


def contents(folder):
    return {file: (folder / file).read_bytes() for file in files_in(folder)}


# --- resuming ---


@pytest.mark.parametrize("interrupted_in", [1, 3])
def test_a_resumed_run_ends_the_same_to_the_bit_and_does_nothing_twice(whole, out, cache, interrupted_in):
    stopped = make_trainer(out, callbacks=[Interrupt(interrupted_in)], **cache)
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    done = interrupted_in - 1
    assert (out / "results.json").exists() == bool(done)
    again = make_trainer(out, **cache)
    assert again.train(resume_from_checkpoint=True).global_step == 2 * (3 - done)
    assert again.state.global_step == 6
    assert_same_experts(experts_of(again), experts_of(whole))
    assert again.model(pixels()).logits.equal(whole.model(pixels()).logits)
    first, second = (read_json(folder / "results.json") for folder in (out, whole.folder.path))
    for results in (first, second):
        for task in results["tasks"]:
            del task["seconds"]
    assert first == second
    ours, theirs = contents(out), contents(whole.folder.path)
    assert {name: ours[name] for name in theirs if name != "results.json"} == {
        name: content for name, content in theirs.items() if name != "results.json"
    }
    assert make_trainer(out, **cache).train().global_step == 0


def other_test_images():
    splits = make_splits()
    return TaskStream.from_dataset(
        DatasetDict(train=splits["train"], test=make_images(per_class=4, seed=3)), increment=2, class_order=list(NAMES)
    )


def swapped_labels():
    """The same images in the same order, with the labels of the first two classes exchanged."""
    splits = make_splits()
    swap = {0: 1, 1: 0}
    for name in splits:
        labels = [swap.get(label, label) for label in splits[name]["label"]]
        splits[name] = (
            splits[name].remove_columns("label").add_column("label", labels, feature=splits[name].features["label"])
        )
    return TaskStream.from_dataset(splits, increment=2, class_order=list(NAMES))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.3}, r"other settings \(learning_rate: \S+ there, 0\.3 now\)"),
        ({"num_train_epochs": 4}, "num_train_epochs: 1 there, 4 now"),
        ({"recipe": "paper"}, "recipe: 'own' there, 'paper' now"),
        ({"statistics_rank": 3}, "statistics_rank: 64 there, 3 now"),
        ({"adam_beta1": 0.5}, "adam_beta1: 0.9 there, 0.5 now"),
        ({"luca_config": LucaConfig(reduction=4)}, "luca_config.reduction: 16 there, 4 now"),
        ({"stream": make_stream(order=NAMES[::-1])}, "run of another stream: its task 'task_0' has 16 train images"),
        ({"stream": make_stream(train=9)}, "run of another stream.* has 16 train images .* has 18 of"),
        ({"stream": make_stream(names=FOUR, order=FOUR)}, "its task 'task_2' is not among 'task_0', 'task_1'"),
        ({"stream": make_stream(seed=5)}, "the images of its task 'task_0' are other ones"),
        ({"stream": other_test_images()}, "the images of its task 'task_0' are other ones"),
        ({"stream": swapped_labels()}, "the images of its task 'task_0' are .* labeled otherwise"),
        ({"processor": make_processor(image_mean=[0.0] * 3)}, r"processor.image_mean: \[0.5, .* there, \[0.0, .* now"),
        ({"per_device_train_batch_size": 4}, r"\(images_per_step: 8 there, 4 now\)"),
        ({"model": make_vit(seed=1)}, "was trained on the backbone"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_another_run_in_the_same_folder_is_refused(copy, cache, changes, message):
    before = contents(copy)
    with pytest.raises(ValueError, match=message):
        make_trainer(copy, **cache | changes).train()
    assert contents(copy) == before


def test_resuming_can_be_refused(copy, cache):
    with pytest.raises(ValueError, match=r"holds a run of 3 tasks. Choose another output_dir"):
        make_trainer(copy, **cache).train(resume_from_checkpoint=False)
    with pytest.raises(ValueError, match="not from 'x'"):
        make_trainer(copy, **cache).train(resume_from_checkpoint="x")


CHANGES_OF_A_VERSION = [
    lambda results: results["settings"]["luca_config"].update(read_with="peft_luca 0.1", head="cosine"),
    lambda results: results["settings"].pop("l1_proximal"),
    lambda results: results["settings"].pop("l1_weight"),  # which the recipe fills
    lambda results: results["settings"].pop("lr_scheduler_type"),
    lambda results: results["settings"]["luca_config"].pop("pooled"),
    lambda results: results["settings"]["luca_config"].pop("scale"),
    lambda results: results["settings"].update(lr_scheduler_kwargs={}),  # as transformers 4 has it
    lambda results: results["settings"].update(router="energy"),
    lambda results: results.pop("stage_forgetting"),
    lambda results: [task.pop("images") for task in results["tasks"]],
    lambda results: [results["settings"].pop(name) for name in ("processor", "images_per_step")],
]


@pytest.mark.parametrize("change", CHANGES_OF_A_VERSION)
def test_a_run_of_another_version_with_the_same_values_is_resumed(copy, cache, change):
    results = read_json(copy / "results.json")
    change(results)
    (copy / "results.json").write_text(json.dumps(results), encoding="utf-8")
    trainer = make_trainer(copy, **cache)
    assert trainer.train().global_step == 0
    assert len(trainer.results()["stage_forgetting"]) == 3


def test_the_same_batch_in_other_parts_is_the_same_run(copy, cache):
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    assert make_trainer(copy, **parts, **cache).train().global_step == 0


def test_a_setting_that_an_older_version_lacked_is_compared_with_its_default(copy, cache):
    results = read_json(copy / "results.json")
    del results["settings"]["l1_proximal"]
    (copy / "results.json").write_text(json.dumps(results), encoding="utf-8")
    with pytest.raises(ValueError, match=r"l1_proximal: False there, True now"):
        make_trainer(copy, l1_proximal=True, **cache).train()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda results: results.update(format=99), "has the format 99 of a later version.* Update peft_luca"),
        (
            lambda results: results["tasks"][-1].pop("task_known"),
            "not hold the results of a run: there is no 'task_known'",
        ),
        (lambda results: results.pop("settings"), "not hold the results of a run: there is no 'settings'"),
        (
            lambda results: [results.clear(), results.update(tasks={"mmlu": {"acc": 0.5}})],
            "not hold the results of a run",
        ),
        (None, "cannot be read: Expecting"),
    ],
    ids=["format", "record", "settings", "another program's", "damaged"],
)
def test_results_of_no_run_are_refused(copy, cache, change, message):
    results = read_json(copy / "results.json")
    if change is not None:
        change(results)
    text = "{" if change is None else json.dumps(results)
    (copy / "results.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        make_trainer(copy, **cache).train()


# --- what the stages measured, beside a short results.json ---


def test_results_are_those_of_the_trainer_and_each_stage_but_the_last_is_a_line(whole):
    folder = whole.folder.path
    assert RunFolder(folder).results() == whole.results()
    lines = [json.loads(line) for line in (folder / MATRIX_NAME).read_text().splitlines()]
    assert [line["accuracy"] for line in lines] == [task["accuracy"] for task in whole.results()["tasks"][:-1]]
    short = read_json(folder / "results.json")
    assert "accuracy_matrix" not in short
    assert ["accuracy" in task for task in short["tasks"]] == [False, False, True]


def as_format_1(folder):
    """The folder as version 0.1 wrote it."""
    results = RunFolder(folder).results()
    (folder / "results.json").write_text(json.dumps(results | {"format": 1}), encoding="utf-8")
    (folder / MATRIX_NAME).unlink()


def test_a_folder_of_an_earlier_version_is_resumed_and_brought_up_to_date(out, cache):
    trainer = make_trainer(out, make_stream(FOUR, names=FOUR), **cache)
    trainer.train()
    before = trainer.results()
    as_format_1(out)
    later = make_trainer(out, make_stream(FOUR, names=FOUR), **cache)
    later.train_task(make_splits(NAMES[4:]), "new")
    assert RunFolder(out).results()["tasks"][:2] == before["tasks"]
    assert read_json(out / "results.json")["format"] == 2
    assert len((out / MATRIX_NAME).read_text().splitlines()) == 2


def test_a_task_is_deleted_from_a_folder_of_an_earlier_version(copy, whole, cache):
    as_format_1(copy)
    trainer = make_trainer(copy, **cache)
    trainer.delete_adapter("task_1")
    found = RunFolder(copy).results()
    assert found["tasks"][0] == whole.results()["tasks"][0]
    assert shape(found["accuracy_matrix"]) == [[True, False, False], [True, True, False], [True, False, True]]
    assert found == trainer.results() == make_resumed(copy, cache).results()


@pytest.mark.parametrize("spoil", [lambda path: path.unlink(), lambda path: path.write_text("{}\n")])
def test_a_matrix_that_is_gone_or_cut_off_is_refused(copy, cache, spoil):
    spoil(copy / MATRIX_NAME)
    with pytest.raises(ValueError, match=r"matrix\.jsonl cannot be read: .* Restore it, or choose another output_dir"):
        make_trainer(copy, **cache).train()


def test_a_stage_that_is_measured_again_after_an_idle_trainers_is_taken_up(out, cache):
    """Another trainer deletes and learns: of what the idle one has in memory, the last stage is not true any more."""
    idle, other = (make_trainer(out, **cache) for _ in range(2))
    for task in list(idle.stream)[:2]:
        idle.train_task(task)
    other.train_task(other.stream[2])
    other.delete_adapter("task_0")
    other.train_task(make_splits(NAMES[:2], seed=9), "late")
    idle.stream.append(make_splits(NAMES[:2], seed=9), "late")
    idle.train()
    assert idle.results() == other.results() == RunFolder(out).results()


# --- a stream that grows ---


def test_a_month_later(out, cache):
    make_trainer(out, make_stream(FOUR, names=FOUR), **cache).train()
    # New classes, and new data of an old task's, without train() being called first.
    later = make_trainer(out, make_stream(FOUR, names=FOUR), **cache)
    output = later.train_task(make_splits(NAMES[4:]), "new")
    assert output.global_step == 2
    later.train_task(make_splits(NAMES[:2], seed=77), "again")
    assert list(later.tuner.experts) == ["task_0", "task_1", "new", "again"]
    assert later.tuner.classes == NAMES
    results = RunFolder(out).results()
    assert [task["name"] for task in results["tasks"]] == ["task_0", "task_1", "new", "again"]
    assert shape(results["accuracy_matrix"]) == [[j <= i for j in range(4)] for i in range(4)]
    assert results["last_accuracy"] == pytest.approx(later.evaluate()["eval_last_accuracy"])
    with pytest.raises(ValueError, match="there is an expert 'new' already"):
        later.train_task(later.stream[2])
    # And all of it comes back, in a stream that has grown likewise.
    stream = make_stream(FOUR, names=FOUR)
    stream.append(make_splits(NAMES[4:]), "new")
    stream.append(make_splits(NAMES[:2], seed=77), "again")
    back = make_trainer(out, stream, **cache)
    assert back.train().global_step == 0
    assert_same_experts(experts_of(back), experts_of(later))


def test_tasks_in_another_order_than_the_streams(out, cache):
    first = make_trainer(out, **cache)
    first.train_task(first.stream[2])
    back = make_trainer(out, **cache)
    back.train()
    assert [task["name"] for task in read_json(out / "results.json")["tasks"]] == ["task_2", "task_0", "task_1"]
    assert_same(expert_tensors(back.model, "task_2"), expert_tensors(first.model, "task_2"))


def test_another_task_under_the_name_of_one_that_failed_learns_from_its_own_images(out, cache):
    trainer = make_trainer(out, make_stream(NAMES[:2], names=NAMES[:2]), **cache)
    trainer.train()
    finish, trainer._finish = trainer._finish, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train_task(make_splits(NAMES[2:4], train=4), "late")
    trainer._finish = finish
    trainer.train_task(make_splits(NAMES[4:6], train=6), "late")
    assert len(trainer.features(trainer.stream[-1], "train")) == 12
    assert trainer.tuner.experts["late"] == NAMES[4:6]


# --- deletion ---


def test_a_deleted_expert_was_never_there_and_stays_away(copy, tmp_path, cache):
    trainer = make_trainer(copy, **cache)
    trainer.delete_adapter("task_1")
    results = RunFolder(copy).results()
    assert shape(results["accuracy_matrix"]) == [[True, False, False], [True, True, False], [True, False, True]]
    assert [task.get("deleted", False) for task in results["tasks"]] == [False, True, False]
    assert [expert["name"] for expert in read_json(copy / "experts.json")["experts"]] == ["task_0", "task_2"]
    assert not any(name.startswith(("task_1", ".")) for name in files_in(copy))
    without = make_splits().filter(lambda label: label not in (2, 3), input_columns="label")
    stream = TaskStream.from_dataset(without, increment=2, class_order=NAMES[:2] + NAMES[4:])
    never = make_trainer(tmp_path / "never", stream, **cache)
    never.train()
    tasks = {"task_0": make_splits(NAMES[:2]), "task_2": make_splits(NAMES[4:])}
    back = make_trainer(copy, **cache)
    back.train()
    assert list(back.tuner.experts) == list(tasks)
    for ours, theirs in (("task_0", "task_0"), ("task_2", "task_1")):
        kept = {key.replace(ours, "x"): value for key, value in expert_tensors(back.model, ours).items()}
        assert_same(kept, {key.replace(theirs, "x"): v for key, v in expert_tensors(never.model, theirs).items()})
    assert back.evaluate()["eval_last_accuracy"] == never.evaluate()["eval_last_accuracy"]
    # Its classes may come back under another name.
    with pytest.raises(ValueError, match="'task_1' was learned and its expert deleted"):
        back.train_task(back.stream[1])
    back.train_task(make_splits(NAMES[2:4]), "once_more")
    assert shape(RunFolder(copy).results()["accuracy_matrix"])[-1] == [True, False, True, True]


def test_a_run_resumes_without_the_images_of_a_deleted_task(out, cache):
    tasks = {f"t{i}": make_splits(NAMES[2 * i : 2 * i + 2]) for i in range(3)}
    trainer = make_trainer(out, TaskStream.from_tasks(tasks), **cache)
    trainer.train()
    trainer.delete_adapter("t1")
    left = {name: task for name, task in tasks.items() if name != "t1"}
    again = make_trainer(out, TaskStream.from_tasks(left), **cache)
    again.train()
    assert list(again.tuner.experts) == ["t0", "t2"]
    assert again.evaluate()["eval_accuracy_matrix"][-1] == trainer.evaluate()["eval_accuracy_matrix"][-1]


def test_what_cannot_be_deleted(out, cache):
    trainer = make_trainer(out, make_stream(increment=6), **cache)
    with pytest.raises(ValueError, match="there is no expert 'task_0' to delete"):
        trainer.delete_adapter("task_0")
    trainer.train()
    with pytest.raises(ValueError, match="'task_0' is the only expert"):
        trainer.delete_adapter("task_0")
    assert (out / "task_0" / "adapter_config.json").is_file()


def test_a_deleted_task_is_in_no_file_of_the_folder(out, cache):
    trainer = make_trainer(out, save_strategy="epoch", plots=True, **cache)
    trainer.train()
    trainer.save_state()
    trainer.create_model_card()
    assert (out / "task_1" / "checkpoint-2" / "optimizer.pt").is_file()
    assert (out / "plots" / "accuracy_matrix.png").is_file()
    trainer.delete_adapter("task_1")
    for file in files_in(out):
        text = (out / file).read_text(encoding="utf-8", errors="ignore")
        assert "task_1" not in file
        assert not any(name in text for name in NAMES[2:4]), file
        assert "task_1" not in text or file == "results.json"
    assert read_json(out / "results.json")["classes"] == [*NAMES[:2], *NAMES[4:]]
    trainer.train()
    assert "plots/accuracy_matrix.png" in files_in(out)
    trainer.create_model_card()
    card = (out / "README.md").read_text(encoding="utf-8").replace("\\", "")
    rows = [line.split(" | ")[0] for line in card.splitlines() if line.startswith("| task_")]
    assert rows == ["| task_0", "| task_2"] * 2  # experts, and their figures
    assert not any(name in card for name in ("task_1", *NAMES[2:4]))


def test_the_cls_of_a_deleted_task_are_deleted_on_request_unless_another_task_uses_them(out, tmp_path):
    cache = {"features_cache_dir": str(tmp_path / "features"), "num_train_epochs": 1, "augmented_views": 2}
    same = make_splits(NAMES[:2])
    tasks = {
        "a": same,
        "b": make_splits(NAMES[2:4]),
        "c": DatasetDict(train=make_images(NAMES[:2], seed=5), test=same["test"]),
    }
    trainer = make_trainer(out, TaskStream.from_tasks(tasks), **cache)
    trainer.train()
    whole = files_in(tmp_path / "features")
    assert len(whole) == 3 * 3 + 2  # two views and the plain train images of each, and two kinds of test images
    trainer.delete_adapter("b", features=True)
    left = files_in(tmp_path / "features")
    assert len(left) == len(whole) - 4
    trainer.delete_adapter("a", features=True)
    assert len(files_in(tmp_path / "features")) == len(left) - 3  # the test images are c's too
    trainer.evaluate()
    assert len(files_in(tmp_path / "features")) == len(left) - 3


def test_an_expert_that_was_deleted_from_the_model_is_deleted_in_the_folder(copy, cache):
    trainer = make_trainer(copy, **cache)
    trainer.train()
    trainer.model.delete_adapter("task_1")
    trainer.train()
    assert list(trainer.tuner.experts) == ["task_0", "task_2"]
    assert "task_1/adapter_config.json" not in files_in(copy)
    assert read_json(copy / "results.json")["tasks"][1]["deleted"]


# --- two trainers, and folders of others ---


def test_what_another_trainer_has_done_is_taken_up(whole, out, cache):
    idle = make_trainer(out, **cache)
    idle.train_task(idle.stream[0])
    other = make_trainer(out, **cache)
    other.train_task(other.stream[1])
    other.delete_adapter("task_0")
    idle.train()
    assert list(idle.tuner.experts) == ["task_1", "task_2"]
    assert [task.get("deleted", False) for task in read_json(out / "results.json")["tasks"]] == [True, False, False]
    for name in ("task_1", "task_2"):
        assert_same(expert_tensors(idle.model, name), expert_tensors(whole.model, name))
    assert_same_experts(experts_of(idle), experts_of(make_resumed(out, cache)))
    with pytest.raises(ValueError, match=r"holds another run, or what became of it\. Save into another folder"):
        other.save_model()
    other.train()
    other.save_model()
    assert list(load_experts(make_vit(), out).experts) == ["task_1", "task_2"]


def make_resumed(out, cache):
    trainer = make_trainer(out, **cache)
    assert trainer.train().global_step == 0
    return trainer


def test_a_folder_that_holds_another_run_by_now_is_refused(copy, cache):
    trainer = make_resumed(copy, cache)
    shutil.rmtree(copy)
    for _ in range(2):
        with pytest.raises(ValueError, match="does not hold any more what this trainer has learned there"):
            trainer.train()
        make_trainer(copy, make_stream(seed=5), **cache).train()
    assert read_json(copy / "results.json")["tasks"][0]["name"] == "task_0"
    trainer.model.delete_adapter("task_1")  # of the trainer's own run, not of the one that is in its folder now
    before = contents(copy)
    with pytest.raises(ValueError, match="does not hold any more what this trainer has learned there"):
        trainer.train()
    assert contents(copy) == before


@pytest.mark.parametrize(
    "save", [lambda model, out: save_experts(model, out), lambda model, out: model.save_pretrained(out)]
)
def test_experts_that_were_not_learned_in_the_folder_are_not_overwritten(whole, out, cache, save):
    save(whole.model, out)
    before = contents(out)
    with pytest.raises(
        ValueError, match="is of experts that were not learned in this folder, and would be overwritten"
    ):
        make_trainer(out, **cache).train()
    assert contents(out) == before
    grown = make_trainer(out / "grown", make_stream(FOUR, names=FOUR), **cache)
    grown.train()
    save_expert(whole.model, "task_2", out / "grown" / "theirs")
    before = contents(out / "grown")
    with pytest.raises(ValueError, match=r"theirs/adapter_config.json is of experts that were not learned"):
        grown.train_task(make_splits(NAMES[4:]), "theirs")
    assert contents(out / "grown") == before


def test_experts_that_the_model_brought_along_are_in_the_folder_and_come_back(out, cache):
    model = make_model({"old": ["x", "y"]})
    first = make_trainer(out, make_stream(FOUR, names=FOUR), model, **cache)
    first.train_task(first.stream[0])
    assert list(load_experts(make_vit(), out).experts) == ["old", "task_0"]
    back = make_trainer(out, make_stream(FOUR, names=FOUR), **cache)
    back.train()
    assert_same(expert_tensors(back.model, "old"), expert_tensors(first.model, "old"))
    assert list(back.tuner.experts) == ["old", "task_0", "task_1"]
    back.delete_adapter("old")
    assert list(load_experts(make_vit(), out).experts) == ["task_0", "task_1"]
    assert not (out / "old").exists()


def test_another_working_folder_changes_nothing(whole, tmp_path, cache, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer("~/out", features_cache_dir="features", num_train_epochs=1)
    relative = make_trainer("out", **cache)
    for task in trainer.stream:
        trainer.train_task(task)
        relative.train_task(relative.stream[len(relative.results()["tasks"])])
        (tmp_path / task.name).mkdir()
        monkeypatch.chdir(tmp_path / task.name)
    assert_same_experts(experts_of(trainer), experts_of(whole))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "features",
        "home",
        "out",
        "task_0",
        "task_1",
        "task_2",
    ]
    for folder in (tmp_path / "out", tmp_path / "home" / "out"):
        assert list(load_experts(make_vit(), folder).experts) == ["task_0", "task_1", "task_2"]


def test_checkpoints_of_tasks_are_kept_apart_and_a_task_may_be_called_like_one(out, cache):
    tasks = {"checkpoint-2": make_splits(NAMES[:2]), "b": make_splits(NAMES[2:4])}
    trainer = make_trainer(out, TaskStream.from_tasks(tasks), save_strategy="epoch", save_total_limit=1, **cache)
    trainer.train()
    for name, classes in (("checkpoint-2", NAMES[:2]), ("b", NAMES[2:4])):
        for folder in (out / name, out / name / "checkpoint-2"):
            assert read_json(folder / "adapter_config.json")["classes"] == list(classes)
    (out / "b" / ".checkpoint-2.abcd_123").mkdir()
    (out / "plots").mkdir()
    (out / "plots" / ".accuracy_matrix.png.writing").touch()
    assert make_trainer(out, TaskStream.from_tasks(tasks), save_strategy="epoch", **cache).train().global_step == 0
    assert not [file for file in out.rglob("*") if file.name.startswith(".")]


# --- a change that is cut off at any of its writes ---


class Killed(BaseException):
    """The process ends here: nothing after it is written."""


def disturb(monkeypatch, act, at, error):
    """
    Raises `error` in place of the `at`-th change of the disk in `act`. Returns whether it came so far, and whether
    `act` raised it.
    """
    calls = 0

    def counting(real, is_write=lambda *args: True):
        def change(path, *args, **kwargs):
            nonlocal calls
            if str(path).endswith(".lock") or not is_write(*args, *kwargs.values()):
                return real(path, *args, **kwargs)
            calls += 1
            if calls == at or (calls > at and error is Killed):
                raise error() if error is Killed else error(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(path, *args, **kwargs)

        return change

    with monkeypatch.context() as patch:
        for name in ("replace", "fsync", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, counting(getattr(os, name)))
        for module in (io, builtins):
            writes = counting(
                module.open, lambda *args: any(isinstance(a, str) and set("wax+") & set(a) for a in args)
            )
            patch.setattr(module, "open", writes)
        try:
            act()
        except error:
            return True, True
    return calls >= at, False


def outcome(folder):
    """What is in a folder, but for how long it took."""
    left = contents(folder)
    results = json.loads(left["results.json"])
    for task in results["tasks"]:
        del task["seconds"]
    return {**left, "results.json": results}


def grow(trainer):
    trainer.train_task(make_splits(NAMES[4:]), "new")


def delete(trainer):
    trainer.delete_adapter("task_1")


def forget(trainer):
    trainer.delete_adapter("task_1", features=True)


VERBS = {
    "learn": (0, lambda trainer: trainer.train()),
    "grow": (2, grow),
    "delete": (2, delete),
    "forget": (2, forget),
}
# Learning and growing take a hundred runs.
every_verb = pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=pytest.mark.slow if verb in ("learn", "grow") else ()) for verb in VERBS]
)


def disturbed_runs(verb, error, tmp_path, cache, monkeypatch):
    """
    Yields for each write of a change: a trainer whose write failed, whether it raised, what makes a new trainer in the
    same folder, and a check that the folder and its experts are as if nothing had failed.
    """
    tasks, act = VERBS[verb]

    def begin(name):
        own = {"features_cache_dir": str(tmp_path / name / "cache")} if verb == "forget" else {}
        return make_trainer(tmp_path / name / "out", make_stream(FOUR, names=FOUR), **{**cache, **own})

    start = begin("start")
    for task in list(start.stream)[:tasks]:
        start.train_task(task)
    shutil.copytree(tmp_path / "start", tmp_path / "whole")
    whole = begin("whole")
    act(whole)

    def check(trainer):
        assert outcome(trainer.folder.path) == outcome(whole.folder.path)
        assert_same_experts(experts_of(trainer), experts_of(whole))
        if verb == "forget":
            assert files_in(trainer.folder.path.parent / "cache") == files_in(tmp_path / "whole" / "cache")

    for at in itertools.count(1):
        shutil.copytree(tmp_path / "start", tmp_path / str(at))
        trainer = begin(str(at))
        is_disturbed, is_raised = disturb(monkeypatch, lambda: act(trainer), at, error)  # noqa: B023
        if not is_disturbed:
            break
        yield trainer, is_raised, lambda: begin(str(at)), check  # noqa: B023
    assert at > 10


@every_verb
def test_a_change_that_fails_at_any_write_is_finished_by_a_retry(tmp_path, cache, monkeypatch, verb):
    for trainer, is_raised, _, check in disturbed_runs(verb, OSError, tmp_path, cache, monkeypatch):
        VERBS[verb][1](trainer) if is_raised else trainer.train()
        check(trainer)


@every_verb
def test_a_change_that_is_killed_at_any_write_is_finished_by_the_next_start(tmp_path, cache, monkeypatch, verb):
    for trainer, _, begin, check in disturbed_runs(verb, Killed, tmp_path, cache, monkeypatch):
        is_begun = (trainer.folder.path / JOURNAL_NAME).exists()
        again = begin()
        if verb in ("delete", "forget"):
            again.train()
            if "task_1" in again.tuner.experts:
                assert not is_begun
                VERBS[verb][1](again)
        else:
            VERBS[verb][1](again)
        check(again)


def test_a_deletion_that_cannot_be_measured_is_finished_by_a_retry(copy, cache, monkeypatch):
    trainer, restarted = make_trainer(copy, **cache), make_trainer(copy, **cache)
    trainer.train()
    before = RunFolder(copy).results()

    def unreadable(*args):
        raise ValueError("the image in row 0 cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr("peft_luca.training.continual_trainer.measure", unreadable)
        for act in (lambda: trainer.delete_adapter("task_1"), trainer.train, restarted.train):
            with pytest.raises(ValueError, match="cannot be read"):
                act()
            assert not (copy / "task_1").exists()
            assert "task_1" not in [expert["name"] for expert in read_json(copy / "experts.json")["experts"]]
    trainer.delete_adapter("task_1")
    assert not (copy / JOURNAL_NAME).exists()
    results = RunFolder(copy).results()
    assert shape(results["accuracy_matrix"]) == [[True, False, False], [True, True, False], [True, False, True]]
    assert results["accuracy_matrix"] != before["accuracy_matrix"]
    restarted.train()
    assert list(restarted.tuner.experts) == ["task_0", "task_2"]
    with pytest.raises(ValueError, match="there is no expert 'task_1' to delete"):
        trainer.delete_adapter("task_1")


def test_leftovers_of_a_killed_run_are_removed_and_other_files_kept(out, cache):
    (out / ".task_1.abcd1234" / "task_1").mkdir(parents=True)
    (out / ".results.json.writing").write_text("{")
    (out / f".{JOURNAL_NAME}.writing").write_text("{")
    (out / ".keep").write_text("not ours")
    make_trainer(out, make_stream(FOUR, names=FOUR), **cache).train()
    assert sorted(path.name for path in out.iterdir() if path.name.startswith(".")) == [".keep"]


def test_the_writer_waits_until_all_processes_have_read_the_journal(cache, tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path / "out", make_stream(FOUR, names=FOUR), **cache)
    trainer.train()
    seen = []

    class Others:
        def wait_for_everyone(self):
            seen.append(trainer.folder.pending())

    monkeypatch.setattr(run_folder, "PartialState", Others)
    trainer.delete_adapter("task_1")
    assert seen[-2:] == ["task_1", "task_1"]  # once it is written, and before it is removed
    assert trainer.folder.pending() is None


def kill(folder, *arguments):
    """`kills.py` in a process of its own, which can fork safely."""
    command = [sys.executable, str(Path(__file__).parent / "kills.py"), str(folder), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS / "hub", TESTS.parent)))}
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stderr.splitlines()[-1])


def test_six_kills(tmp_path):
    report = kill(tmp_path, 6, 1)
    assert sum(report["killed"].values()) == 6
    assert report["runs"] >= 1
    assert (report["failed"], report["differing"]) == (0, 0), report


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "kills"), [(1, 300), (2, 100)])
def test_hundreds_of_kills(tmp_path, record_property, processes, kills):
    report = kill(tmp_path, kills, 2, "--processes", processes)
    record_property("kills", report)
    assert sum(report["killed"].values()) == kills
    assert all(report["killed"].values()), report  # in every phase
    assert all(report.get("processes", {"": 1}).values()), report
    assert (report["failed"], report["differing"]) == (0, 0), report


# --- a disk that fails ---


def test_no_room_at_any_write(whole, tmp_path, monkeypatch):
    """Every write to the disk fails once, as it does when the disk is full."""
    monkeypatch.setattr(feature_cache, "CHECKPOINT_SECONDS", 0.0)
    settings = {"features_cache_dir": str(tmp_path / "features"), "num_train_epochs": 1}
    real, calls = os.fsync, 0

    def full(handle):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    failing, failures = 0, []
    while True:
        calls, failing = 0, failing + 1
        trainer = make_trainer(tmp_path / "out", make_stream(FOUR, names=FOUR), **settings)
        try:
            trainer.train()
        except OSError as error:
            failures.append((error.errno, str(error)))
        else:
            break
    assert len(failures) > 5
    assert all(number == errno.ENOSPC and "cannot write" in message for number, message in failures)
    for name, tensors in experts_of(trainer).items():
        assert_same(expert_tensors(whole.model, name), tensors)


@pytest.fixture
def disk(tmp_path):
    """A folder that can be made a disk of a given size, or read-only, where this user may mount."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a tmpfs")
        return folder

    yield mount
    while os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("place", ["features", "out"])
def test_a_full_and_a_read_only_disk(whole, tmp_path, disk, place):
    folder = disk("size=256k")
    places = {"features": tmp_path / "features", "out": tmp_path / "out"} | {place: folder / place}
    (folder / place).mkdir()
    arguments = {"features_cache_dir": str(places["features"]), "num_train_epochs": 1}
    trainer = make_trainer(places["out"], **arguments)
    trainer.train_task(trainer.stream[0])
    filler = folder / "filler"
    filler.write_bytes(b"0" * (shutil.disk_usage(folder).free - 4096))
    with pytest.raises(OSError, match=r"cannot write .*No space left on device.* What was finished before is kept"):
        trainer.train()
    assert list(trainer.tuner.experts) == ["task_0"]
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    with pytest.raises(OSError, match=r"cannot write .*Read-only file system.* make the folder writable"):
        trainer.train()
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    trainer.train()
    assert_same_experts(experts_of(trainer), experts_of(whole))
    assert make_trainer(places["out"], **arguments).train().global_step == 0


# --- signals, and two runs ---

RUN = """
    import os, signal, sys
    sys.path[:0] = {path!r}
    os.environ["HF_DATASETS_CACHE"] = {folder!r}
    from pathlib import Path
    from helpers import make_trainer
    from transformers import TrainerCallback

    class Wait(TrainerCallback):
        begun = 0

        def on_train_begin(self, *args, **kwargs):
            self.begun += 1

        def on_step_end(self, args, state, control, **kwargs):
            if self.begun == 2:
                Path({folder!r}, "ready").touch()
                while True:  # until a signal comes
                    pass

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    make_trainer(Path({folder!r}) / "out", num_train_epochs=1, callbacks=[Wait()]).train()
"""


def test_a_second_run_is_kept_out_until_ctrl_c_which_says_how_to_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(package_utils, "LOCK_SECONDS", 0.1)
    code = RUN.format(folder=str(tmp_path), path=[str(TESTS), *sys.path])
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)
    before = files_in(tmp_path / "out")
    second = make_trainer(tmp_path / "out", num_train_epochs=1)
    message = r"another run is at work in \S+out\. Wait for its end"
    for act in (second.train, lambda: second.train_task(second.stream[0]), lambda: second.delete_adapter("task_0")):
        with pytest.raises(RuntimeError, match=message):
            act()
    assert files_in(tmp_path / "out") == before
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert re.search(r"Interrupted: 1 of 3 tasks are finished, and kept in \S+out\. To go on, call train\(\)", errors)
    assert second.train().global_step == 4
    assert list(second.tuner.experts) == ["task_0", "task_1", "task_2"]


def test_a_run_locks_its_folder_while_it_lasts_and_no_longer(out, cache):
    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.append((out / LOCK_NAME).exists())
            if len(seen) == 2:
                raise FloatingPointError

    trainer = make_trainer(out, callbacks=[Look()], **cache)
    with pytest.raises(FloatingPointError):
        trainer.train()
    assert LOCK_NAME not in files_in(out)
    trainer.train()
    trainer.delete_adapter("task_0")
    assert seen == [True] * 4
    assert LOCK_NAME not in files_in(out)
    with FileLock(out / LOCK_NAME, timeout=0):  # nobody holds it
        pass


@pytest.mark.parametrize("drift", [-1e9, 1e9])
def test_a_clock_that_is_set_changes_nothing(whole, out, cache, monkeypatch, drift):
    calls, real = [0], time.time

    def jumping():
        calls[0] += 1
        return real() + drift * calls[0]

    monkeypatch.setattr(time, "time", jumping)
    trainer = make_trainer(out, **cache)
    trainer.train_task(trainer.stream[0])
    for file in out.rglob("*"):  # and files from the future, or of long ago
        os.utime(file, (max(0, real() + drift), max(0, real() + drift)))
    again = make_trainer(out, **cache)
    again.train()
    assert calls[0] > 0
    assert_same_experts(experts_of(again), experts_of(whole))
    assert all(task["seconds"] >= 0 for task in read_json(out / "results.json")["tasks"])
