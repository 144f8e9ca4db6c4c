"""`ExpertTrainer`: the loss and its steps, from features and from images, and every argument of `Trainer`."""

import math

import pytest
import torch
import torch.nn.functional as F
from datasets import ClassLabel
from helpers import NAMES, D, assert_same, expert_tensors, make_arguments, make_images, make_processor, make_vit
from peft import get_peft_model
from transformers import Trainer, TrainerCallback

from peft_luca import ExpertTrainer, FeatureDataset, ImageCollator, LucaConfig
from peft_luca.training import expert_trainer


CLASSES = list(NAMES[:3])


def make_features(images=12, classes=3, seed=0):
    """[CLS] of classes that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % classes
    centers = torch.randn(classes, D, generator=torch.Generator().manual_seed(9))
    return FeatureDataset(centers[labels] + torch.randn(images, D, generator=generator), labels)


def make_expert(**config):
    torch.manual_seed(0)
    config = {"classes": CLASSES, "init_rows": "random", "scale": 4.0, "whitening": False, **config}
    return get_peft_model(make_vit(), LucaConfig(**config), adapter_name="new")


class Logs(TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def train(folder, model=None, trainer_arguments=None, data=None, **arguments):
    """A trained expert, after a few large steps without class means."""
    settings = {"learning_rate": 0.1, "optim": "sgd", "num_train_epochs": 2, "class_mean_rows": False, **arguments}
    trainer = ExpertTrainer(
        make_expert() if model is None else model,
        make_arguments(folder, statistics=False, **settings),
        train_dataset=make_features() if data is None else data,
        **(trainer_arguments or {}),
    )
    trainer.train()
    return trainer


def tensors(trainer):
    return expert_tensors(trainer.model, "new")


def distance(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(tensors(one).values(), tensors(other).values(), strict=True))


# --- the loss and its steps ---


def test_it_is_a_trainer_that_trains_one_expert_and_nothing_else(out):
    model = make_expert()
    model.add_adapter("other", LucaConfig(classes=["x"]))
    before = {key: value.clone() for key, value in model.state_dict().items() if ".new" not in key}
    trainer = train(out, model, {"expert": "new"}, weight_decay=0.1)
    assert isinstance(trainer, Trainer)
    after = trainer.model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert distance(trainer, train(out)) > 0


def test_the_loss_is_cross_entropy_and_the_l1_norm(out):
    """In float64, of the first step: before anything has moved."""
    logs = Logs()
    trainer = train(out, None, {"callbacks": [logs]}, max_steps=1, learning_rate=1e-12, l1_weight=0.003)
    data = make_features()
    rows = torch.randperm(12, generator=torch.Generator().manual_seed(trainer.args.seed))[:8]
    log_p = trainer.tuner.expert_logits(data.features[rows], "new").double().log_softmax(dim=1)
    first = logs.logs[0]
    assert first["cross_entropy"] == pytest.approx(-float(log_p[torch.arange(8), data.labels[rows]].mean()), rel=1e-5)
    assert first["l1_penalty"] == pytest.approx(0.003 * float(trainer.tuner.l1_penalty("new")), rel=1e-5)
    assert first["loss"] == pytest.approx(first["cross_entropy"] + first["l1_penalty"], rel=1e-5)


def test_parts_of_the_loss_are_means_over_the_logged_steps(out):
    fine, coarse = Logs(), Logs()
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    train(out, None, {"callbacks": [fine]}, logging_steps=1, **settings)
    train(out, None, {"callbacks": [coarse]}, logging_steps=3, **settings)
    for part in ("loss", "cross_entropy", "l1_penalty"):
        each = torch.tensor([entry[part] for entry in fine.logs if "loss" in entry])
        means = torch.tensor([entry[part] for entry in coarse.logs if "loss" in entry])
        torch.testing.assert_close(means, each.reshape(-1, 3).mean(dim=1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("images", "smoothing"), [(12, 0.1), (9, 0.0)])
def test_accumulated_micro_batches_are_one_batch_however_uneven(out, images, smoothing):
    settings = {"learning_rate": 1.0, "l1_weight": 0.01, "label_smoothing_factor": smoothing, "max_steps": 1}
    whole = train(out, data=make_features(images), per_device_train_batch_size=12, **settings)
    parts = train(
        out, data=make_features(images), per_device_train_batch_size=4, gradient_accumulation_steps=3, **settings
    )
    assert distance(whole, parts) < 1e-5


def test_the_proximal_step_makes_zeros(out):
    trainer = train(out, l1_proximal=True, l1_weight=0.3, num_train_epochs=20)
    weights = torch.cat([p.flatten() for p in trainer.tuner.layer.luca_parameters("new").values()])
    assert (weights == 0).float().mean() > 0.5
    custom = {"optimizer_cls_and_kwargs": (torch.optim.Rprop, {"lr": 0.1})}
    for given, settings, kind in ((custom, {}, "Rprop"), ({}, {"optim": "adafactor"}, "Adafactor")):
        with pytest.raises(ValueError, match=f"l1_proximal needs SGD, Adam or AdamW, got {kind}"):
            train(out, None, given, l1_proximal=True, **settings)


def test_negatives_are_the_classes_of_all_experts(out):
    model = make_expert()
    model.add_adapter("old", LucaConfig(classes=["x", NAMES[1]], init_rows="random"))
    logs = Logs()
    settings = {"negatives": "seen", "max_steps": 1, "per_device_train_batch_size": 12, "learning_rate": 1e-12}
    trainer = train(
        out, model, {"expert": "new", "callbacks": [logs], "eval_dataset": make_features(seed=1)},
        eval_strategy="steps", **settings,
    )  # fmt: skip
    data = make_features()
    scores = trainer.tuner.scores(data.features, ["new"])[:, 0]
    assert scores.shape == (12, 4)
    assert logs.logs[0]["cross_entropy"] == pytest.approx(float(F.cross_entropy(scores, data.labels)), rel=1e-4)
    evaluated = trainer.tuner.scores(make_features(seed=1).features, ["new"])[:, 0].argmax(1)
    accuracy = next(entry["eval_accuracy"] for entry in logs.logs if "eval_accuracy" in entry)
    assert accuracy == pytest.approx(float((evaluated == data.labels).double().mean()))


def test_a_loss_that_is_not_finite_stops_the_training(out):
    data = make_features()
    data.features[5] = float("inf")
    with pytest.raises(FloatingPointError, match=r"expert 'new', step 1: the loss is nan.* learning_rate below 0\.1"):
        train(out, data=data, per_device_train_batch_size=12)


def test_a_weight_that_could_not_be_loaded_again_stops_the_training(out):
    class Spoil(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **kwargs):
            model.base_model.layer.luca_scale["new"].data.fill_(float("inf"))

    with pytest.raises(FloatingPointError, match=r"step 4: luca_scale\.new holds numbers that are not finite"):
        train(out, None, {"callbacks": [Spoil()]})


# --- a new expert ---


def test_a_new_expert_gets_reference_rows_and_statistics(out):
    model, data = make_expert(init_rows="class_means", whitening=True), make_features()
    arguments = make_arguments(out, num_train_epochs=0)
    trainer = ExpertTrainer(model, arguments, train_dataset=data)
    trainer.train()
    layer = trainer.tuner.layer
    assert layer.luca_reference_mean["new"].any()
    assert layer.luca_whitening["new"].any()
    adapted = layer.luca(data.features, "new").double()
    means = torch.stack([adapted[data.labels == label].mean(dim=0) for label in range(3)])
    torch.testing.assert_close(layer.luca_class_rows["new"].double(), means, rtol=1e-5, atol=1e-5)
    assert trainer.tuner.statistics["new"].classes == tuple(CLASSES)


def test_the_training_of_an_expert_can_be_continued(out):
    trainer = train(out, make_expert(init_rows="class_means"))
    before = tensors(trainer)
    again = train(out, trainer.model, {"new_expert": False}, learning_rate=0.0)
    assert_same(tensors(again), before)


# --- features and images ---


@pytest.mark.parametrize("negatives", ["own", "seen"])
def test_images_and_their_features_give_the_same_expert(out, negatives):
    images = make_images(CLASSES, 4).rename_column("label", "labels")
    settings = {"negatives": negatives, "learning_rate": 0.01}
    from_images = train(out, None, {"processing_class": make_processor()}, images, **settings)
    features = from_images._plain_features()
    from_features = train(out, data=features, **settings)
    assert distance(from_images, from_features) < 1e-4
    assert from_images.evaluate(images)["eval_loss"] == pytest.approx(
        from_features.evaluate(features)["eval_loss"], rel=1e-3
    )


def test_augmentation_is_for_training_alone(out, monkeypatch):
    drawn = []
    real = ImageCollator.__call__
    monkeypatch.setattr(
        ImageCollator, "__call__", lambda self, rows: drawn.append(self.augmentation) or real(self, rows)
    )
    images = make_images(CLASSES, 2).rename_column("label", "labels")
    given = {"processing_class": make_processor(), "eval_dataset": {"test": images}}
    trainer = train(out, None, given, images, augmentation=True, num_train_epochs=1)
    assert drawn == [True]
    drawn.clear()
    assert "eval_test_accuracy" in trainer.evaluate()
    assert drawn == [False]


def test_labels_that_are_named_otherwise_are_refused(out):
    images = make_images(CLASSES, 2).rename_column("label", "labels")
    other = images.cast_column("labels", ClassLabel(names=CLASSES[::-1]))
    with pytest.raises(ValueError, match=r"the dataset's labels are .*align_labels_with_mapping"):
        train(out, None, {"processing_class": make_processor()}, other)
    with pytest.raises(ValueError, match=r"a column 'labels' and a processing_class; got the columns .*'label'"):
        train(out, None, {"processing_class": make_processor()}, make_images(CLASSES, 2))
    with pytest.raises(ValueError, match="processing_class=NoneType"):
        train(out, None, None, images)


# --- every argument of Trainer ---


def test_compute_loss_func_takes_the_place_of_the_cross_entropy(out):
    calls, logs = [], Logs()

    def loss(outputs, labels, num_items_in_batch=None):
        calls.append(int(num_items_in_batch))
        return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch * 3

    given = {"compute_loss_func": loss, "callbacks": [logs]}
    three = train(out, None, given, l1_weight=0.0, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert calls == [12] * 6
    assert "custom_loss" in logs.logs[0]
    tripled = train(out, l1_weight=0.0, per_device_train_batch_size=12, learning_rate=0.3)
    assert distance(three, tripled) < 1e-5


def test_optimizers_are_used_and_those_of_other_parameters_refused(out):
    model = make_expert()
    parameters = [p for p in model.parameters() if p.requires_grad]
    given = torch.optim.SGD(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(given, factor=0.0, total_iters=100)
    frozen = train(out, model, {"optimizers": (given, scheduler)})
    unmoved = train(out, learning_rate=0.0)
    assert_same(tensors(frozen), tensors(unmoved))
    with pytest.raises(ValueError, match="optimizers holds no parameter of 'new'"):
        train(out, None, {"optimizers": (torch.optim.SGD(make_vit().parameters(), lr=0.1), None)})


def test_a_data_collator_is_used_for_training_and_evaluation(out):
    rows = [{"vector": torch.full((D,), float(i)), "labels": i % 3} for i in range(6)]
    calls = []

    def collate(rows):
        calls.append(len(rows))
        return {
            "features": torch.stack([row["vector"] for row in rows]),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }

    trainer = train(out, None, {"data_collator": collate, "eval_dataset": rows}, rows, num_train_epochs=1)
    assert calls == [6]
    assert set(trainer.evaluate()) >= {"eval_loss", "eval_accuracy"}
    assert calls == [6, 6]
    with pytest.raises(ValueError, match="augmentation=True is done by the default data_collator, not by yours"):
        train(out, None, {"data_collator": collate}, rows, augmentation=True)


def test_metrics_get_inputs_losses_and_preprocessed_logits(out):
    seen = []

    def metrics(prediction):
        seen.append((prediction.inputs.shape, prediction.losses.shape, prediction.predictions.shape))
        return {"mine": 1.0}

    given = {
        "eval_dataset": make_features(6),
        "compute_metrics": metrics,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }
    trainer = train(out, None, given, include_for_metrics=["inputs", "loss"])
    assert trainer.evaluate()["eval_mine"] == 1.0
    assert seen == [((6, D), (6,), (6,))]


def test_accuracy_by_batches_is_accuracy(out):
    given = {"eval_dataset": make_features(10, seed=1)}
    once = train(out, None, given, per_device_eval_batch_size=4).evaluate()["eval_accuracy"]
    assert train(out, None, given, batch_eval_metrics=True, per_device_eval_batch_size=4).evaluate()[
        "eval_accuracy"
    ] == pytest.approx(once)
    given["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    assert train(out, None, given).evaluate()["eval_accuracy"] == pytest.approx(once)


def test_an_early_stop_and_a_checkpoint(out):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    trainer = train(out, None, {"callbacks": [Stop()]}, save_strategy="steps", save_steps=1)
    assert trainer.state.global_step == 1
    files = {path.name for path in (out / "checkpoint-1").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "trainer_state.json"} <= files
    assert "training_args.bin" not in files
    resumed = train(out, None, None, num_train_epochs=1)
    again = ExpertTrainer(
        make_expert(), make_arguments(out, learning_rate=0.1, optim="sgd", statistics=False, num_train_epochs=1,
        class_mean_rows=False), train_dataset=make_features(),
    )  # fmt: skip
    again.train(resume_from_checkpoint=str(out / "checkpoint-1"))
    assert again.state.global_step == resumed.state.global_step == 2


def test_mixed_precision_trains_and_evaluates_alike(out):
    trainer = train(out, None, {"eval_dataset": make_features(6)}, bf16=True)
    assert trainer.state.global_step == 4
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_sampling_in_order(out):
    logs = Logs()
    train(out, None, {"callbacks": [logs]}, train_sampling_strategy="sequential", max_steps=1, learning_rate=1e-12)
    data, layer = make_features(), make_expert().base_model
    layer.compute_reference("new")
    expected = F.cross_entropy(layer.expert_logits(data.features[:8], "new"), data.labels[:8])
    assert logs.logs[0]["cross_entropy"] == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model_init": make_expert}, "either a `model` or `model_init`"),
        ({"expert": "absent"}, "Adapter absent not found"),
        ({"model": make_vit()}, "needs a PeftModel with LuCA experts"),
        ({"args": object()}, "args must be ContinualTrainingArguments, got object"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_used_is_refused_by_name(out, given, message):
    arguments = {"model": make_expert(), "args": make_arguments(out), "train_dataset": make_features(), **given}
    with pytest.raises(ValueError, match=message):
        ExpertTrainer(arguments.pop("model"), arguments.pop("args"), **arguments)


def test_a_routed_model_has_no_active_expert_to_train(out):
    model = make_expert()
    model.set_router("entropy")
    with pytest.raises(ValueError, match=r"no expert is active and trainable\. Pass expert=, one of new"):
        train(out, model)


def test_a_batch_larger_than_the_data_cannot_be_dropped(out):
    with pytest.raises(ValueError, match="'new' has 12 images, fewer than a batch of 100, and dataloader_drop_last"):
        train(out, per_device_train_batch_size=100, dataloader_drop_last=True)


def test_one_expert_is_pushed_and_has_a_card(out, monkeypatch):
    pushed = {}
    monkeypatch.setattr(
        expert_trainer, "push_expert", lambda _, name, repo, **given: pushed.update(given, name=name, repo=repo)
    )
    trainer = train(out)
    trainer.hub_model_id = "me/new"
    trainer.push_to_hub("message", tags="mine")
    assert [pushed[key] for key in ("name", "repo", "commit_message")] == ["new", "me/new", "message"]
    assert pushed["card_data"] == {"tags": ["mine"]}
    trainer.create_model_card(tags="mine")
    assert "- mine" in (out / "README.md").read_text(encoding="utf-8")
