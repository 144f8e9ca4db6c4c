"""What must hold, always: a section for each point of the list. Killed runs are in tests/training/."""

import json
from pathlib import Path

import pytest
import torch
from helpers import (
    NAMES,
    ForwardCount,
    assert_same,
    expert_tensors,
    files_in,
    make_dinov2,
    make_model,
    make_processor,
    make_stream,
    make_trainer,
    make_vit,
    pixels,
    read_json,
    trunk_tensors,
)
from peft import PeftModel
from safetensors.torch import load_file

from peft_luca import load_experts, save_experts
from peft_luca.tuner.config import ARRANGEMENTS


SHARED = {"t": ["a", "b"], "u": ["c", "b", "d"], "v": ["e"], "w": ["a", "f"]}


# --- 1. The backbone is never changed ---


@pytest.mark.parametrize(("make", "recipe"), [(make_vit, "own"), (make_dinov2, "paper")])
def test_1_the_backbone_is_bit_identical_after_a_life_cycle(out, make, recipe):
    base = make()
    before = trunk_tensors(base)
    trainer = make_trainer(out, model=base, recipe=recipe, num_train_epochs=1, weight_decay=0.1)
    trainer.train()
    model, x = trainer.model, pixels()
    model.route(x)
    model(x, labels=torch.zeros(6, dtype=torch.long))
    with model.disable_adapter():
        model(x)
    model.delete_adapter("task_1")
    model.set_adapter("task_0")
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    (model(x, labels=torch.tensor([0, 1, 0, 1, 0, 1])).loss + model.l1_penalty()).backward()
    optimizer.step()
    save_experts(model, out / "saved")
    assert_same(trunk_tensors(model), before)
    load_experts(model, {"loaded": out / "saved" / "task_0"})
    assert_same(trunk_tensors(model), before)
    assert_same(trunk_tensors(model.unload()), before)


# --- 2. Learning a task leaves every earlier expert bit-identical ---


@pytest.mark.parametrize("recipe", ["own", "paper"])
def test_2_earlier_experts_are_bit_identical(out, recipe):
    trainer = make_trainer(out, recipe=recipe, num_train_epochs=1, weight_decay=0.1)
    before = {}
    for task in trainer.stream:
        trainer.train_task(task)
        for name, tensors in before.items():
            assert_same(expert_tensors(trainer.model, name), tensors)
        before[task.name] = expert_tensors(trainer.model, task.name)
    assert len(before) == 3


# --- 3. A prediction depends on its image alone ---


@pytest.mark.parametrize("make", [make_vit, make_dinov2])
def test_3_a_prediction_depends_on_its_image_alone(make):
    model = make_model(SHARED, base=make(), seed=6)
    model.set_router("entropy")
    x = pixels(24)
    whole, routed = model(x).logits, model.route(x)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(x[order]).logits, whole[order])
    assert torch.equal(model.route(x[order]).expert, routed.expert[order])
    assert len(routed.expert.unique()) > 1
    for i in range(0, 24, 3):
        torch.testing.assert_close(model(x[i : i + 1]).logits[0], whole[i])
        company = torch.cat([x[i : i + 1], 100 * torch.randn(5, 3, 16, 16)])
        torch.testing.assert_close(model(company).logits[0], whole[i])
    torch.testing.assert_close(torch.cat([model(part).logits for part in x.split(7)]), whole)


# --- 4. Task order changes nothing but the numbering of labels ---


def test_4_the_order_of_tasks_changes_nothing_but_the_numbering(out, tmp_path):
    pairs = [NAMES[:2], NAMES[2:4], NAMES[4:]]
    results = []
    for place, order in enumerate(([0, 1, 2], [2, 0, 1])):
        stream = make_stream(order=[name for pair in order for name in pairs[pair]])
        trainer = make_trainer(tmp_path / str(place), stream)
        trainer.train()
        model = trainer.model
        by_classes = {classes: name for name, classes in model.experts.items()}
        assert set(by_classes) == set(pairs)
        x = make_processor()(images=make_stream()[1].test["image"][:], return_tensors="pt")["pixel_values"]
        x = torch.cat([x, pixels(20)])
        routed = model.route(x)
        tensors = {
            classes: {key.replace(f".{name}", ""): value for key, value in expert_tensors(model, name).items()}
            for classes, name in by_classes.items()
        }
        names = list(model.experts)
        logits = {name: routed.logits[:, i] for i, name in enumerate(model.classes)}
        experts = [model.experts[names[i]] for i in routed.expert]
        predicted = [model.config.id2label[int(i)] for i in model(x).logits.argmax(1)]
        results.append((tensors, logits, experts, predicted))
    first, second = results
    for classes in pairs:
        assert_same(first[0][classes], second[0][classes])
    assert first[2:] == second[2:]
    assert len(set(first[2])) > 1
    for name in NAMES:
        torch.testing.assert_close(first[1][name], second[1][name])


