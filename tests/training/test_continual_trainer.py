"""`ContinualTrainer`: the loop over a stream, its logs and figures, and what it takes of `Trainer`'s arguments."""

import json
import math
import re
import warnings
from concurrent.futures import Future
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from datasets import ClassLabel, DatasetDict
from helpers import (
    NAMES,
    ForwardCount,
    assert_same,
    assert_same_experts,
    expert_tensors,
    experts_of,
    files_in,
    make_arguments,
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
from peft import PeftModel, get_peft_model
from transformers import SwinConfig, SwinForImageClassification, Trainer, TrainerCallback

from peft_luca import ContinualTrainer, ImageCollator, LucaConfig, TaskStream, load_experts
from peft_luca.training import continual_trainer, publishing
from peft_luca.training.arguments import CONFIG_RECIPES, RECIPES
from peft_luca.training.metrics import COMPARING_STAGES, summarize


FOUR = NAMES[:4]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """[CLS] of the same images, computed once for the tests of this file."""
    return {"features_cache_dir": str(tmp_path_factory.mktemp("features"))}


@pytest.fixture(scope="module")
def learned(tmp_path_factory, cache):
    """A finished run of three tasks, for tests that do not change it."""
    events, lines = Events(), []
    trainer = make_trainer(tmp_path_factory.mktemp("learned") / "out", callbacks=[events], **cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continual_trainer, "print_line", lambda args, line: lines.append(line))
        trainer.output = trainer.train()
    trainer.events, trainer.lines = events, lines
    return trainer


class Events(TrainerCallback):
    """Writes down what a trainer does."""

    def __init__(self):
        self.events, self.logs = [], []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append("begin")

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")

    def on_epoch_end(self, args, state, control, **kwargs):
        self.events.append("epoch")

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.events.append("evaluate")

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, dict(logs)))

    def steps_with(self, name):
        return [step for step, logs in self.logs if name in logs]


# --- bad input: refused before anything is written ---


def no_cls(out):
    config = SwinConfig(image_size=16, patch_size=4, embed_dim=32, depths=[1], num_heads=[2], window_size=2)
    make_trainer(out, model=SwinForImageClassification(config))


def labels_unknown(out):
    make_trainer(out, TaskStream.from_dataset(DatasetDict(train=make_images(NAMES[:3]), test=make_images(FOUR))))


BAD = [
    (no_cls, r"does not read \[CLS\]"),
    (labels_unknown, "outside the label space"),
    (lambda out: make_trainer(out, luca_config=LucaConfig(classes=["a", "b"])), "Leave classes out"),
    (lambda out: make_trainer(out, luca_config=LucaConfig(reduction=64)), "reduction is 64"),
    (lambda out: make_trainer(out, TaskStream.from_tasks({"classifier": make_images()})), "cannot be called 'classif"),
    (
        lambda out: make_trainer(out, TaskStream.from_tasks([make_images()]), eval_strategy="epoch"),
        "task 'task_0' has no test images",
    ),
    (lambda out: make_trainer(out, model=make_model({"task_1": ["x", "y"]})), "there is an expert 'task_1' already"),
    (lambda out: make_trainer(out, TaskStream.from_tasks({"plots": make_images()}), plots=True), "called 'plots'"),
    (
        lambda out: ContinualTrainer(make_vit(), make_arguments(out), processing_class=make_processor()),
        "stream must be a TaskStream",
    ),
    (
        lambda out: ContinualTrainer(make_vit(), make_arguments(out), make_stream()),
        "processing_class must be the backbone's image processor",
    ),
    (lambda out: make_trainer(out, model="google/vit"), "model must be an image classifier or a PeftModel, got str"),
    (
        lambda out: make_trainer(out, model=make_model({"old": ["x", "y"]}), router="gaussian"),
        "old",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message[:20] for _, message in BAD])
def test_bad_input_is_refused_before_anything_is_written(out, make, message):
    with pytest.raises(ValueError, match=message):
        make(out)
    assert not out.exists()


