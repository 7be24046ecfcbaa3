import time

import pytest
from huggingface_hub import HfFileSystem, constants

from tests.sweep.hub_server import Hub
from tests.sweep.reader import Reader
from tests.sweep.tiny import TEXT


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty Hub, which the client in this process talks to; its cache is empty, too."""
    server = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    sleep = time.sleep
    # before another attempt
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))
    yield server
    server.close()


@pytest.fixture
def datasets_hub(hub, monkeypatch, tmp_path):
    """The Hub, which the library ``datasets`` talks to, too."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0.05)
    HfFileSystem.clear_instance_cache()
    yield hub
    HfFileSystem.clear_instance_cache()


@pytest.fixture
def reader(monkeypatch):
    """Sweeps whose worker reads checkpoints, and runs no model."""
    monkeypatch.setattr("embedgeo.sweep.run.Worker", Reader)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(TEXT))
    return path


@pytest.fixture
def options(text, tmp_path):
    """Arguments of a small sweep."""
    return {
        "text": text,
        "seq_len": 16,
        "num_tokens": 64,
        "batch_size": 2,
        "out": tmp_path / "out",
    }
