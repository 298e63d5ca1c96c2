"""A machine without a network: one request that ends soon, and one message on what is missing."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from utils.config.errors import ConfigurationError
from utils.data.tokenizers import load_tokenizer
from utils.host import hub


@pytest.fixture
def at(monkeypatch, tmp_path):
    """Let the Hub be at an address, with an empty cache."""

    def settled(url: str) -> None:
        hub.hub_fault.cache_clear()
        hub._offline_after_test.clear()
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    yield settled
    hub.hub_fault.cache_clear()
    hub._offline_after_test.clear()


@pytest.fixture
def listening():
    """Yield a socket that accepts connections, and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_name_is_refused_at_once_if_nothing_answers_and_the_cache_lacks_it(
    at, listening, tmp_path, monkeypatch
):
    silent = f"http://127.0.0.1:{listening.getsockname()[1]}"
    monkeypatch.setattr(hub, "PROBE_LIMIT_S", 0.2)
    for url, reason in (
        ("http://127.0.0.1:9", "cannot be reached (ConnectError"),
        (silent, "gave no answer within 0.2 s"),
    ):
        at(url)
        for local in (None, str(tmp_path)):  # nothing is asked
            hub.use_cache_if_offline(local)
            assert not constants.is_offline_mode()
        with pytest.raises(ConfigurationError) as caught:
            hub.use_cache_if_offline("Qwen/Qwen3-8B", revision="v1")
        assert f"{url} {reason}" in caught.value.problems[0]
        assert caught.value.problems[0].endswith("prepare_data.py --models Qwen/Qwen3-8B@v1")
        assert constants.is_offline_mode()
        with pytest.raises(ConfigurationError, match=r"prepare_data\.py --models Qwen/Qwen3-8B$"):
            load_tokenizer("Qwen/Qwen3-8B")


def test_a_name_in_the_cache_is_used_without_a_network(at, tmp_path, caplog):
    at("http://127.0.0.1:9")
    folder = tmp_path / "cache/models--Qwen--Qwen3-8B"
    (folder / "snapshots/c").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("c")
    (folder / "snapshots/c/tokenizer.json").write_text("{}")
    caplog.set_level("INFO")
    hub.use_cache_if_offline("Qwen/Qwen3-8B")
    assert "Qwen/Qwen3-8B comes from its cache" in caplog.text


@pytest.fixture
def answering():
    """Yield a server that answers each request with 500."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.server.asked.append(self.path)
            self.send_error(500)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_an_upload_waits_longer_and_asks_again_if_the_start_gave_up(
    at, answering, listening, monkeypatch
):
    monkeypatch.setattr(hub, "PROBE_LIMIT_S", 0.1)
    monkeypatch.setattr(hub, "UPLOAD_LIMIT_S", 60)
    at(f"http://127.0.0.1:{listening.getsockname()[1]}")
    with pytest.raises(ConfigurationError, match="not in the cache"):
        hub.use_cache_if_offline("Qwen/Qwen3-8B")
    assert constants.is_offline_mode()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{answering.server_port}")
    assert hub.upload_fault() == ""
    assert not constants.is_offline_mode()
    at("http://127.0.0.1:9")
    assert "cannot be reached" in hub.upload_fault()
    at("http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # by the user
    hub.stay_offline()
    assert "this process is offline" in hub.upload_fault()


def test_a_hub_that_answers_anything_is_reached_and_asked_once(at, answering, monkeypatch):
    monkeypatch.setattr(hub, "PROBE_LIMIT_S", 60)
    at(f"http://127.0.0.1:{answering.server_port}")
    for _ in range(2):
        hub.use_cache_if_offline("Qwen/Qwen3-8B")
        assert not constants.is_offline_mode()
    assert len(answering.asked) == 1

    at("http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert hub.hub_fault() == "", "HF_HUB_OFFLINE=0 asks without this test"