def test_a_backbone_that_carries_another_trainers_experts_is_refused(out, cache):
    """As in a notebook whose cell is run again: the first trainer's experts stay as they are."""
    vit = make_vit()
    first = make_trainer(out, make_stream(increment=6), model=vit, num_train_epochs=0, **cache)
    first.train()
    before = experts_of(first)
    with pytest.raises(ValueError, match=r"experts of another PeftModel.*trainer\.model\.unload\(\)"):
        make_trainer(out / "second", make_stream(increment=6), model=vit)
    assert_same_experts(experts_of(first), before)
    assert make_trainer(out, make_stream(increment=6), model=first.model.unload(), **cache).model is vit


# --- a task's life ---


def test_each_task_is_one_training_that_all_callbacks_see(learned):
    assert isinstance(learned, Trainer)
    assert learned.events.events[:15] == ["begin", "epoch", "epoch", "epoch", "end"] * 3
    assert learned.output.global_step == learned.state.global_step == learned.state.max_steps == 18
    assert learned.tuner.experts == {f"task_{t}": NAMES[2 * t : 2 * t + 2] for t in range(3)}
    assert not any(p.requires_grad for p in learned.model.parameters())


def test_logs_of_all_tasks_stay_and_their_steps_run_on(learned):
    assert learned.events.steps_with("loss") == list(range(1, 19))
    assert learned.events.steps_with("train_runtime") == [6, 12, 18]
    assert learned.events.steps_with("stage_last_accuracy") == [6, 12, 18]
    for t in range(3):  # a curve for each task
        assert learned.events.steps_with(f"task_{t}/loss") == list(range(6 * t + 1, 6 * t + 7))
    history = [entry for entry in learned.state.log_history if "loss" in entry]
    assert [(entry["step"], entry["task"]) for entry in history] == [(i + 1, f"task_{i // 6}") for i in range(18)]


def test_dashboards_get_losses_and_accuracies_by_the_names_of_the_tasks(out, cache):
    events = Events()
    trainer = make_trainer(out, callbacks=[events], report_to=["tensorboard"], eval_strategy="epoch", **cache)
    trainer.train()
    matrix = trainer.results()["accuracy_matrix"]
    for t in range(3):
        curve = [logs[f"task_{t}/accuracy"] for _, logs in events.logs if f"task_{t}/accuracy" in logs]
        assert curve == [row[t] for row in matrix[t:]]
        assert len(events.steps_with(f"task_{t}/eval_accuracy")) == 3
    assert not any("task_0/accuracy" in entry for entry in trainer.state.log_history)  # which would grow with T²
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (folder,) = {path.parent for path in out.parent.rglob("events.out.tfevents*")}
    accumulator = board.EventAccumulator(str(folder)).Reload()
    assert len(accumulator.Scalars("train/task_0/accuracy")) == 3


def test_a_search_of_hyperparameters_is_refused_with_what_to_do(learned):
    with pytest.raises(ValueError, match=r"hyperparameter_search cannot be used: .* an ExpertTrainer in each"):
        learned.hyperparameter_search(n_trials=2)


def test_a_run_warns_of_nothing_that_its_user_cannot_mend(out, cache):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(out, **cache).train()
    assert [str(warning.message) for warning in caught] == []


def test_a_line_for_each_task(learned):
    assert len(learned.lines) == 3
    share = r"[01]\.\d{3}"
    accuracy = rf"accuracy {share} over 4 classes \({share} by entropy\), {share} with the task known"
    pattern = rf"task 2/3 task_1 \(blue, yellow\), \d+\.\d s: {accuracy}, right expert {share}$"
    assert re.match(pattern, learned.lines[1])


