"""What goes wrong in a long run: it stops where it has to, says where, and keeps what was finished."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from helpers import (
    NAMES,
    assert_same,
    expert_tensors,
    files_in,
    make_arguments,
    make_images,
    make_splits,
    make_trainer,
    make_vit,
    read_json,
)
from transformers import TrainerCallback

from peft_luca import TaskStream
from peft_luca import utils as cache
from peft_luca.hub.validation import MAX_NUMBER
from peft_luca.utils import LOCK_NAME


def experts(trainer):
    return {name: expert_tensors(trainer.model, name) for name in trainer.tuner.experts}


# --- losses and weights that are no numbers ---


class Spoil(TrainerCallback):
    """Puts a number into the weights of a task, counted from 1, before or after one of its steps."""

    def __init__(self, task, number, after_training=False):
        self.task, self.number, self.after_training = task, number, after_training

    def spoil(self, model):
        if len(model.base_model.experts) == self.task:
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).view(-1)[0] = self.number

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if not self.after_training and state.global_step == 2:
            self.spoil(model)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if self.after_training:
            self.spoil(model)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("cached", [True, False])
def test_a_loss_that_is_no_number_stops_its_task_and_no_other(out, tmp_path, number, cached):
    settings = {"cache_features": cached, "features_cache_dir": str(tmp_path / "features")}
    trainer = make_trainer(out, callbacks=[Spoil(2, number)], **settings)
    with pytest.raises(
        FloatingPointError, match=r"task 'task_1', step 3: the loss is (nan|inf)\. The task is given up"
    ):
        trainer.train()
    assert list(trainer.tuner.experts) == ["task_0"]
    assert [task["name"] for task in read_json(out / "results.json")["tasks"]] == ["task_0"]
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    assert_same(expert_tensors(trainer.model, "task_0"), expert_tensors(whole.model, "task_0"))
    again = make_trainer(out, **settings)
    again.train()
    for name, tensors in experts(whole).items():
        assert_same(expert_tensors(again.model, name), tensors)


@pytest.mark.parametrize("number", [float("nan"), 2 * MAX_NUMBER])
def test_what_could_not_be_loaded_again_is_not_saved(out, number):
    """The last step may spoil the weights after the last loss."""
    trainer = make_trainer(out, callbacks=[Spoil(2, number, after_training=True)], statistics=False)
    with pytest.raises(FloatingPointError, match=r"task 'task_1', step 6: luca_\S+ holds numbers that are not finite"):
        trainer.train()
    assert not (out / "task_1").exists()
    assert make_trainer(out, statistics=False).train().global_step == 12


def test_a_learning_rate_beyond_reason_is_told(out):
    with pytest.raises(FloatingPointError, match=r"task 'task_0'.*learning_rate below 1e\+30"):
        make_trainer(out, learning_rate=1e30).train()


# --- numbers of steps ---


def test_no_epochs_make_experts_of_class_means(out):
    trainer = make_trainer(out, num_train_epochs=0)
    assert trainer.train().global_step == 0
    assert trainer.results()["task_known_accuracy"] > 0.8
    again = make_trainer(out, num_train_epochs=0)
    again.train()
    for name, tensors in experts(trainer).items():
        assert_same(expert_tensors(again.model, name), tensors)


def test_so_many_steps_for_each_task(out):
    trainer = make_trainer(out, max_steps=1)
    assert trainer.train().global_step == 3
    assert [task["steps"] for task in read_json(out / "results.json")["tasks"]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 0}, "max_steps must be a number of steps above 0, or -1"),
        ({"max_steps": -2}, "max_steps must be .*, got -2"),
        ({"num_train_epochs": -1}, "num_train_epochs must be a number of at least 0, got -1"),
        ({"num_train_epochs": float("nan")}, "num_train_epochs must be .*, got nan"),
        ({"fp16": True}, "fp16=True needs an accelerator.* Use bf16=True"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, got 0"),
        ({"per_device_eval_batch_size": -1}, "per_device_eval_batch_size must be at least 1, got -1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be at least 1, got 0"),
    ],
)
def test_settings_that_would_be_passed_over_are_refused(out, settings, message):
    with pytest.raises(ValueError, match=message):
        make_arguments(out, **settings)
    assert not out.exists()


def test_a_batch_larger_than_the_task(out):
    trainer = make_trainer(out, per_device_train_batch_size=1000)
    assert trainer.train().global_step == 9
    assert trainer.results()["task_known_accuracy"] > 0.8
    with pytest.raises(
        ValueError, match=r"'task_0' has 16 images, fewer than a batch of 1000, and dataloader_drop_last"
    ):
        make_trainer(out / "drop", per_device_train_batch_size=1000, dataloader_drop_last=True).train()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_last_batch_of_one(out, cached, accumulated):
    """Of 16 images, in batches of five; accumulated, it is a step of its own."""
    settings = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": accumulated, "num_train_epochs": 2}
    trainer = make_trainer(out, cache_features=cached, **settings)
    assert trainer.train().global_step == 3 * 2 * (4 if accumulated == 1 else 2)
    assert trainer.results()["task_known_accuracy"] > 0.8


class Stop(TrainerCallback):
    def __init__(self, event):
        def stop(args, state, control, **kwargs):
            control.should_training_stop = True

        setattr(self, event, stop)


@pytest.mark.parametrize(("event", "steps"), [("on_step_end", 1), ("on_epoch_end", 2), ("on_log", 1)])
def test_a_callback_that_stops_early_stops_its_task_alone(out, event, steps):
    trainer = make_trainer(out, callbacks=[Stop(event)])
    assert trainer.train().global_step == 3 * steps
    assert list(trainer.tuner.experts) == ["task_0", "task_1", "task_2"]
    assert trainer.results()["task_known_accuracy"] > 0.8


# --- images without labels ---


def test_images_without_labels_are_predicted_and_not_evaluated(out):
    trainer = make_trainer(out)
    trainer.train()
    test = trainer.stream[0].test
    unlabelled = test.remove_columns("labels")
    predicted = trainer.predict(unlabelled)
    assert predicted.label_ids is None
    assert (predicted.predictions == trainer.predict(test).predictions).all()
    assert predicted.predictions.shape == (8, 6)
    with pytest.raises(ValueError, match=r"columns \['image'\], but needs its global labels in a column 'labels'"):
        trainer.evaluate(unlabelled)


def test_images_to_evaluate_come_in_any_format_and_under_their_name(out):
    trainer = make_trainer(out, num_train_epochs=1)
    trainer.train()
    test = trainer.stream[0].test
    loss = trainer.evaluate(test)["eval_loss"]
    for kind in ("numpy", "torch"):
        assert trainer.evaluate(test.with_format(kind))["eval_loss"] == loss
    assert trainer.evaluate(test.to_iterable_dataset())["eval_loss"] == loss
    renamed = test.rename_column("image", "img")
    for act in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match=r"columns \['img', 'labels'\], but needs its images in a column 'image'"):
            act(renamed)
    for labels in (["red"] * 8, [None] * 8, [99] * 8, [-1] * 8):
        odd = test.remove_columns("labels").add_column("labels", labels)
        with pytest.raises(ValueError, match=f"an image has the label {labels[0]}, but the experts' classes are"):
            trainer.evaluate(odd)


def test_a_stream_without_test_images_has_no_figures_and_no_nan(out):
    trainer = make_trainer(out, TaskStream.from_tasks([make_images(NAMES[:2]), make_images(NAMES[2:4])]))
    trainer.train()
    assert trainer.evaluate() == {"eval_accuracy_matrix": [[None, None], [None, None]]}
    assert "last_accuracy" not in read_json(out / "results.json")


# --- interrupted ---

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
            if self.begun == {task} and state.global_step == 2:
                Path({folder!r}, "ready").touch()
                while True:  # until a signal comes
                    pass

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job passes it over
    make_trainer(Path({folder!r}) / "out", callbacks=[Wait()]).train()
"""


