"""LuCA experts in the adapter mixin of transformers, and in its plain Trainer, without a stream."""

import copy
import logging

import pytest
import torch
from helpers import ANIMALS, TREES, expert_config, logits, pictures, tiny_vit, weights, with_experts
from peft import get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


IMAGES = pictures(24, seed=5)
LABELS = torch.arange(24) % 3
DATASET = [{"pixel_values": image, "labels": int(label)} for image, label in zip(IMAGES, LABELS, strict=True)]


def trainer(model, out, **kwargs):
    settings = {
        "output_dir": str(out),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "seed": 3,
    }
    args = TrainingArguments(**{**settings, **kwargs})
    return Trainer(model=model, args=args, train_dataset=DATASET, eval_dataset=DATASET)


def expert(**kwargs):
    torch.manual_seed(0)
    return get_peft_model(tiny_vit(), expert_config(**kwargs))


def frozen(model):
    return {name: tensor for name, tensor in weights(model).items() if "luca_" not in name}


# ---- the adapter mixin of transformers' models ----------------------------------------------------------------------


def test_most_of_the_mixin_wants_a_newer_peft_and_says_so():
    # transformers 5.24 has MIN_PEFT_VERSION 0.22, which is newer than any PEFT there is: PeftModel is the way.
    with pytest.raises(ValueError, match=r"The version of PEFT you are using is not compatible.*0\.22"):
        tiny_vit().add_adapter(expert_config())


def test_the_mixin_loads_an_expert(tmp_path):
    model = with_experts(default=ANIMALS)
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    base = tiny_vit()
    base.load_adapter(str(tmp_path))
    base.eval()
    torch.testing.assert_close(logits(base), logits(model), rtol=0, atol=0)
    assert base.config.id2label == dict(enumerate(ANIMALS))


