"""A Hub on the loopback interface, and the client set to use it."""

import pytest
from hub_server import HubServer
from huggingface_hub import constants


BASE = "google/tiny-vit"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that has the backbone `google/tiny-vit`. The client is logged in as `owner`."""
    with HubServer() as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(
            "huggingface_hub.hf_api.api.endpoint", server.url
        )  # of the client made at import, for PEFT
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # transformers' own client, made once
        monkeypatch.setenv("HF_TOKEN", "hf_owner")
        # The client waits a second and more before it asks again after a 500.
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        server.add(BASE)
        yield server
