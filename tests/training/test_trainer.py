import math
import re

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Image, Value
from helpers import (
    COLORS,
    NAMES,
    ForwardCount,
    assert_same,
    draw,
    expert_tensors,
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
    trunk_tensors,
)
from peft import PeftModel, get_peft_model
from transformers import HfArgumentParser, SwinConfig, SwinForImageClassification, TrainerCallback

from peft_luca import ContinualTrainer, ContinualTrainingArguments, LucaConfig, TaskStream, load_experts
from peft_luca.training.arguments import CONFIG_RECIPES, RECIPES
from peft_luca.training.metrics import summarize


class Diary(TrainerCallback):
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


class Killer(TrainerCallback):
    """Raises in the given task, counted from 1, after `step` steps."""

    def __init__(self, task, step=2):
        self.task, self.step, self.begun = task, step, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun += 1

    def on_step_end(self, args, state, control, **kwargs):
        if self.begun == self.task and state.global_step == self.step:
            raise KeyboardInterrupt


def experts_of(trainer):
    return {name: expert_tensors(trainer.model, name) for name in trainer.tuner.experts}


def assert_same_experts(first, second):
    assert list(first) == list(second)
    for name in first:
        assert_same(first[name], second[name])


# --- arguments and recipes ---


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fills_what_was_left_unset(tmp_path, recipe):
    args = ContinualTrainingArguments(str(tmp_path / "out"), recipe=recipe)
    for name, value in RECIPES[recipe].items():
        assert getattr(args, name) == value, name
    assert args.max_grad_norm == 0.0
    assert args.save_strategy == "no"
    assert not (tmp_path / "out").exists()


def test_a_recipe_leaves_what_was_set(tmp_path):
    chosen = {"learning_rate": 0.5, "num_train_epochs": 2, "per_device_train_batch_size": 3, "l1_weight": 0.0}
    chosen |= {"negatives": "own", "augmentation": False, "schedule_per_epoch": False, "max_grad_norm": 1.0}
    chosen |= {"lr_scheduler_type": "linear", "optim": "adamw_torch"}
    args = ContinualTrainingArguments(str(tmp_path), recipe="paper", **chosen)
    assert {name: getattr(args, name) for name in chosen} == chosen
    assert args.optim_args is None  # the recipe's momentum is not for another optimizer


def test_the_papers_recipe(tmp_path):
    args = ContinualTrainingArguments(str(tmp_path), recipe="paper")
    assert (args.learning_rate, args.num_train_epochs, args.per_device_train_batch_size) == (0.025, 20, 48)
    assert (args.l1_weight, args.negatives, args.augmentation, args.schedule_per_epoch) == (5e-4, "seen", True, True)
    assert (args.optim, args.optim_args, args.lr_scheduler_type) == ("sgd", "momentum=0.9", "cosine")
    assert args.weight_decay == 0.0
    assert CONFIG_RECIPES["paper"]["init_rows"] == "zeros"
    assert CONFIG_RECIPES["paper"]["scale"] == 1.0
    assert CONFIG_RECIPES["paper"]["positive_scale"] is False
    assert CONFIG_RECIPES["paper"]["reference"] is False


