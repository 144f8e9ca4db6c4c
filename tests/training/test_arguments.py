"""`ContinualTrainingArguments`: what a recipe fills, and what is refused."""

import numpy as np
import pytest
from transformers import HfArgumentParser

from peft_luca import ContinualTrainingArguments
from peft_luca.training.arguments import CONFIG_RECIPES, RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fills_what_was_left_unset(out, recipe):
    args = ContinualTrainingArguments(str(out), recipe=recipe)
    for name, value in RECIPES[recipe].items():
        assert getattr(args, name) == value, name
    assert args.max_grad_norm == 0.0
    assert args.save_strategy == "no"
    assert not out.exists()


def test_a_recipe_leaves_what_was_set(out):
    chosen = {"learning_rate": 0.5, "num_train_epochs": 2, "per_device_train_batch_size": 3, "l1_weight": 0.0}
    chosen |= {"negatives": "own", "augmentation": False, "schedule_per_epoch": False, "max_grad_norm": 1.0}
    chosen |= {"lr_scheduler_type": "linear", "optim": "adamw_torch"}
    args = ContinualTrainingArguments(str(out), recipe="paper", **chosen)
    assert {name: getattr(args, name) for name in chosen} == chosen
    assert args.optim_args is None  # the recipe's momentum is not for another optimizer


def test_the_papers_recipe(out):
    args = ContinualTrainingArguments(str(out), recipe="paper")
    assert (args.learning_rate, args.num_train_epochs, args.per_device_train_batch_size) == (0.025, 20, 48)
    assert (args.l1_weight, args.negatives, args.augmentation, args.schedule_per_epoch) == (5e-4, "seen", True, True)
    assert (args.optim, args.optim_args, args.lr_scheduler_type) == ("sgd", "momentum=0.9", "cosine")
    assert args.weight_decay == 0.0
    config = {"scale": 1.0, "positive_scale": False, "init_rows": "zeros", "reference": False, "whitening": False}
    assert CONFIG_RECIPES["paper"] == config


def test_arguments_from_a_command_line(out):
    (args,) = HfArgumentParser(ContinualTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(out), "--recipe", "paper", "--learning_rate", "0.3", "--augmentation", "False"]
    )
    assert (args.recipe, args.learning_rate, args.augmentation, args.num_train_epochs) == ("paper", 0.3, False, 20)


def test_numbers_of_numpy_become_pythons(out):
    args = ContinualTrainingArguments(str(out), l1_weight=np.float32(0.5), statistics_rank=np.int64(3))
    assert (type(args.l1_weight), type(args.statistics_rank)) == (float, int)


def test_augmented_views_switch_the_augmentation_on(out):
    assert ContinualTrainingArguments(str(out), augmented_views=2).augmentation is True


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe": "mine"}, "recipe must be one of 'own', 'paper', got 'mine'"),
        ({"negatives": "all"}, "negatives must be one of 'own', 'seen', got 'all'"),
        ({"features_dtype": "int8"}, "features_dtype must be one of"),
        ({"on_bad_image": "ignore"}, "on_bad_image must be one of 'raise', 'skip'"),
        ({"routing_scope": "task"}, "routing_scope must be one of 'sample', 'batch'"),
        ({"class_mean_rows": "False"}, "class_mean_rows must be True or False, got 'False'"),
        ({"statistics_rank": True}, "statistics_rank must be a whole number, got True"),
        ({"l1_weight": "much"}, "l1_weight must be a number, got 'much'"),
        ({"l1_weight": -1.0}, "l1_weight must be a finite number of at least 0"),
        ({"l1_weight": float("nan")}, "l1_weight must be a finite number of at least 0"),
        ({"learning_rate": float("inf")}, "learning_rate must be a finite number of at least 0"),
        ({"max_steps": 0}, "max_steps must be above 0, or -1"),
        ({"max_steps": -2}, "max_steps must be .*, got -2"),
        ({"num_train_epochs": float("nan")}, "num_train_epochs must be .*, got nan"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be .* at least 1, got 0"),
        ({"per_device_eval_batch_size": -1}, "per_device_eval_batch_size must be .* at least 1, got -1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be .* at least 1, got 0"),
        ({"augmented_views": -1}, "augmented_views must be a finite number of at least 0"),
        (
            {"augmented_views": 2, "cache_features": False},
            "cache_features must be True with augmented_views.* got False",
        ),
        ({"statistics_rank": -2}, "statistics_rank must be a finite number of at least -1"),
        ({"fp16": True}, "fp16 must be False on the CPU, .* Use bf16=True, got True"),
        (
            {"recipe": "paper", "lr_scheduler_type": "linear"},
            "lr_scheduler_type must be 'cosine' with schedule_per_epoch.* got 'linear'",
        ),
        (
            {"augmentation": True, "train_sampling_strategy": "sequential"},
            "train_sampling_strategy must be 'random' with augmentation, got 'sequential'",
        ),
        (
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
            "load_best_model_at_end must be False",
        ),
        (
            {"push_to_hub": True, "hub_strategy": "checkpoint"},
            "hub_strategy must be one of 'every_save', 'end': .* got 'checkpoint'",
        ),
        ({"fsdp": True}, "fsdp must be left out: the backbone is frozen"),
        ({"deepspeed": "config.json"}, "deepspeed must be left out: .* Use --multi_gpu, got 'config.json'"),
        ({"router": "guess"}, "there is no router 'guess'"),
        ({"router": "margin"}, "the router 'margin' was removed"),
        ({"router": "oracle"}, "router must be another: .* the expert of each image, got 'oracle'"),
        ({"router": "gaussian", "statistics": False}, "statistics must be True with router='gaussian'"),
        ({"router": "ridge"}, "statistics_random_features must be above 0 with router='ridge'"),
        ({"router": "gaussian", "routing_scope": "batch"}, "routing_scope"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments(out, values, message):
    with pytest.raises(ValueError, match=message):
        ContinualTrainingArguments(str(out), use_cpu=True, **values)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_what_the_launcher_asks_for_is_refused_by_name(out, kind, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(ValueError, match=f"{kind.lower()} must be left out"):
        ContinualTrainingArguments(str(out), use_cpu=True)


@pytest.mark.parametrize(("cores", "workers"), [(4, 3), (64, 8), (1, 0)])
def test_images_are_read_by_workers_where_there_is_an_accelerator(out, cores, workers, monkeypatch):
    assert ContinualTrainingArguments(str(out), use_cpu=True).dataloader_num_workers == 0
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert ContinualTrainingArguments(str(out), use_cpu=True).dataloader_num_workers == workers
