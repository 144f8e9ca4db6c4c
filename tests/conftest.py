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


def _move_cache(patch, folder):
    patch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder))
    patch.setenv("HF_DATASETS_CACHE", str(folder))
    patch.setattr("peft_luca.tuner.reference.REFERENCES", folder / "peft_luca" / "references")
    patch.setenv("HF_HOME", str(folder))  # of processes that a test starts


@pytest.fixture(scope="session", autouse=True)
def _no_cache_of_the_user(tmp_path_factory):
    """For fixtures that several tests share."""
    with pytest.MonkeyPatch.context() as patch:
        _move_cache(patch, tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    """No test finds [CLS] that another test, or an earlier run, has left in the cache."""
    _move_cache(monkeypatch, tmp_path_factory.mktemp("datasets"))