def test_figures_are_those_of_the_predictions(learned):
    figures, model, processor = learned.evaluate(), learned.model, make_processor()
    names, known, routing, counts, accuracies, by_entropy = list(learned.tuner.experts), [], [], [], [], []
    for t, task in enumerate(learned.stream):
        x = processor(images=task.test["image"][:], return_tensors="pt")["pixel_values"]
        wanted = [learned.stream.classes[i] for i in task.test["labels"][:]]
        model.set_router("entropy")
        predicted = [model.config.id2label[int(i)] for i in model(x).logits.argmax(1)]
        by_entropy.append(np.mean([a == w for a, w in zip(predicted, wanted, strict=True)]))
        model.set_router("auto")
        predicted = [model.config.id2label[int(i)] for i in model(x).logits.argmax(1)]
        accuracies.append(np.mean([a == w for a, w in zip(predicted, wanted, strict=True)]))
        routing.append(float((model.route(x).expert == t).double().mean()))
        model.set_adapter(names[t])
        predicted = [task.classes[int(i)] for i in model(x).logits.argmax(1)]
        known.append(np.mean([a == w for a, w in zip(predicted, wanted, strict=True)]))
        counts.append(len(wanted))
    model.set_router("auto")
    rows = figures["eval_accuracy_matrix"]
    matrix = np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=float)
    assert matrix[-1].tolist() == accuracies
    assert np.isnan(matrix[np.triu_indices(3, 1)]).all()
    for name, value in summarize(matrix, counts, known, routing).items():
        assert figures[f"eval_{name}"] == pytest.approx(value)
    assert figures["eval_entropy_accuracy"] == pytest.approx(np.average(by_entropy, weights=counts))
    results = read_json(learned.folder.path / "results.json")
    assert results["last_accuracy"] == figures["eval_last_accuracy"] > 0.6  # the colours can be learned
    assert results["stage_forgetting"] == figures["eval_stage_forgetting"]
    assert len(results["stage_forgetting"]) == len(results["stage_accuracies"]) == 3


def test_another_router_is_measured_by_itself(learned):
    assert "eval_forgetting" in learned.evaluate()
    for router, options in (("nearest", {}), ("entropy", {"temperature": 2.0})):
        learned.tuner.set_router(router, **options)
        metrics = learned.evaluate()
        assert metrics["eval_last_accuracy"] is not None
        assert not {f"eval_{name}" for name in COMPARING_STAGES} & set(metrics)
        assert metrics["eval_accuracy_matrix"][:-1] == [[None] * 3] * 2
    learned.tuner.set_router("auto")


@pytest.mark.filterwarnings("error:routed accuracy:UserWarning")
def test_experts_that_share_classes_are_no_leak(out, cache):
    stream = TaskStream.from_tasks([make_splits(FOUR, seed=seed) for seed in (0, 1)])
    trainer = make_trainer(out, stream, num_train_epochs=0, **cache)
    trainer.train()
    trainer._records[-1].update(accuracy=[1.0, 1.0], task_known=[0.5, 0.5])
    assert trainer.results()["last_accuracy"] == 1.0


def test_evaluation_within_a_task(out, cache):
    events, settings = Events(), {"num_train_epochs": 2, "cache_features": False, "recipe": "paper", **cache}
    make_trainer(out, callbacks=[events], eval_strategy="epoch", **settings).train()
    assert events.steps_with("eval_loss") == [2, 4, 6, 8, 10, 12]
    assert events.events == ["begin", "epoch", "evaluate", "epoch", "evaluate", "end"] * 3
    assert all(0 <= logs["eval_accuracy"] <= 1 for _, logs in events.logs if "eval_accuracy" in logs)


def test_another_seed_gives_another_expert(learned, out, cache):
    trainer = make_trainer(out, seed=8, **cache)
    trainer.train_task(trainer.stream[0])
    weights = [t.tuner.layer.luca_adapter_up["task_0"].weight for t in (trainer, learned)]
    assert not torch.equal(*weights)


# --- recipes ---


