"""A Hub on the loopback interface, and the client set to use it."""

import pytest
from hub_server import HubServer, client_settings


BASE = "google/tiny-vit"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that has the backbone `google/tiny-vit`. The client is logged in as `owner`."""
    with HubServer() as server:
        for setting in client_settings(server.url, tmp_path / "cache"):
            monkeypatch.setattr(*setting)
        monkeypatch.setenv("HF_TOKEN", "hf_owner")
        # The client waits a second and more before it asks again after a 500.
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        server.add(BASE)
        yield server
