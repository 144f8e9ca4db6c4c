"""What the tests of the Hub share: models with statistics, and the check that a model is as it was."""

import json

import pytest
import torch
from helpers import assert_same, make_model, make_vit, read_json


TWO = {"zeta": ["a", "b"], "alpha": ["c", "d", "a"]}


def with_reference(experts=TWO, **kwargs):
    """Experts with random weights and the backbone's own reference."""
    model = make_model(experts, **kwargs)
    for name in experts:
        model.base_model.layer.luca_reference_mean[name].zero_()
        model.base_model.layer.luca_reference_std[name].fill_(1)
        model.base_model.layer.luca_whitening[name].zero_()
        model.compute_reference(name)
    return model


def with_statistics(experts=TWO, **kwargs):
    model = with_reference(experts)
    for name, classes in experts.items():
        features = torch.randn(40, 32, generator=torch.Generator().manual_seed(len(name)))
        model.collect_statistics(name, features, torch.arange(40) % len(classes), **kwargs)
    return model


def change_json(path, **changes):
    path.write_text(json.dumps({**read_json(path), **changes}), encoding="utf-8")


def assert_refused(load, message, kind=ValueError, models=None):
    """`load` raises, for a bare backbone and for a model with an expert, and leaves both as they were."""
    for model in [make_vit(), make_model({"mine": ["x"]})] if models is None else models:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        labels, trainable = dict(model.config.id2label), [p.requires_grad for p in model.parameters()]
        with pytest.raises(kind, match=message):
            load(model)
        assert_same(dict(model.state_dict()), before)
        assert model.config.id2label == labels
        assert [p.requires_grad for p in model.parameters()] == trainable