def test_arguments_from_a_command_line(tmp_path):
    (args,) = HfArgumentParser(ContinualTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--recipe", "paper", "--learning_rate", "0.3", "--augmentation", "False"]
    )
    assert (args.recipe, args.learning_rate, args.augmentation, args.num_train_epochs) == ("paper", 0.3, False, 20)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe": "mine"}, "recipe must be one of 'own', 'paper', got 'mine'"),
        ({"negatives": "all"}, "negatives must be one of 'own', 'seen', got 'all'"),
        ({"l1_weight": -1.0}, "l1_weight must be a finite number of at least 0"),
        ({"l1_weight": float("nan")}, "l1_weight must be a finite number of at least 0"),
        ({"router": "guess"}, "there is no router called 'guess'"),
        (
            {"recipe": "paper", "lr_scheduler_type": "linear"},
            "schedule_per_epoch needs lr_scheduler_type='cosine'",
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
            "load_best_model_at_end would load",
        ),
    ],
)
def test_wrong_arguments(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        ContinualTrainingArguments(str(tmp_path / "out"), **values)
    assert not (tmp_path / "out").exists()


# --- bad input: refused before anything is written ---


def swin():
    config = SwinConfig(image_size=16, patch_size=4, embed_dim=32, depths=[1], num_heads=[2], window_size=2)
    return SwinForImageClassification(config)


def no_cls(out):
    make_trainer(out, model=swin())


def increment(out):
    make_trainer(out, make_stream(increment=7))


def class_in_no_expert(out):
    make_trainer(out, make_stream(order=[*NAMES[:5], "mauve"]))


def task_without_images(out):
    make_trainer(out, TaskStream.from_tasks([make_images(), make_images().select([])]))


def labels_outside(out):
    splits = make_splits()
    test = splits["test"].map(lambda row, i: {"label": -1 if i == 3 else row["label"]}, with_indices=True)
    make_trainer(out, TaskStream.from_dataset(DatasetDict(train=splits["train"], test=test)))


def test_labels_unknown(out):
    splits = DatasetDict(train=make_images(NAMES[:3]), test=make_images(NAMES[:4]))
    with pytest.raises(ValueError, match="outside the label space"):
        make_trainer(out, TaskStream.from_dataset(splits))
    assert not out.exists()


def features_disagree(out):
    make_trainer(out, TaskStream.from_tasks([make_images(), make_images().rename_column("image", "picture")]))


def not_images(out):
    dataset = Dataset.from_dict(
        {"image": ["a", "b"], "label": [0, 1]}, features=Features(image=Value("string"), label=Value("int64"))
    )
    make_trainer(out, TaskStream.from_dataset(dataset, image_column="image"))


def class_named_twice(out):
    make_trainer(out, luca_config=LucaConfig(classes=["a", "a"]))


def classes_named(out):
    make_trainer(out, luca_config=LucaConfig(classes=["a", "b"]))


def reserved_name(out):
    make_trainer(out, TaskStream.from_tasks({"classifier": make_images()}))


def no_test_images(out):
    make_trainer(out, TaskStream.from_tasks([make_images()]), eval_strategy="epoch")


def no_stream(out):
    ContinualTrainer(make_vit(), make_arguments(out), processing_class=make_processor())


def no_processor(out):
    ContinualTrainer(make_vit(), make_arguments(out), make_stream())


def linear_of_one(out):
    make_trainer(out, make_stream(increment=5), luca_config=LucaConfig(head="linear"))


def too_narrow(out):
    make_trainer(out, luca_config=LucaConfig(reduction=64))


def expert_of_that_name(out):
    make_trainer(out, model=make_model({"task_1": ["x", "y"]}))


BAD = [
    (no_cls, r"does not read \[CLS\]"),
    (increment, "increment must be a whole number from 1 to the 6 classes, got 7"),
    (class_in_no_expert, "mauve"),
    (task_without_images, "every task needs at least one"),
    (labels_outside, "names no class"),
    (features_disagree, "no column 'image'"),
    (not_images, "must be decoded images"),
    (class_named_twice, "more than once"),
    (classes_named, "Leave classes out"),
    (reserved_name, "an expert cannot be called 'classifier'"),
    (no_test_images, "task 'task_0' has no test images"),
    (no_stream, "stream must be a TaskStream"),
    (no_processor, "processing_class must be the backbone's image processor"),
    (linear_of_one, "linear head needs at least two classes"),
    (too_narrow, "reduction is 64"),
    (expert_of_that_name, "task_1"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[make.__name__ for make, _ in BAD])
def test_bad_input_is_refused_before_anything_is_written(out, make, message):
    with pytest.raises(ValueError, match=message):
        make(out)
    assert not out.exists()


# --- a task's life ---


def test_one_task_is_one_training(out):
    diary = Diary()
    trainer = make_trainer(out, callbacks=[diary])
    result = trainer.train()
    assert diary.events == ["begin", "epoch", "epoch", "epoch", "end"] * 3
    assert result.global_step == 18
    assert trainer.tuner.experts == {f"task_{t}": NAMES[2 * t : 2 * t + 2] for t in range(3)}
    assert not any(p.requires_grad for p in trainer.model.parameters())
    steps = [step for step, logs in diary.logs if "loss" in logs]
    assert steps == list(range(1, 19))  # run on across tasks
    assert [step for step, logs in diary.logs if "train_runtime" in logs] == [6, 12, 18]
    assert [step for step, logs in diary.logs if "stage_last_accuracy" in logs] == [6, 12, 18]


def test_loss_parts_are_logged_under_their_own_names(out):
    diary = Diary()
    make_trainer(out, callbacks=[diary], l1_weight=0.01).train()
    parts = [logs for _, logs in diary.logs if "loss" in logs]
    assert len(parts) == 18
    for logs in parts:
        assert logs["loss"] == pytest.approx(logs["cross_entropy"] + logs["l1_penalty"], rel=1e-4)
        assert logs["l1_penalty"] > 0


def test_loss_parts_are_means_over_what_was_logged(out, tmp_path):
    fine, coarse = Diary(), Diary()
    make_trainer(out, callbacks=[fine]).train()
    make_trainer(tmp_path / "coarse", callbacks=[coarse], logging_steps=3).train()
    each = [logs["cross_entropy"] for _, logs in fine.logs if "loss" in logs]
    means = [logs["cross_entropy"] for _, logs in coarse.logs if "loss" in logs]
    assert means == pytest.approx(np.reshape(each, (-1, 3)).mean(axis=1).tolist(), rel=1e-5)


def test_the_loss_is_the_papers(out):
    """Cross-entropy + λ·Σ|θ| in float64, of the first step: before anything has moved."""
    diary = Diary()
    trainer = make_trainer(
        out, make_stream(increment=6), callbacks=[diary], per_device_train_batch_size=48, max_steps=1, l1_weight=0.003,
        class_mean_rows=False, learning_rate=1e-12, luca_config=LucaConfig(init_rows="random", scale=4.0),
    )  # fmt: skip
    trainer.train()
    task, layer = trainer.stream[0], trainer.tuner.layer
    features = trainer.features(task, "train")
    log_p = layer.expert_logits(features.features, "task_0").double().log_softmax(dim=1)
    expected = -float(log_p[torch.arange(48), features.labels].mean())
    ((_, logs),) = [entry for entry in diary.logs if "loss" in entry[1]]
    assert logs["cross_entropy"] == pytest.approx(expected, rel=1e-5)
    assert logs["l1_penalty"] == pytest.approx(0.003 * float(trainer.tuner.l1_penalty("task_0")), rel=1e-5)


def test_rows_end_as_class_means_of_adapted_features(out, tmp_path):
    trainer = make_trainer(out)
    trainer.train()
    for task in trainer.stream:
        features = trainer.features(task, "train")
        adapted = trainer.tuner.layer.luca(features.features, task.name).double()
        ids = [trainer.stream.classes.index(name) for name in task.classes]
        expected = torch.stack([adapted[features.labels == i].mean(dim=0) for i in ids])
        rows = trainer.tuner.layer.luca_class_rows[task.name]
        torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-5)
    kept = make_trainer(tmp_path / "kept", class_mean_rows=False)
    kept.train()
    assert not torch.equal(kept.tuner.layer.luca_class_rows["task_0"], trainer.tuner.layer.luca_class_rows["task_0"])


def test_figures_are_those_of_the_predictions(out):
    trainer = make_trainer(out)
    trainer.train()
    figures, model, processor = trainer.evaluate(), trainer.model, make_processor()
    names, known, routing, counts = list(trainer.tuner.experts), [], [], []
    accuracies = []
    for t, task in enumerate(trainer.stream):
        x = processor(images=task.test["image"][:], return_tensors="pt")["pixel_values"]
        wanted = [trainer.stream.classes[i] for i in task.test["labels"][:]]
        model.set_router("entropy")
        answered = [model.config.id2label[int(i)] for i in model(x).logits.argmax(1)]
        accuracies.append(np.mean([a == w for a, w in zip(answered, wanted, strict=True)]))
        routing.append(float((model.route(x).expert == t).double().mean()))
        model.set_adapter(names[t])
        answered = [task.classes[int(i)] for i in model(x).logits.argmax(1)]
        known.append(np.mean([a == w for a, w in zip(answered, wanted, strict=True)]))
        counts.append(len(wanted))
    matrix = np.array(
        [[np.nan if v is None else v for v in row] for row in figures["eval_accuracy_matrix"]], dtype=float
    )
    assert matrix[-1].tolist() == accuracies
    assert np.isnan(matrix[np.triu_indices(3, 1)]).all()
    assert figures["eval_last_accuracy"] == pytest.approx(np.mean(accuracies))
    assert figures["eval_task_known_accuracy"] == pytest.approx(np.mean(known))
    assert figures["eval_routing_accuracy"] == pytest.approx(np.mean(routing))
    assert figures["eval_average_accuracy"] == pytest.approx(
        np.mean([np.mean(matrix[stage, : stage + 1]) for stage in range(3)])
    )
    for name, value in summarize(matrix, counts, known, routing).items():
        assert figures[f"eval_{name}"] == pytest.approx(value)
    assert read_json(out / "results.json")["last_accuracy"] == figures["eval_last_accuracy"]
    assert figures["eval_last_accuracy"] > 0.6  # the colours can be learnt


def test_evaluate_needs_something_learnt(out):
    with pytest.raises(ValueError, match="nothing to evaluate: no task has been learnt"):
        make_trainer(out).evaluate()


@pytest.mark.parametrize("before", [False, True])
def test_evaluating_images_with_the_streams_labels(out, before):
    """Also where the model has experts of classes that the stream does not know, which come first in its labels."""
    trainer = make_trainer(out, model=make_model({"old": ["x", "y", NAMES[5]]}) if before else None)
    trainer.train()
    for t, task in enumerate(trainer.stream):
        metrics = trainer.evaluate(task.test)
        assert metrics["eval_accuracy"] == trainer.evaluate()["eval_accuracy_matrix"][-1][t]


def test_evaluation_within_a_task(out):
    diary = Diary()
    trainer = make_trainer(out, callbacks=[diary], eval_strategy="epoch", num_train_epochs=2)
    trainer.train()
    logs = [(step, logs) for step, logs in diary.logs if "eval_loss" in logs]
    assert [step for step, _ in logs] == [2, 4, 6, 8, 10, 12]
    assert all(0 <= entry["eval_accuracy"] <= 1 for _, entry in logs)
    assert diary.events == ["begin", "epoch", "evaluate", "epoch", "evaluate", "end"] * 3


@pytest.mark.parametrize("images", [8, 9])
def test_accumulated_batches_are_one_batch(out, tmp_path, images):
    stream = make_stream(train=images)
    whole = make_trainer(out, stream, per_device_train_batch_size=8)
    parts = make_trainer(tmp_path / "parts", stream, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert whole.train().global_step == parts.train().global_step
    for name, tensors in experts_of(whole).items():
        for key, tensor in expert_tensors(parts.model, name).items():
            torch.testing.assert_close(tensor, tensors[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("recipe", ["own", "paper"])
def test_features_need_not_be_cached(out, tmp_path, recipe):
    settings = {"recipe": recipe, "augmentation": False}
    cached, plain = make_trainer(out, **settings), make_trainer(tmp_path / "plain", cache_features=False, **settings)
    cached.train()
    plain.train()
    for name, tensors in experts_of(cached).items():
        for key, tensor in expert_tensors(plain.model, name).items():
            torch.testing.assert_close(tensor, tensors[key], rtol=5e-3, atol=5e-4)


def test_a_backbone_of_no_known_size_can_be_trained_without_a_reference(out):
    """What the error tells one to do must work."""
    model = make_vit()
    model.config.__dict__["image_size"] = None
    with pytest.raises(ValueError, match=r"Use LucaConfig\(reference=False\)"):
        make_trainer(out, model=model).train()
    model = make_vit()
    model.config.__dict__["image_size"] = None
    trainer = make_trainer(out, model=model, luca_config=LucaConfig(reference=False))
    trainer.train()
    assert len(trainer.tuner.experts) == 3


def test_one_seed_one_result_and_another_another(out, tmp_path):
    first, second, third = (make_trainer(tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2)))
    for trainer in (first, second, third):
        trainer.train()
    assert_same_experts(experts_of(first), experts_of(second))
    assert not torch.equal(
        first.tuner.layer.luca_adapter_up["task_0"].weight, third.tuner.layer.luca_adapter_up["task_0"].weight
    )


def test_an_expert_that_cannot_be_added_is_not_left_behind(out, monkeypatch):
    trainer = make_trainer(out)
    monkeypatch.setattr("peft_luca.tuner.model.LucaModel.compute_reference", _out_of_memory)
    with pytest.raises(MemoryError, match="enough"):
        trainer.train()
    monkeypatch.undo()
    trainer.train()
    assert len(trainer.tuner.experts) == 3


def _out_of_memory(*args):
    raise MemoryError("not enough")


# --- the paper's recipe ---


def test_papers_training(out):
    diary, earlier = Diary(), {}

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

    # 18 images in batches of 8: three steps an epoch
    trainer = make_trainer(out, make_stream(train=9), recipe="paper", callbacks=[diary, Watch()], num_train_epochs=4)
    trainer.train()
    assert len(earlier["task_2"]) == 2
    rates = [logs["learning_rate"] for _, logs in diary.logs if "loss" in logs]
    assert rates == pytest.approx(
        [0.025 * 0.5 * (1 + math.cos(math.pi * epoch / 4)) for _ in range(3) for epoch in range(4) for _ in range(3)]
    )
    first = [logs["cross_entropy"] for step, logs in diary.logs if "loss" in logs and step in (1, 13, 25)]
    assert first[0] == pytest.approx(math.log(2))  # two zero rows: all the same
    assert first[1] != pytest.approx(math.log(2), abs=1e-3)  # over four rows by then
    assert trainer.tuner.experts["task_2"] == NAMES[4:]


def test_negatives_are_all_rows_seen(out):
    """The first step's loss in the third task is over all six classes, with the earlier experts' rows."""
    diary = Diary()
    trainer = make_trainer(
        out, recipe="paper", augmentation=False, callbacks=[diary], num_train_epochs=1, class_mean_rows=False,
        per_device_train_batch_size=16, learning_rate=1e-12, luca_config=LucaConfig(init_rows="random"),
    )  # fmt: skip
    trainer.train()
    layer, task = trainer.tuner.layer, trainer.stream[2]
    features = trainer.features(task, "train")
    scores, _ = layer.scores(features.features, ["task_2"])
    expected = -scores[:, 0].double().log_softmax(dim=1)[torch.arange(16), features.labels].mean().item()
    assert scores.shape[2] == 6
    logs = [logs for step, logs in diary.logs if "loss" in logs and step == 3]
    assert logs[0]["cross_entropy"] == pytest.approx(expected, rel=1e-4)


def test_augmentation_runs_the_trunk_for_every_view(out):
    model = make_vit()
    count = ForwardCount(model)
    make_trainer(out, make_stream(increment=6), model=model, recipe="paper", num_train_epochs=3).train()
    # Views; the images themselves for the class means; the test images; the reference, which names the backbone.
    assert count.images == 3 * 48 + 48 + 24 + 192


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fills_the_config_of_plain_and_of_fresh_wrapped_models(out, tmp_path, recipe):
    plain = make_trainer(out, recipe=recipe).luca_config
    wrapped = make_trainer(tmp_path / "b", model=get_peft_model(make_vit(), LucaConfig()), recipe=recipe).luca_config
    for name, value in CONFIG_RECIPES[recipe].items():
        assert getattr(plain, name) == value, name
        assert getattr(wrapped, name) == value, name
    chosen = LucaConfig(scale=3.0, arrangement="parallel")
    set_by_user = make_trainer(tmp_path / "c", luca_config=chosen, recipe=recipe).luca_config
    assert (set_by_user.scale, set_by_user.arrangement) == (3.0, "parallel")
    assert chosen.init_rows is None  # the user's own object is left alone


# --- models of every state ---


def test_plain_and_fresh_wrapped_give_the_same(out, tmp_path):
    plain = make_trainer(out)
    plain.train()
    for i, config in enumerate((None, LucaConfig())):
        wrapped = make_trainer(tmp_path / str(i), model=get_peft_model(make_vit(), LucaConfig()), luca_config=config)
        wrapped.train()
        assert wrapped.tuner.experts == plain.tuner.experts
        assert_same_experts(experts_of(wrapped), experts_of(plain))


def test_a_trained_expert_of_the_bases_own_labels_is_kept(out):
    model = make_model({"default": LucaConfig()})
    before = expert_tensors(model, "default")
    trainer = make_trainer(out, model=model)
    trainer.train()
    assert list(trainer.tuner.experts) == ["default", "task_0", "task_1", "task_2"]
    assert_same(expert_tensors(trainer.model, "default"), before)


def test_experts_that_are_there_are_kept_and_take_part(out, tmp_path):
    model = make_model({"old": ["x", NAMES[0]], "older": ["y"]})
    before = {name: expert_tensors(model, name) for name in ("old", "older")}
    trainer = make_trainer(out, model=model)
    trainer.train()
    assert list(trainer.tuner.experts) == ["old", "older", "task_0", "task_1", "task_2"]
    assert trainer.tuner.classes[:3] == ("x", NAMES[0], "y")
    for name, tensors in before.items():
        assert_same(expert_tensors(trainer.model, name), tensors)
    alone = make_trainer(tmp_path / "alone")
    alone.train()
    for name in alone.tuner.experts:
        assert_same(expert_tensors(trainer.model, name), expert_tensors(alone.model, name))


def test_one_more_task_from_a_dataset(out):
    stream = make_stream(names=NAMES[:4], order=NAMES[:4])
    trainer = make_trainer(out, stream)
    trainer.train()
    before = experts_of(trainer)
    output = trainer.train_task(make_splits(NAMES[4:]), "more")
    assert output.global_step == 6
    assert trainer.tuner.experts["more"] == NAMES[4:]
    assert len(stream) == 3
    for name, tensors in before.items():
        assert_same(expert_tensors(trainer.model, name), tensors)
    assert [task["name"] for task in read_json(out / "results.json")["tasks"]] == ["task_0", "task_1", "more"]
    with pytest.raises(ValueError, match="there is an expert 'more' already"):
        trainer.train_task(stream[2])
    assert trainer.train().global_step == 0  # nothing is left


def test_a_refused_dataset_is_not_in_the_stream(out):
    trainer = make_trainer(out, make_stream(names=NAMES[:4], order=NAMES[:4]))
    with pytest.raises(ValueError, match="an expert cannot be called 'classifier'"):
        trainer.train_task(make_splits(NAMES[4:]), "classifier")
    assert len(trainer.stream) == 2
    assert not out.exists() or files_in(out) == []


def test_a_task_of_another_stream_is_refused(out):
    trainer = make_trainer(out, make_stream(names=NAMES[:4], order=NAMES[:4]))
    with pytest.raises(ValueError, match="stream"):
        trainer.train_task(make_stream(order=NAMES[::-1])[0])
    assert not isinstance(trainer.model, PeftModel)


def test_a_linear_head(out):
    trainer = make_trainer(out, luca_config=LucaConfig(head="linear"))
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_last_accuracy"])
    assert trainer.model(pixels()).logits.isfinite().all()


def test_new_domains_of_the_same_classes(out):
    rng = np.random.default_rng(0)
    rows = [(name, domain) for domain in ("plain", "dark") for name in NAMES[:3] for _ in range(8)]
    dataset = Dataset.from_dict(
        {
            "image": [draw(np.array(COLORS[name]) // (1 + (domain == "dark")), rng) for name, domain in rows],
            "label": [name for name, _ in rows],
            "domain": [domain for _, domain in rows],
        },
        features=Features(image=Image(), label=Value("string"), domain=Value("string")),
    )
    stream = TaskStream.from_domains(DatasetDict(train=dataset, test=dataset), domain_order=["plain", "dark"])
    trainer = make_trainer(out, stream)
    trainer.train()
    assert {name: set(classes) for name, classes in trainer.tuner.experts.items()} == {
        "plain": set(NAMES[:3]),
        "dark": set(NAMES[:3]),
    }
    assert len(trainer.tuner.classes) == trainer.model.config.num_labels == 3
    assert trainer.model(pixels()).logits.shape == (6, 3)
    assert trainer.evaluate()["eval_last_accuracy"] > 0.5


def test_deleting_a_task_afterwards(out):
    trainer = make_trainer(out)
    trainer.train()
    trainer.model.delete_adapter("task_0")
    figures = trainer.evaluate()
    assert figures["eval_accuracy_matrix"][-1][0] is None  # not measured any more
    trainer.train_task(make_splits(NAMES[:2], seed=5), "again")
    assert list(trainer.tuner.experts) == ["task_1", "task_2", "again"]


# --- killed and started again ---


@pytest.mark.parametrize("killed_in", [1, 2, 3])
def test_going_on_gives_the_same_to_the_bit_and_does_nothing_twice(out, tmp_path, killed_in):
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    killed = make_trainer(out, callbacks=[Killer(killed_in)])
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert (out / "results.json").exists() == (killed_in > 1)
    if killed_in > 1:
        done = [task["name"] for task in read_json(out / "results.json")["tasks"]]
        assert done == [f"task_{t}" for t in range(killed_in - 1)]
    diary = Diary()
    again = make_trainer(out, callbacks=[diary])
    result = again.train()
    assert diary.events.count("begin") == 3 - (killed_in - 1)
    assert result.global_step == 6 * (3 - (killed_in - 1))
    assert next(step for step, logs in diary.logs if "loss" in logs) == 6 * (killed_in - 1) + 1
    assert_same_experts(experts_of(again), experts_of(whole))
    x = pixels()
    assert torch.equal(again.model(x).logits, whole.model(x).logits)
    first, second = (read_json(folder / "results.json") for folder in (out, tmp_path / "whole"))
    for results in (first, second):
        for task in results["tasks"]:
            del task["seconds"]
    assert first == second
    for file in files_in(tmp_path / "whole"):
        if file != "results.json":
            assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file


def test_a_task_that_failed_leaves_the_model_as_it_was_and_can_be_tried_again(out, tmp_path):
    for folder, model in ((out, make_vit()), (tmp_path / "wrapped", make_model({"old": ["x", "y"]}))):
        x = pixels()
        expected, labels = model(x).logits, dict(model.config.id2label)
        killer = Killer(1)
        trainer = make_trainer(folder, model=model, callbacks=[killer])
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert torch.equal(trainer.model(x).logits, expected)
        assert trainer.model.config.id2label == labels
        trainer.train()
        assert list(trainer.tuner.experts)[-3:] == ["task_0", "task_1", "task_2"]


def test_test_images_that_cannot_be_read_do_not_stop_the_trainer_for_good(out):
    """A failure after the training, while a task is measured, leaves neither half a record nor half a model."""
    trainer = make_trainer(out)
    real = trainer.features

    def fail(task, split):
        if (task.name, split) == ("task_1", "test"):
            raise OSError("broken image")
        return real(task, split)

    trainer.features = fail
    with pytest.raises(OSError, match="broken image"):
        trainer.train()
    del trainer.features
    trainer.train()
    assert [task["name"] for task in read_json(out / "results.json")["tasks"]] == ["task_0", "task_1", "task_2"]
    assert (out / "task_1" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.3}, r"other settings \(learning_rate: \S+ there, 0\.3 now\)"),
        ({"num_train_epochs": 4}, "num_train_epochs: 3 there, 4 now"),
        ({"recipe": "paper"}, "recipe: 'own' there, 'paper' now"),
        ({"seed": 8}, "seed: 7 there, 8 now"),
        ({"luca_config": LucaConfig(reduction=4)}, "luca_config: .*'reduction': 16.*'reduction': 4"),
        ({"stream": make_stream(order=NAMES[::-1])}, "run of another stream: its task 'task_0' has 16 train images"),
        ({"stream": make_stream(train=9)}, "run of another stream.* has 16 train images .* has 18 of"),
        ({"stream": make_stream(names=NAMES[:2], order=NAMES[:2])}, "its task 'task_1' is not among"),
        ({"model": make_vit(seed=1)}, "was trained on the backbone"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_another_run_in_the_same_folder_is_refused(out, changes, message):
    make_trainer(out, num_train_epochs=3).train()
    before = {file: (out / file).read_bytes() for file in files_in(out)}
    other = make_trainer(out, **changes)
    with pytest.raises(ValueError, match=message):
        other.train()
    assert {file: (out / file).read_bytes() for file in files_in(out)} == before


def test_going_on_can_be_refused(out):
    make_trainer(out).train()
    with pytest.raises(ValueError, match=r"holds a run of 3 tasks. Choose another output_dir"):
        make_trainer(out).train(resume_from_checkpoint=False)
    with pytest.raises(ValueError, match="not from the checkpoint 'x'"):
        make_trainer(out).train(resume_from_checkpoint="x")


def test_a_longer_stream_goes_on(out, tmp_path):
    make_trainer(out, make_stream(names=NAMES[:4], order=NAMES[:4])).train()
    longer = make_trainer(out)
    assert longer.train().global_step == 6
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    assert_same_experts(experts_of(longer), experts_of(whole))


def test_damaged_results_are_told(out):
    make_trainer(out).train()
    (out / "results.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="does not hold the results of a run"):
        make_trainer(out).train()


# --- what is printed and written ---


def test_a_line_for_a_person(out, monkeypatch):
    lines = []
    monkeypatch.setattr(ContinualTrainer, "_print", lambda self, line: lines.append(line))
    make_trainer(out).train()
    assert len(lines) == 3
    pattern = r"task 2/3 task_1 \(blue, yellow\), \d+\.\d s: accuracy [01]\.\d{3} over 4 classes, [01]\.\d{3} with the"
    assert re.match(pattern, lines[1])


def test_save_model_is_a_collection(out, tmp_path):
    trainer = make_trainer(out)
    with pytest.raises(ValueError, match="no expert to save: no task has been learnt"):
        trainer.save_model(str(tmp_path / "model"))
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    loaded, x = load_experts(make_vit(), tmp_path / "model"), pixels()
    assert torch.equal(loaded(x).logits, trainer.model(x).logits)
    assert (tmp_path / "model" / "preprocessor_config.json").is_file()


def test_the_backbone_is_as_it_was(out):
    vit = make_vit()
    before = trunk_tensors(vit)
    trainer = make_trainer(out, model=vit, weight_decay=0.1)
    trainer.train()
    assert_same(trunk_tensors(trainer.model), before)


@pytest.mark.parametrize("scale", [0.1, 7.3])
def test_an_untrained_default_is_taken_off_whatever_its_scale(out, scale):
    wrapped = get_peft_model(make_vit(), LucaConfig(scale=scale))
    trainer = make_trainer(out, model=wrapped)
    trainer.train()
    assert "default" not in trainer.tuner.experts
    assert trainer.luca_config.scale == scale


@pytest.mark.parametrize("changes", [{"statistics_rank": 3}, {"adam_beta1": 0.5}, {"routing_scope": "batch"}])
@pytest.mark.filterwarnings("ignore:routing_scope='batch':UserWarning")
def test_every_setting_that_moves_a_figure_is_the_runs(out, changes):
    make_trainer(out).train()
    with pytest.raises(ValueError, match=f"other settings .*{next(iter(changes))}"):
        make_trainer(out, **changes).train()


def test_a_router_that_lacks_the_statistics_of_given_experts_prints_so_before_training(out):
    model = make_model({"old": ["x", "y"]})
    with pytest.raises(ValueError, match="old"):
        make_trainer(out, model=model, router="gaussian")
    assert not out.exists()


def test_another_router_is_measured_by_itself(out):
    trainer = make_trainer(out)
    trainer.train()
    assert "eval_forgetting" in trainer.evaluate()
    trainer.tuner.set_router("gaussian")
    metrics = trainer.evaluate()
    assert metrics["eval_last_accuracy"] is not None
    assert not {"eval_forgetting", "eval_average_accuracy", "eval_backward_transfer"} & set(metrics)
    assert metrics["eval_accuracy_matrix"][:-1] == [[None] * 3] * 2
    trainer.tuner.set_router("entropy", temperature=2.0)
    assert "eval_forgetting" not in trainer.evaluate()


@pytest.mark.filterwarnings("error:routed accuracy:UserWarning")
def test_experts_that_share_classes_are_no_leak(out):
    stream = TaskStream.from_tasks([make_splits(seed=seed) for seed in (0, 1)])
    trainer = make_trainer(out, stream)
    trainer.train()
    trainer._records[-1].update(accuracy=[1.0, 1.0], task_known=[0.5, 0.5])
    assert trainer._figures()["last_accuracy"] == 1.0


def test_an_evaluation_set_without_global_labels_is_refused(out):
    trainer = make_trainer(out)
    trainer.train()
    with pytest.raises(ValueError, match="needs its global labels in a column 'labels'"):
        trainer.evaluate(make_splits()["test"])


def test_what_has_no_place_is_refused(out):
    with pytest.raises(ValueError, match="model must be an image classifier or a PeftModel, got str"):
        make_trainer(out, model="google/vit")
    trainer = make_trainer(out)
    with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'val'"):
        trainer.features(trainer.stream[0], "val")


def test_refuses_a_backbone_that_carries_another_trainers_experts(tmp_path):
    """As in a notebook whose cell is run again: the first trainer's experts stay as they are."""
    vit = make_vit()
    first = make_trainer(tmp_path / "first", make_stream(increment=6), model=vit)
    first.train()
    before = {name: tensor.clone() for name, tensor in first.tuner.layer.tensors("task_0").items()}
    with pytest.raises(ValueError, match=r"experts of another PeftModel.*trainer\.model\.unload\(\)"):
        make_trainer(tmp_path / "second", make_stream(increment=6), model=vit)
    after = first.tuner.layer.tensors("task_0")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_an_interrupted_run_goes_on_with_the_backbone_taken_off(out):
    class Interrupt(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if len(run.tuner.experts) == 2:
                raise KeyboardInterrupt

    vit = make_vit()
    run = make_trainer(out, make_stream(), model=vit)
    run.add_callback(Interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert len(run.results()["tasks"]) == 1
    again = make_trainer(out, make_stream(), model=run.model.unload())
    assert again.model is vit
    again.train()
    whole = make_trainer(out / "whole", make_stream(), model=make_vit())
    whole.train()
    assert again.results()["accuracy_matrix"] == whole.results()["accuracy_matrix"]
