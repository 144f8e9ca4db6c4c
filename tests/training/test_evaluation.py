"""What a stage measures, whatever the batches in which images are routed."""

import pytest
import torch
from helpers import D, make_model

from peft_luca import FeatureDataset
from peft_luca.training import evaluation
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