def test_the_papers_training(out):
    events, earlier = Events(), {}

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            tuner = model.base_model
            task = list(tuner.experts)[-1]
            assert not tuner.layer.luca_class_rows[task].any()  # zero rows
            assert tuner.layer.luca_scale[task].item() == 1.0
            assert not tuner.peft_config[task].reference
            earlier[task] = {name: expert_tensors(model, name) for name in tuner.experts if name != task}

        def on_train_end(self, args, state, control, model=None, **kwargs):
            for name, tensors in earlier[list(model.base_model.experts)[-1]].items():
                assert_same(expert_tensors(model, name), tensors)

    model = make_vit()
    count = ForwardCount(model)
    # 18 images in batches of 8: three steps an epoch
    trainer = make_trainer(
        out, make_stream(FOUR, names=FOUR, train=9), model, recipe="paper", callbacks=[events, Watch()],
        num_train_epochs=4, features_cache_dir=str(out / "features"),
    )  # fmt: skip
    trainer.train()
    rates = [logs["learning_rate"] for _, logs in events.logs if "loss" in logs]
    expected = [0.025 * 0.5 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4) for _ in "abc"]
    assert rates == pytest.approx(expected * 2)
    first = [logs["cross_entropy"] for step, logs in events.logs if "loss" in logs and step in (1, 13)]
    assert first[0] == pytest.approx(math.log(2))  # two zero rows: all the same
    assert first[1] != pytest.approx(math.log(2), abs=1e-3)  # over four rows by then
    # Each augmented view; the images themselves for the class means; the test images; the reference, once.
    assert count.images == 4 * 36 + 36 + 16 + 192


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fills_the_template_of_plain_and_of_wrapped_models(out, recipe):
    plain = make_trainer(out, recipe=recipe).luca_config
    wrapped = make_trainer(out, model=get_peft_model(make_vit(), LucaConfig()), recipe=recipe).luca_config
    for name, value in CONFIG_RECIPES[recipe].items():
        assert getattr(plain, name) == getattr(wrapped, name) == value, name
    chosen = LucaConfig(scale=3.0, arrangement="parallel")
    set_by_user = make_trainer(out, luca_config=chosen, recipe=recipe).luca_config
    assert (set_by_user.scale, set_by_user.arrangement) == (3.0, "parallel")
    assert chosen.init_rows is None  # the user's own object is left alone


# --- models of every state ---


def test_a_template_is_taken_off_and_gives_the_same_experts(learned, out, cache):
    wrapped = make_trainer(out, model=get_peft_model(make_vit(), LucaConfig()), **cache)
    wrapped.train()
    assert_same_experts(experts_of(wrapped), experts_of(learned))


def test_dropout_of_the_backbone_moves_nothing(out):
    """Dropout of a half in every layer: were it at work, no two passes would agree."""
    dropout = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    stream = make_stream(FOUR[:2], names=FOUR[:2])
    trainer = make_trainer(out, stream, make_vit(**dropout).train(), cache_features=False)
    calm = make_trainer(out / "calm", stream, make_vit(hidden_dropout_prob=0.0), cache_features=False)
    trainer.train()
    calm.train()
    for key, tensor in expert_tensors(calm.model, "task_0").items():
        torch.testing.assert_close(expert_tensors(trainer.model, "task_0")[key], tensor, rtol=5e-3, atol=5e-4)
    test = trainer.stream[0].test
    assert len({trainer.evaluate(test)["eval_loss"] for _ in range(2)}) == 1


def test_an_expert_called_default_is_kept_once_it_was_trained_or_its_classes_were_named(out):
    trained = get_peft_model(make_vit(), LucaConfig())
    trained.train()
    named = get_peft_model(make_vit(), LucaConfig(classes=["a", "b"]))
    for model in (trained, named):
        assert list(make_trainer(out, model=model).tuner.experts) == ["default"]
    template = get_peft_model(make_vit(), LucaConfig(scale=7.3))
    trainer = make_trainer(out, model=template)
    assert not isinstance(trainer.model, PeftModel)
    assert trainer.luca_config.scale == 7.3