def started(folder, task):
    """A run in a process of its own, that waits within a task, counted from 1."""
    code = RUN.format(folder=str(folder), task=task, path=[str(Path(__file__).parents[1]), *sys.path])
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stderr=subprocess.PIPE, text=True)
    while not (folder / "ready").exists():
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)
    return process


def test_ctrl_c_prints_how_to_go_on(tmp_path):
    process = started(tmp_path, task=2)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode != 0
    assert re.search(r"Interrupted: 1 of 3 tasks are finished, and kept in \S+out\. To go on, call train\(\)", errors)
    assert "KeyboardInterrupt" in errors
    trainer = make_trainer(tmp_path / "out")
    assert trainer.train().global_step == 12
    assert list(trainer.tuner.experts) == ["task_0", "task_1", "task_2"]


# --- two runs ---


def test_two_runs_in_one_folder(tmp_path, monkeypatch):
    """The first one's lock keeps the second out, and goes when the first is killed."""
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    process = started(tmp_path, task=2)
    before = files_in(tmp_path / "out")
    second = make_trainer(tmp_path / "out")
    message = r"another run is at work in \S+out, and two would overwrite each other's experts"
    for act in (second.train, lambda: second.train_task(second.stream[0]), lambda: second.delete_adapter("task_0")):
        with pytest.raises(RuntimeError, match=message):
            act()
    assert files_in(tmp_path / "out") == before
    process.kill()
    process.wait()
    process.stderr.close()
    second.train()
    assert not (tmp_path / "out" / LOCK_NAME).exists()
    assert list(second.tuner.experts) == ["task_0", "task_1", "task_2"]