def test_4_the_order_of_loading_decides_no_tie(tmp_path):
    """With a large σ the entropies of many experts are 0 to the last bit."""
    model = make_model(SHARED)
    with torch.no_grad():
        for name in SHARED:
            model.base_model.layer.luca_scale[name].fill_(1000.0)
    save_experts(model, tmp_path)
    x, answers = pixels(24), []
    for order in ("tuvw", "wvut"):
        loaded = load_experts(make_vit(), {name: tmp_path / name for name in order})
        loaded.set_router("entropy")
        routed = loaded.route(x)
        names, predicted = list(loaded.experts), routed.logits.argmax(dim=1)
        answers.append([(names[t], loaded.classes[c]) for t, c in zip(routed.expert, predicted, strict=True)])
        assert (routed.entropies == routed.entropies.amin(dim=1, keepdim=True)).sum(dim=1).max() > 1
    assert answers[0] == answers[1]


# --- 5. Deleting an expert gives exactly the model that never had it ---


@pytest.mark.parametrize("deleted", ["t", "u", "v", "w"])
def test_5_deleting_is_never_having_had_it(tmp_path, deleted):
    whole = make_model(SHARED)
    save_experts(whole, tmp_path)
    never = load_experts(make_vit(), {name: tmp_path / name for name in SHARED if name != deleted})
    for model in (whole, never):
        model.set_router("entropy")
    whole.delete_adapter(deleted)
    x = pixels(24)
    assert (whole.experts, whole.classes) == (never.experts, never.classes)
    assert whole.config.id2label == never.config.id2label
    for one, other in zip(whole.route(x), never.route(x), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(whole(x).logits, never(x).logits)
    assert_same(dict(whole.state_dict()), dict(never.state_dict()))


def test_5_unlearning_a_task_is_never_having_learned_it(out, tmp_path):
    everything = make_trainer(out, num_train_epochs=1)
    everything.train()
    everything.model.delete_adapter("task_1")
    never = make_trainer(tmp_path / "never", num_train_epochs=1)
    for task in (never.stream[0], never.stream[2]):
        never.train_task(task)
    x = pixels(24)
    assert torch.equal(everything.model(x).logits, never.model(x).logits)
    assert_same(dict(everything.model.state_dict()), dict(never.model.state_dict()))
    everything.save_model()
    again = make_trainer(out, num_train_epochs=1)
    again.train()  # and it does not come back when the run goes on
    assert list(again.model.experts) == ["task_0", "task_2"]


# --- 6. One backbone pass per image ---


@pytest.mark.parametrize("experts", [1, 7])
def test_6_one_pass_at_inference_whatever_the_number_of_experts(experts):
    model = make_model({f"e{i}": [f"c{i}"] for i in range(experts)})
    model.set_router("entropy")
    count = ForwardCount(model)
    model(pixels(6))
    assert (count.passes, count.images) == (1, 6)
    model.route(pixels(6))
    assert (count.passes, count.images) == (2, 12)


def test_6_one_pass_per_image_in_training(out):
    model = make_vit()
    count = ForwardCount(model)
    trainer = make_trainer(out, model=model, num_train_epochs=7)
    trainer.train()
    reference = 768  # pictures, once
    images = sum(len(task.train) + len(task.test) for task in trainer.stream) + reference
    assert count.images == images
    trainer.evaluate()
    trainer.train()
    assert count.images == images


# --- 7. A saved expert loaded by any path gives the same ---


@pytest.mark.parametrize(("make", "arrangement"), [*((make_vit, a) for a in ARRANGEMENTS), (make_dinov2, "parallel")])
def test_7_every_path_gives_the_same(tmp_path, arrangement, make):
    model, x = make_model(SHARED, base=make(), arrangement=arrangement), pixels(24)
    model.set_router("entropy")
    model.save_pretrained(str(tmp_path / "peft"))
    save_experts(model, tmp_path / "ours")
    by_peft = PeftModel.from_pretrained(make(), tmp_path / "peft" / "t", adapter_name="t")
    for name in "uvw":
        by_peft.load_adapter(str(tmp_path / "peft" / name), name)
    assert by_peft.router is None
    by_peft.set_router("entropy")
    mixed = load_experts(
        PeftModel.from_pretrained(make(), tmp_path / "ours" / "t", adapter_name="t"),
        [tmp_path / "peft" / name for name in "uvw"],
    )
    mixed.set_router("entropy")
    ours = load_experts(make(), tmp_path / "ours")
    expected = model.route(x)
    for loaded in (by_peft, mixed, ours):
        assert list(loaded.experts) == list(SHARED)
        assert torch.equal(loaded(x).logits, model(x).logits)
        for one, other in zip(loaded.route(x), expected, strict=True):
            assert torch.equal(one, other)


# --- 7, 8, 9 and 11 of one run ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose folder no test changes."""
    trainer = make_trainer(tmp_path_factory.mktemp("run") / "out")
    trainer.train()
    trainer.evaluate()
    return trainer, Path(trainer.args.output_dir)


def test_7_a_run_comes_back_from_its_folder(run):
    trainer, folder = run
    loaded, x = load_experts(make_vit(), folder), pixels(24)
    assert list(loaded.experts) == ["task_0", "task_1", "task_2"]
    assert loaded.router == trainer.model.router
    assert torch.equal(loaded(x).logits, trainer.model(x).logits)


def test_8_an_expert_refuses_a_backbone_on_which_it_was_not_trained(run):
    _, folder = run
    for other in (make_vit(seed=1), make_dinov2()):
        with pytest.raises(ValueError, match="was trained on the backbone"):
            load_experts(other, folder)
    assert list(load_experts(make_vit(seed=1), folder, allow_mismatch=True).experts) == ["task_0", "task_1", "task_2"]
    with pytest.warns(UserWarning, match=r"only \S+ deviations away, as with another dtype"):
        load_experts(make_vit().to(torch.bfloat16), folder)


def test_9_a_run_writes_safetensors_and_json_and_nothing_else(run):
    _, folder = run
    adapter = ("adapter_config.json", "adapter_model.safetensors", "statistics.safetensors")
    expected = [f"task_{t}/{file}" for t in range(3) for file in adapter] + [
        "experts.json",
        "matrix.jsonl",
        "results.json",
    ]
    assert files_in(folder) == sorted(expected)
    for file in files_in(folder):
        text = (folder / file).read_text(encoding="utf-8").splitlines() if file.endswith(".jsonl") else []
        assert all(json.loads(line) for line in text)
        assert text or (read_json(folder / file) if file.endswith(".json") else load_file(folder / file))


def test_9_nothing_pickled_is_read(tmp_path):
    save_experts(make_model({"t": ["a", "b"]}), tmp_path)
    weights = tmp_path / "t" / "adapter_model.safetensors"
    torch.save(load_file(weights), tmp_path / "t" / "adapter_model.bin")
    weights.unlink()
    with pytest.raises((ValueError, OSError), match="safetensors"):
        load_experts(make_vit(), tmp_path)


def measured_by_hand(trainer, processor):
    """Accuracy of the model on pixels of the processor, over all test images of the stream."""
    right = images = 0
    for task in trainer.stream:
        pixel_values = processor(images=list(task.test["image"]), return_tensors="pt")["pixel_values"]
        predicted = trainer.model(pixel_values).logits.argmax(dim=1).tolist()
        names = [trainer.stream.classes[label] for label in task.test["labels"]]
        right += sum(trainer.model.config.id2label[c] == name for c, name in zip(predicted, names, strict=True))
        images += len(names)
    return right / images


def test_11_what_is_used_is_what_was_measured(run):
    trainer, _ = run
    assert trainer.results()["last_accuracy"] == pytest.approx(measured_by_hand(trainer, make_processor()))


def test_11_also_on_a_backbone_of_one_channel(out):
    stream = make_stream(NAMES[:4], names=NAMES[:4])
    processor = make_processor(image_mean=[0.5], image_std=[0.5])
    trainer = make_trainer(out, stream, model=make_vit(num_channels=1), processor=processor)
    trainer.train()
    for task in stream:
        pixel_values = trainer.data_collator([task.test[i] for i in range(2)])["pixel_values"]
        grey = processor(images=[image.convert("L") for image in task.test["image"][:2]], return_tensors="pt")
        assert torch.equal(pixel_values, grey["pixel_values"])