def test_experts_that_are_there_are_kept_and_take_part(learned, out, cache):
    model = make_model({"old": ["x", NAMES[0]], "older": ["y"]})
    before = {name: expert_tensors(model, name) for name in ("old", "older")}
    trainer = make_trainer(out, model=model, **cache)
    trainer.train()
    assert list(trainer.tuner.experts) == ["old", "older", "task_0", "task_1", "task_2"]
    assert trainer.tuner.classes[:3] == ("x", NAMES[0], "y")
    for name, tensors in before.items():
        assert_same(expert_tensors(trainer.model, name), tensors)
    for name, tensors in experts_of(learned).items():
        assert_same(expert_tensors(trainer.model, name), tensors)
    for t, task in enumerate(trainer.stream):  # labels of the stream are those of the model, in another order
        assert trainer.evaluate(task.test)["eval_accuracy"] == trainer.evaluate()["eval_accuracy_matrix"][-1][t]


def test_a_backbone_of_no_known_size_is_trained_without_a_reference(out):
    model = make_vit()
    model.config.__dict__["image_size"] = None
    stream = make_stream(increment=6)
    trainer = make_trainer(out, stream, model)
    trainer.train()
    config = trainer.tuner.peft_config["task_0"]
    assert (config.reference, config.whitening) == (False, False)
    with pytest.raises(ValueError, match=r"Use LucaConfig\(reference=False\)"):
        make_trainer(out / "other", stream, trainer.model.unload(), luca_config=LucaConfig(reference=True)).train()


def test_a_run_of_a_version_without_whitening_goes_on_without(out):
    """The statistics of all experts need one reference."""
    trainer = make_trainer(out, make_stream(FOUR, names=FOUR), luca_config=LucaConfig(whitening=False))
    trainer.train_task(trainer.stream[0])
    results = read_json(out / "results.json")
    del results["settings"]["luca_config"]["whitening"]
    (out / "results.json").write_text(json.dumps(results))
    again = make_trainer(out, make_stream(FOUR, names=FOUR))
    again.train()
    assert [config.whitening for config in again.tuner.peft_config.values()] == [False, False]


# --- one more task ---


def test_a_refused_dataset_is_not_in_the_stream(out):
    trainer = make_trainer(out, make_stream(FOUR, names=FOUR))
    with pytest.raises(ValueError, match="an expert cannot be called 'classifier'"):
        trainer.train_task(make_splits(NAMES[4:]), "classifier")
    assert len(trainer.stream) == 2
    with pytest.raises(ValueError, match="is not of the trainer's stream"):
        trainer.train_task(make_stream(order=NAMES[::-1])[0])
    assert not isinstance(trainer.model, PeftModel)
    assert files_in(out) == []


def test_an_expert_that_cannot_be_finished_is_not_left_behind(out, monkeypatch, cache):
    def fail(*args):
        raise MemoryError("not enough")

    wrapped, x = make_model({"old": ["x", "y"]}), pixels()
    for folder, model in ((out, make_vit()), (out / "wrapped", wrapped)):
        expected, labels = model(x).logits, dict(model.config.id2label)
        trainer = make_trainer(folder, make_stream(FOUR, names=FOUR), model, num_train_epochs=1, **cache)
        for place in ("tuner.model.LucaModel.compute_reference", "training.continual_trainer.measure"):
            monkeypatch.setattr(f"peft_luca.{place}", fail)
            with pytest.raises(MemoryError, match="enough"):
                trainer.train()
            monkeypatch.undo()
            assert torch.equal(trainer.model(x).logits, expected)
            assert trainer.model.config.id2label == labels
        trainer.train()
        assert list(trainer.tuner.experts)[-2:] == ["task_0", "task_1"]


def test_a_callback_that_stops_early_stops_its_task_alone(out, cache):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    trainer = make_trainer(out, callbacks=[Stop], **cache)
    assert trainer.train().global_step == 3
    assert list(trainer.tuner.experts) == ["task_0", "task_1", "task_2"]


