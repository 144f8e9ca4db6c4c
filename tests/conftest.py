"""Fixtures of all tests."""

import gc

import pytest
from helpers import make_dinov2, make_processor, make_vit


def pytest_configure(config):
    # accelerate collects garbage before every training: a third of a second over all that the imports have made.
    gc.freeze()
    # PEFT 0.21 asks transformers' model for a property that transformers has renamed.
    config.addinivalue_line("filterwarnings", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture
def vit():
    return make_vit()


@pytest.fixture
def dinov2():
    return make_dinov2()


@pytest.fixture
def processor():
    return make_processor()


@pytest.fixture
def out(tmp_path):
    """An output folder that does not exist yet."""
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def features_of_its_own(monkeypatch, tmp_path_factory):
    """No test finds [CLS] that another test, or an earlier run, has left in the cache."""
    folder = str(tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    monkeypatch.setenv("HF_DATASETS_CACHE", folder)