def test_a_run_keeps_its_folder_while_it_lasts_and_no_longer(out):
    seen = []

    class Look(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            seen.append((out / LOCK_NAME).exists())

    trainer = make_trainer(out, callbacks=[Look()])
    trainer.train()
    trainer.train_task(make_splits(NAMES[:2], seed=9), "more")
    trainer.delete_adapter("more")
    assert seen == [True] * 4
    assert LOCK_NAME not in files_in(out)
    with FileLock(out / LOCK_NAME, timeout=0):  # nobody holds it
        pass


def test_a_failed_run_lets_go_of_its_folder(out):
    trainer = make_trainer(out, callbacks=[Spoil(1, float("nan"))])
    with pytest.raises(FloatingPointError):
        trainer.train()
    assert not (out / LOCK_NAME).exists()
    make_trainer(out).train()


# --- clocks ---


@pytest.mark.parametrize("drift", [-1e9, 1e9])
def test_a_clock_that_is_set_changes_nothing(tmp_path, monkeypatch, drift):
    steady = make_trainer(tmp_path / "steady", features_cache_dir=str(tmp_path / "a"))
    steady.train()
    calls, real = [0], time.time

    def jumping():
        calls[0] += 1
        return real() + drift * calls[0]

    monkeypatch.setattr(time, "time", jumping)
    jumped = make_trainer(tmp_path / "jumped", features_cache_dir=str(tmp_path / "b"))
    jumped.train_task(jumped.stream[0])
    for file in (tmp_path / "jumped").rglob("*"):  # and files from the future, or of long ago
        os.utime(file, (max(0, real() + drift), max(0, real() + drift)))
    again = make_trainer(tmp_path / "jumped", features_cache_dir=str(tmp_path / "b"))
    assert again.train().global_step == 12
    assert calls[0] > 0
    for name, tensors in experts(steady).items():
        assert_same(expert_tensors(again.model, name), tensors)
    assert again.evaluate()["eval_accuracy_matrix"] == steady.evaluate()["eval_accuracy_matrix"]
    assert all(task["seconds"] >= 0 for task in read_json(tmp_path / "jumped" / "results.json")["tasks"])


# --- bases as they come ---


@pytest.mark.parametrize("labels", [0, 1, 1000])
def test_a_base_of_any_number_of_labels(out, tmp_path, labels):
    trainer = make_trainer(out, model=make_vit(num_labels=labels))
    trainer.train()
    usual = make_trainer(tmp_path / "usual")
    usual.train()
    assert trainer.results()["accuracy_matrix"] == usual.results()["accuracy_matrix"]
    assert_same(expert_tensors(trainer.model, "task_0"), expert_tensors(usual.model, "task_0"))
    base = trainer.tuner.unload()
    assert base.config.num_labels == labels


@pytest.mark.parametrize("training", [True, False])
def test_a_base_in_any_mode_whose_dropout_moves_nothing(out, tmp_path, training):
    """Dropout of a half in every layer: were it at work, no two passes would agree."""
    dropout = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    trainer = make_trainer(out, model=make_vit(**dropout).train(training), cache_features=False, num_train_epochs=1)
    trainer.train()
    calm = make_trainer(tmp_path / "calm", model=make_vit(hidden_dropout_prob=0.0), num_train_epochs=1)
    calm.train()
    for name in calm.tuner.experts:
        for key, tensor in expert_tensors(calm.model, name).items():
            torch.testing.assert_close(expert_tensors(trainer.model, name)[key], tensor, rtol=5e-3, atol=5e-4)
    test = trainer.stream[0].test
    assert len({trainer.evaluate(test)["eval_loss"] for _ in range(3)}) == 1
    trainer.model.train()
    assert torch.equal(*(trainer.tuner.pooled_features(torch.ones(2, 3, 16, 16)) for _ in range(2)))


def test_weights_on_the_meta_device_are_refused(out):
    with torch.device("meta"):
        model = make_vit()
    with pytest.raises(ValueError, match=r"on the meta device, where there are none.*from_pretrained"):
        make_trainer(out, model=model)
    assert not out.exists()