def test_no_epochs_and_a_number_of_steps(out, cache):
    means = make_trainer(out, num_train_epochs=0, **cache)
    assert means.train().global_step == 0
    assert means.results()["task_known_accuracy"] > 0.8
    trainer = make_trainer(out / "steps", max_steps=1, **cache)
    assert trainer.train().global_step == 3
    assert [task["steps"] for task in trainer.results()["tasks"]] == [1, 1, 1]


# --- images that are handed over ---


def test_images_to_evaluate_and_to_predict(learned):
    test = learned.stream[0].test
    loss, accuracy = (learned.evaluate(test)[f"eval_{name}"] for name in ("loss", "accuracy"))
    grey = test.with_transform(lambda batch: {**batch, "image": [image.convert("L") for image in batch["image"]]})
    for other in (test.to_iterable_dataset(), "task_0"):
        assert learned.evaluate(other)["eval_loss"] == loss
    assert learned.evaluate(grey)["eval_loss"] != loss  # its transform is applied
    assert learned.evaluate({"one": test})["eval_one_accuracy"] == accuracy
    predicted = learned.predict(test.remove_columns("labels"))
    assert predicted.label_ids is None
    assert predicted.predictions.shape == (8, 6)
    assert (predicted.predictions == learned.predict(test).predictions).all()


def test_classes_are_matched_by_name(learned):
    test = learned.stream[0].test
    names = list(reversed(learned.stream.classes))  # numbered otherwise than in the stream
    own = [names.index(learned.stream.classes[label]) for label in test["labels"]]
    own = test.remove_columns("labels").add_column("labels", own).cast_column("labels", ClassLabel(names=names))
    accuracy = learned.evaluate(test)["eval_accuracy"]
    assert accuracy > 0.6
    for same in (own, own.rename_column("labels", "label")):
        assert learned.evaluate(same)["eval_accuracy"] == accuracy
        assert learned.predict(same).metrics["test_accuracy"] == accuracy
    others = own.cast_column("labels", ClassLabel(names=["mauve", *names[1:]]))
    for use in (learned.evaluate, learned.predict):
        with pytest.raises(ValueError, match="values outside the label space of the train images: 'mauve'"):
            use(others.map(lambda row: {"labels": 0}))


def test_images_that_cannot_be_evaluated_are_refused(learned):
    test = learned.stream[0].test
    with pytest.raises(ValueError, match=r"eval_dataset needs a column 'labels' or 'label' .*, but has \['image'\]"):
        learned.evaluate(test.remove_columns("labels"))
    odd = test.remove_columns("labels").add_column("labels", [99] * 8)
    with pytest.raises(ValueError, match="an image has the label 99, but the experts' classes are"):
        learned.evaluate(odd)
    with pytest.raises(ValueError, match=r"no task 'task_9' with test images, only task_0"):
        learned.evaluate("task_9")


def test_a_stream_without_test_images_has_no_figures_and_no_nan(out):
    trainer = make_trainer(out, TaskStream.from_tasks([make_images(NAMES[:2]), make_images(NAMES[2:4])]))
    with pytest.raises(ValueError, match="nothing to evaluate: no task has been learned"):
        trainer.evaluate()
    trainer.train()
    assert trainer.evaluate() == {"eval_accuracy_matrix": [[None, None], [None, None]]}
    assert "last_accuracy" not in read_json(out / "results.json")
    trainer.log_metrics("eval", trainer.evaluate() | {"eval_steps": 1})