# ---- Trainer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_trains_the_expert_alone(checkpointing, tmp_path):
    model = expert()
    before, trunk = weights(model), frozen(model)
    run = trainer(model, tmp_path, activation_checkpointing=checkpointing)
    run.train()
    assert all(torch.equal(tensor, trunk[name]) for name, tensor in frozen(model).items())
    moved = {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(run.evaluate()) >= {"eval_loss"}


def test_gradient_checkpointing_changes_nothing_and_never_reaches_the_trunk(tmp_path):
    plain, checkpointed = expert(), tiny_vit()
    checkpointed.activation_checkpointing_enable()
    checkpointed = get_peft_model(checkpointed, expert_config())
    checkpointed.load_state_dict(plain.state_dict())
    inside = checkpointed.base_model.layer.base_layer
    trainer(plain, tmp_path / "plain").train()
    trainer(checkpointed, tmp_path / "checkpointed", activation_checkpointing=True).train()
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    output = checkpointed(IMAGES, labels=LABELS)
    output.loss.backward()
    assert all(p.grad is None for name, p in checkpointed.named_parameters() if "luca_" not in name)
    assert inside.weight.grad is None


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulating_eight_times_one_is_a_batch_of_eight(smoothing, tmp_path):
    whole, parts = expert(), expert()
    options = {"label_smoothing_factor": smoothing, "optim": "sgd", "learning_rate": 0.1}
    trainer(whole, tmp_path / "whole", **options).train()
    trainer(parts, tmp_path / "parts", per_device_train_batch_size=1, gradient_accumulation_steps=8, **options).train()
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


@pytest.mark.parametrize("router", [None, "entropy"])
def test_label_smoothing_is_what_the_formula_says(router, tmp_path):
    model = with_experts(default=ANIMALS, trees=TREES)
    model.set_router(router)
    loss = trainer(model, tmp_path, label_smoothing_factor=0.1).evaluate()["eval_loss"]
    expected = nn.functional.cross_entropy(logits(model, IMAGES), LABELS, label_smoothing=0.1)
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_an_expert_of_one_class_trains_by_cross_entropy_and_not_by_regression(tmp_path):
    model = get_peft_model(tiny_vit(), expert_config(["cat"]))
    run = Trainer(
        model=model,
        args=trainer(model, tmp_path).args,
        train_dataset=[{"pixel_values": image, "labels": 0} for image in IMAGES],
    )
    assert run.train().training_loss == pytest.approx(0.0, abs=1e-6)


def best_of(model, out, best):
    """A trainer of three steps of which one is the best, and what the weights were at each."""
    seen = {}

    def scores(prediction):
        seen[len(seen) + 1] = weights(model)
        return {"score": float(len(seen) == best)}

    options = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    options |= {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    run = trainer(model, out, **options)
    run.compute_metrics = scores
    return run, seen


def test_load_best_model_at_end_of_the_default_expert(tmp_path):
    model = expert()
    run, seen = best_of(model, tmp_path, best=2)
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert all(torch.equal(tensor, seen[2][name]) for name, tensor in weights(model).items())
    assert not all(torch.equal(tensor, seen[3][name]) for name, tensor in weights(model).items())


def test_load_best_model_at_end_of_an_expert_of_another_name_is_left_to_the_user(tmp_path, caplog):
    # transformers looks at the checkpoint's root alone, where PEFT puts "default" and no other, and asks the model
    # nothing when it finds nothing: it logs a warning, and keeps the last weights. A line of the docs loads the best.
    model = with_experts(birds=ANIMALS)
    run, seen = best_of(model, tmp_path, best=2)
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        run.train()
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "Could not locate the best model" in caplog.text
    assert all(torch.equal(tensor, seen[3][name]) for name, tensor in weights(model).items())
    model.load_adapter(f"{run.state.best_model_checkpoint}/birds", "birds")
    assert all(torch.equal(tensor, seen[2][name]) for name, tensor in weights(model).items())


def test_a_copy_may_replace_the_weights_of_any_expert_until_it_is_trained(tmp_path):
    model = with_experts(birds=ANIMALS, owls=ANIMALS, hawks=ANIMALS)
    model.save_pretrained(str(tmp_path), selected_adapters=["birds"])
    model.load_adapter(str(tmp_path / "birds"), "owls")  # which was not added last
    model.train()
    with pytest.raises(ValueError, match="these are the weights of expert 'birds'"):
        model.load_adapter(str(tmp_path / "birds"), "hawks")


def test_load_best_model_at_end_never_gives_an_expert_the_weights_of_default(tmp_path):
    model = with_experts(default=ANIMALS, birds=TREES)
    model.set_adapter("birds")
    run, seen = best_of(model, tmp_path, best=2)
    with pytest.raises(ValueError, match=r"weights of expert 'default', .* The checkpoint has a folder 'birds'"):
        run.train()
    assert all(torch.equal(tensor, seen[3][name]) for name, tensor in weights(model).items())
    model.load_adapter(f"{run.state.best_model_checkpoint}/birds", "birds")
    assert all(torch.equal(tensor, seen[2][name]) for name, tensor in weights(model).items())


def test_an_expert_can_start_as_a_copy_of_another(tmp_path):
    model = with_experts(default=ANIMALS)
    trainer(model, tmp_path / "run").train()
    model.save_pretrained(str(tmp_path), save_embedding_layers=False)
    model.load_adapter(str(tmp_path), "second")
    x = pictures()
    first = logits(model, x)
    model.set_adapter("second")
    torch.testing.assert_close(logits(model, x), first, rtol=0, atol=0)


@pytest.mark.parametrize("names", [["default"], ["default", "birds"]])
def test_resume(names, tmp_path):
    def fresh():
        return with_experts(tiny_vit(), **dict.fromkeys(names, ANIMALS))

    torch.manual_seed(0)
    whole = fresh()
    torch.manual_seed(0)
    resumed = fresh()
    whole.load_state_dict(resumed.state_dict())
    start = copy.deepcopy(resumed)
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer(whole, tmp_path / "whole", **options).train()
    trainer(resumed, tmp_path / "resumed", **{**options, "max_steps": 2}).train()
    checkpoint = get_last_checkpoint(str(tmp_path / "resumed"))
    assert checkpoint is not None
    trainer(start, tmp_path / "resumed", **options).train(resume_from_checkpoint=checkpoint)
    for (name, one), other in zip(weights(whole).items(), weights(start).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=name)
