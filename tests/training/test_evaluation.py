"""What a stage measures, whatever the batches in which images are routed."""

import pytest
import torch
from helpers import SIDE, D, make_model, make_trainer, make_vit
from torch._dynamo.testing import CompileCounter

from peft_luca import ContinualTrainer, FeatureDataset
from peft_luca.training import evaluation
from peft_luca.training.batches import make_extractor
from peft_luca.training.evaluation import measure_stage


CLASSES = {"t0": ["x", "y"], "t1": ["z"], "t2": ["u", "v", "w"], "t3": ["y", "t"]}


@pytest.fixture(scope="module")
def model():
    return make_model(CLASSES)


@pytest.fixture(scope="module")
def tests():
    """[CLS] of 11, 0, 4 and 7 images."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"t0": 11, "t2": 4, "t3": 7}
    return {
        name: FeatureDataset(torch.randn(size, D, generator=generator), torch.arange(size) % len(CLASSES[name]))
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("router", ["entropy", "nearest"])
@pytest.mark.parametrize("batch", [1, 3, 11, 15, 100])
def test_shares_are_those_of_the_images_one_by_one(model, tests, router, batch, monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", batch)
    model.set_router(router)
    expected = {name: [] for name in ("accuracy", "routing", "task_known", "entropy")}
    for t, (name, own) in enumerate(CLASSES.items()):
        if name not in tests:
            [column.append(None) for column in expected.values()]
            continue
        right = []
        for z, label in zip(tests[name].features, tests[name].labels, strict=True):
            model.set_router(router)
            routed = model.route_features(z[None])
            known = int(model.expert_logits(z[None], name).argmax())
            model.set_router("entropy")
            by_entropy = model.classes[int(model.route_features(z[None]).logits.argmax())]
            predicted = model.classes[int(routed.logits.argmax())]
            right.append([predicted == own[label], int(routed.expert) == t, known == label, by_entropy == own[label]])
        for column, share in zip(expected.values(), torch.tensor(right).double().mean(dim=0).tolist(), strict=True):
            column.append(share)
    model.set_router(router)
    measured = measure_stage(model.base_model, list(CLASSES), tests, "cpu")
    assert {name: pytest.approx(column) for name, column in expected.items()} == measured
    assert measure_stage(model.base_model, list(CLASSES), tests, "cpu", whole=True) == measured


def test_a_batch_is_full_before_the_next_one_begins(monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", 6)
    batches = [[(t, rows.start, rows.stop) for t, rows in batch] for batch in evaluation._batches([4, 0, 9, 1], False)]
    assert batches == [[(0, 0, 4), (2, 0, 2)], [(2, 2, 8)], [(2, 8, 9), (3, 0, 1)]]
    whole = [[(t, rows.start, rows.stop) for t, rows in batch] for batch in evaluation._batches([4, 0, 9, 1], True)]
    assert whole == [[(0, 0, 4)], [(2, 0, 9)], [(3, 0, 1)]]


# --- how the backbone computes [CLS] ---


def test_half_precision_holds_for_the_extraction_and_has_files_of_its_own(tmp_path):
    settings, found = {"features_cache_dir": str(tmp_path / "cache"), "num_train_epochs": 1}, []
    for half in (False, True):
        trainer = make_trainer(tmp_path / str(half), bf16=half, **settings)
        trainer.train_task(trainer.stream[0])
        found.append(trainer.features(trainer.stream[0], "train").features)
        assert found[-1].dtype == torch.float32
    pixels = trainer.data_collator(list(trainer.stream[0].train.remove_columns("labels")))["pixel_values"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = trainer.tuner.pooled_features(pixels).float()
    torch.testing.assert_close(found[1], expected, rtol=2e-2, atol=2e-2)
    assert not torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[1], rtol=0.1, atol=0.1)
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 4  # train and test images of each


def test_torch_compile_holds_for_the_extraction(tmp_path):
    torch._dynamo.reset()
    compiled = make_trainer(tmp_path / "out", torch_compile=True, torch_compile_backend="eager", num_train_epochs=1)
    counter = CompileCounter()
    compiled.args.torch_compile_backend = counter
    model = make_model({"t": ["x", "y"]})
    extract = make_extractor(model.base_model, compiled.data_collator, compiled.args)
    pixels = torch.randn(7, 3, SIDE, SIDE)
    graphs = []
    for batch in (7, 5, 6, 4):
        torch.testing.assert_close(extract.pooled_features(pixels[:batch]), model.pooled_features(pixels[:batch]))
        graphs.append(counter.frame_count)
    assert graphs[0] > 0
    assert graphs[1] == graphs[3], graphs  # no size of a batch has a graph of its own


def test_a_subclass_may_take_features_from_elsewhere(tmp_path):
    class Given(ContinualTrainer):
        def features(self, task, split):
            generator = torch.Generator().manual_seed(len(task.name) + len(split))
            labels = torch.tensor([self.stream.classes.index(name) for name in task.classes]).repeat(50)
            return FeatureDataset(torch.randn(len(labels), D, generator=generator), labels)

    plain = make_trainer(tmp_path / "plain")
    trainer = Given(make_vit(), plain.args, plain.stream, plain.luca_config, plain.processing_class)
    trainer.train_task(trainer.stream[0])
    assert trainer.tuner.layer.statistics[trainer.stream[0].name].counts.tolist() == [50, 50]
    assert torch.equal(trainer.task_features.tests(["task_0"])["task_0"].labels, torch.tensor([0, 1]).repeat(50))