# --- every argument and method of Trainer ---


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_dataset": make_images()}, "train_dataset cannot be used here: the tasks of the stream"),
        ({"eval_dataset": make_images()}, r"eval_dataset cannot be used here: .* evaluate\(\)"),
        ({"data_collator": ImageCollator(make_processor(), "image")}, "data_collator cannot .* processing_class"),
        (
            {"optimizers": (torch.optim.SGD(make_vit().parameters(), lr=1.0), None)},
            "optimizers cannot .* optimizer_cls_and_kwargs",
        ),
        ({"model_init": make_vit}, "model_init cannot be used here: .* Make a trainer for each trial"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_without_a_meaning_are_refused_by_name(out, given, message):
    with pytest.raises(ValueError, match=message):
        ContinualTrainer(make_vit(), make_arguments(out), make_stream(), None, make_processor(), **given)
    assert not out.exists()


def test_every_other_argument_is_used_for_every_task(out, cache):
    calls = {"loss": 0, "metrics": 0, "logits": 0}

    def loss(outputs, labels, num_items_in_batch=None):
        calls["loss"] += 1
        return torch.nn.functional.cross_entropy(outputs.logits, labels) * 0

    def metrics(prediction, compute_result=True):
        calls["metrics"] += compute_result
        assert prediction.inputs is not None
        return {"mine": 1.0}

    def logits(predicted, labels):
        calls["logits"] += 1
        return predicted

    arguments = make_arguments(
        out, num_train_epochs=1, eval_strategy="epoch", include_for_metrics=["inputs"], batch_eval_metrics=True,
        class_mean_rows=False, l1_weight=0.0, **cache,
    )  # fmt: skip
    trainer = ContinualTrainer(
        make_vit(), arguments, make_stream(), None, make_processor(), compute_loss_func=loss, compute_metrics=metrics,
        preprocess_logits_for_metrics=logits, optimizers=(None, None),
        optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 1e6}),
    )  # fmt: skip
    trainer.train()  # with a loss of 0, which a step size of 1e6 cannot move
    assert calls == {"loss": 3 * (2 + 1), "metrics": 3, "logits": 3}
    assert trainer.evaluate(trainer.stream[0].test)["eval_mine"] == 1.0


def test_the_last_lines_of_transformers_image_classification_example(learned, capsys):
    metrics = learned.output.metrics
    assert {"train_runtime", "train_loss", "total_flos", "last_accuracy"} <= set(metrics)
    learned.log_metrics("train", metrics)
    learned.save_metrics("train", metrics)
    evaluated = learned.evaluate()
    learned.log_metrics("eval", evaluated)
    learned.save_metrics("eval", evaluated)
    learned.save_state()
    printed = capsys.readouterr().out
    assert re.search(r"train_loss +=", printed)
    assert re.search(r"eval_last_accuracy +=", printed)
    assert read_json(learned.folder.path / "all_results.json")["eval_accuracy_matrix"][0][1] is None


EXAMPLE = {"finetuned_from": "google/vit", "tasks": "image-classification", "dataset": "digits", "tags": ["vision"]}


def test_a_push_takes_what_trainers_takes(learned, monkeypatch):
    pushed = {}
    monkeypatch.setattr(
        continual_trainer, "push_experts", lambda model, repo, **given: pushed.update(given, repo=repo)
    )
    monkeypatch.setattr(learned, "hub_model_id", "me/run")
    learned.push_to_hub("message", False, "hf_token", "trial", True, **EXAMPLE, model_name="x", language="en")
    del pushed["processing_class"]
    assert pushed.pop("results")["last_accuracy"] == learned.results()["last_accuracy"]
    assert pushed == {
        "repo": "me/run", "commit_message": "message", "blocking": False, "token": "hf_token", "revision": "trial",
        "private": True, "base_model": "google/vit", "datasets": "digits", "license": None,
        "card_data": {"language": "en", "tags": ["vision"], "model_name": "x"},
    }  # fmt: skip


def test_a_push_that_fails_in_the_background_is_repeated_after_the_next_task(out, cache, monkeypatch):
    pushed = []

    def push(model, repo, blocking, commit_message, **given):
        pushed.append((commit_message, blocking, list(model.experts)))
        done = Future()
        if len(pushed) == 1:
            raise ConnectionError("no network")
        done.set_exception(ConnectionError("cut off")) if len(pushed) == 2 else done.set_result("commit")
        return done

    monkeypatch.setattr(continual_trainer, "push_experts", push)
    monkeypatch.setattr(ContinualTrainer, "init_hf_repo", lambda self, **given: setattr(self, "hub_model_id", "me/x"))
    monkeypatch.setattr(publishing.logger, "warning", lambda line: warned.append(line))
    warned = []
    make_trainer(out, push_to_hub=True, num_train_epochs=0, **cache).train()
    names = ["task_0", "task_1", "task_2"]
    learned = [(f"{name} learned", False, names[: i + 1]) for i, name in enumerate(names)]
    assert pushed == [*learned, ("End of training", True, names)]
    assert ["no network" in line for line in warned] == [True, False]
    assert "cut off" in warned[1]


def test_plots_are_drawn_into_the_folder_and_into_tensorboard(learned):
    class Board(TrainerCallback):
        drawn: ClassVar = []
        tb_writer = SimpleNamespace(add_figure=lambda name, figure, step: Board.drawn.append((name, step)))

    learned.add_callback(Board)
    files = learned.save_plots()
    learned.remove_callback(Board)
    assert {file.parent for file in files} == {learned.folder.path / "plots"}
    assert [f"plots/{file.stem}" for file in files] == [name for name, _ in Board.drawn]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert {step for _, step in Board.drawn} == {18}


def test_a_card_takes_what_trainers_takes(learned):
    learned.create_model_card(**EXAMPLE, model_name="Colors", language="en", license="mit", dataset_args="all")
    text = (learned.folder.path / "README.md").read_text(encoding="utf-8")
    for line in ("license: mit", "language: en", "base_model: google/vit", "- digits", "- vision", "name: Colors"):
        assert line in text, line
    with pytest.raises(TypeError, match="datset"):
        learned.create_model_card(datset="typo")


def test_save_model_is_a_collection(learned, tmp_path):
    learned.save_model(str(tmp_path / "model"))
    loaded, x = load_experts(make_vit(), tmp_path / "model"), pixels()
    assert torch.equal(loaded(x).logits, learned.model(x).logits)
    assert (tmp_path / "model" / "preprocessor_config.json").is_file()


# --- on top of other people's runs ---


def test_two_runs_are_merged_and_learned_on_without_their_data(tmp_path):
    runs = {}
    for owner, names in (("ann", FOUR[:2]), ("ben", FOUR[2:])):
        runs[owner] = make_trainer(tmp_path / owner, TaskStream.from_tasks([make_splits(names)]))
        runs[owner].train()
    merged = load_experts(make_vit(), {owner: tmp_path / owner for owner in runs})
    before = {name: expert_tensors(merged, name) for name in merged.experts}
    stream = TaskStream.from_tasks([make_splits(NAMES[4:6])])
    trainer = make_trainer(tmp_path / "both", stream, model=merged)
    trainer.train()
    assert list(trainer.model.experts) == ["ann_task_0", "ben_task_0", "task_0"]
    for name, tensors in before.items():
        assert_same(expert_tensors(trainer.model, name), tensors)
    assert set(trainer.model.classes) == {*FOUR, *NAMES[4:6]}
    merged = load_experts(make_vit(), {owner: tmp_path / owner for owner in runs})
    again = make_trainer(tmp_path / "both", stream, model=merged)
    again.train()
    assert again.results() == trainer.results()
    with pytest.raises(ValueError, match=r"an expert 'task_0' already\. .* To resume a run, give the model as it was"):
        make_trainer(tmp_path / "both", stream, model=load_experts(make_vit(), tmp_path / "both"))
    answers = load_experts(make_vit(), tmp_path / "both").predict(make_splits(NAMES[4:6])["test"])
    assert answers == trainer.model.predict(make_splits(NAMES[4:6])["test"])


def test_what_another_trainer_has_deleted_is_not_pushed(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(continual_trainer, "push_experts", lambda model, *_, **__: pushed.append(list(model.experts)))
    first = make_trainer(tmp_path, hub_model_id="owner/run")
    first.hub_model_id = "owner/run"
    first.train()
    second = make_trainer(tmp_path)
    second.train()
    second.delete_adapter("task_0")
    first.push_to_hub()
    assert pushed == [["task_1", "task_2"]]
