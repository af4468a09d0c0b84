"""The endpoint catalog: modes, what callers see, and the policy for custom endpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from turngate.client.gateway import GatewayClient
from turngate.errors import BadRequest, ConfigError
from turngate.server.engine_factory import read_engine_key
from turngate.service.catalog import Catalog, Endpoint, EndpointChoice
from turngate.service.config import load_config
from turngate.service.gateways import Gateways

ENTRIES: dict[str, Endpoint] = {
    "vllm://q": Endpoint(
        url="http://127.0.0.1:8000", model="Qwen/Q", tokenizer="/models/q", thinking=True, key_env="VLLM_KEY"
    ),
    "vllm://open": Endpoint(url="http://127.0.0.1:8001", tokenizer="/models/q"),
    "openai://gpt": Endpoint(key_env="OPENAI_KEY"),
    "anthropic://claude": Endpoint(key_env="ANTHROPIC_KEY"),
    "hf-router://m": Endpoint(key_env="HF_KEY", modes=["observe"]),
    "scripted://m": Endpoint(),
    "gateway://other": Endpoint(url="http://10.0.0.1:8700", modes=["exact", "observe"]),
}
SECRET = "sk-marked-secret"


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    for name in ("VLLM_KEY", "OPENAI_KEY", "ANTHROPIC_KEY", "HF_KEY"):
        monkeypatch.setenv(name, SECRET)
    return Catalog(ENTRIES, ["api.example.com", "127.0.0.1:9000", "[::1]:9000", "llm.example.com:8443"])


def test_catalog_view_shows_modes_but_no_secrets(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_KEY")
    views = {view.key: view for view in catalog.show()}
    assert views["vllm://q"].modes == [
        "exact",
        "observe",
        "gate",
    ]  # no direct mode, which never sends a key
    assert views["vllm://open"].modes == ["exact", "observe", "gate", "direct"]
    assert views["anthropic://claude"].modes == ["observe"] and views["anthropic://claude"].capture == "text"
    assert views["scripted://m"].modes == ["exact", "gate"] and views["scripted://m"].capture == "tokens"
    assert (views["vllm://q"].model, views["scripted://m"].model) == ("Qwen/Q", "m")
    assert (views["openai://gpt"].key_is_set, views["vllm://q"].key_is_set) == (False, True)
    encoded = msgspec.json.encode(list(views.values())).decode()
    assert SECRET not in encoded and "http" not in encoded


def test_replicas_allow_exact_and_gate_only() -> None:
    entry = Endpoint(url=["http://a:1", "http://b:1"], tokenizer="/models/q")
    choice = Catalog({"vllm://two": entry}).choose("vllm://two")
    settings = choice.endpoint.gateway_config(choice.mode, "/data")
    assert choice.endpoint.allowed == ("exact", "gate") and settings is not None and len(settings.engine_url) == 2


@pytest.mark.parametrize("mode", ["observe", "direct"])
@pytest.mark.parametrize("key_env", ["", "VLLM_KEY"])
def test_mode_without_replicas_says_so(mode: str, key_env: str) -> None:
    entry = Endpoint(url=["http://a:1", "http://b:1"], tokenizer="/models/q", key_env=key_env)
    with pytest.raises(BadRequest, match=f"{mode} mode needs exactly one URL"):
        Catalog({"vllm://two": entry}).choose("vllm://two", mode)


def test_default_mode_and_aliases(catalog: Catalog) -> None:
    assert catalog.choose("vllm://q").mode == "exact"
    assert catalog.choose("vllm://q", "transparent_proxy").mode == "observe"
    assert catalog.choose("openai://gpt").mode == "observe"
    assert catalog.choose("vllm://q", "exact").gateway_name != catalog.choose("vllm://q", "observe").gateway_name


@pytest.mark.parametrize(
    ("given", "param", "word"),
    [
        (("vlm://q",), "model_key", "did you mean vllm://q?"),
        (("anthropic://claude", "exact"), "mode", "mode 'exact' is not available for endpoint 'anthropic://claude'"),
        (("vllm://q", "direct"), "mode", "never sends the endpoint's key"),
        (("hf-router://m", "black_box"), "mode", "mode 'direct' is not available for endpoint 'hf-router://m': "),
        (("scripted://m", "", True), "thinking", "omit the argument"),
        (("vllm://q", "observe", False), "thinking", "omit it in observe mode"),
    ],
)
def test_unavailable_choice_is_rejected(catalog: Catalog, given: tuple[Any, ...], param: str, word: str) -> None:
    with pytest.raises(BadRequest) as raised:
        catalog.choose(*given)
    assert raised.value.param == param and word in raised.value.message


def test_unset_key_is_rejected(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_KEY")
    with pytest.raises(BadRequest, match="no valid key for the endpoint openai://gpt"):
        catalog.choose("openai://gpt")


@pytest.mark.parametrize(
    "url",
    [
        "https://api.example.com/v1",
        "https://API.example.com",
        "http://127.0.0.1:9000",
        "http://[::1]:9000/v1",
        "https://llm.example.com:8443",
    ],
)
def test_custom_endpoint_has_no_key(catalog: Catalog, url: str) -> None:
    for key in ("openai://theirs", "openai://gpt", "vllm://q"):
        choice = catalog.choose(key, "observe", endpoint_url=url)
        assert choice.is_custom and choice.endpoint.urls == [url] and choice.endpoint.key_env == ""
        assert choice.gateway_name != catalog.choose("openai://gpt").gateway_name
        settings = choice.endpoint.gateway_config("observe", "/data")
        assert settings is not None and settings.engine_key_env == ""


@pytest.mark.parametrize(
    "url",
    [
        "http://api.example.com",  # not https
        "https://api.example.com:444",
        "https://api.example.com.evil.com",
        "https://evil.com/api.example.com",
        "https://api.example.com@evil.com",
        "https://user:pass@api.example.com",
        "https://api.example.com\\@evil.com",
        "https://api.example.com?x=1",
        "https://api.example.com#x",
        "https://api.example.com/../x",
        "https://api.example.com.",
        "https://llm.example.com",  # another port
        "http://127.0.0.1:9001",
        "http://localhost:9000",  # not the listed name
        "http://0x7f000001:9000",
        "file:///etc/passwd",
        "gopher://api.example.com",
        "https://",
    ],
)
def test_disallowed_url_is_rejected(catalog: Catalog, url: str) -> None:
    with pytest.raises(BadRequest) as raised:
        catalog.choose("openai://theirs", endpoint_url=url)
    assert raised.value.param == "endpoint_url" and "pass@" not in raised.value.message


def test_custom_endpoint_needs_allowed_hosts() -> None:
    with pytest.raises(BadRequest, match="allowed_hosts"):
        Catalog(ENTRIES).choose("openai://theirs", endpoint_url="https://api.example.com")


@pytest.mark.parametrize(
    ("entry", "word"),
    [
        ({"bad": {}}, "KIND://NAME"),
        ({"vllm://q": {"url": "http://u:p@h"}}, "credentials"),
        ({"vllm://q": {"url": "http://h", "modes": ["exact"]}}, "needs a tokenizer"),
        ({"openai://m": {"key_env": "K", "modes": ["direct"]}}, "never sends the endpoint's key"),
        ({"openai://m": {"modes": ["gate"]}}, "do not accept token ids"),
        ({"openai://m": {"mode": "exact"}}, "mode"),
        ({"openai://m": {"api_key": "sk-1"}}, "key_env"),
        ({"openai://m": {"temprature": 1}}, "temprature is not a known setting"),
        ({"gateway://g": {}}, "must be exactly one URL"),
        (
            {"gateway://g": {"url": "http://h", "modes": ["direct"]}},
            "cannot contain 'direct', because a gateway records every call",
        ),
        ({"vllm://q": {"url": "ftp://h", "tokenizer": "/x"}}, "must be an http or https URL"),
        ({"local://m": {}}, "because model_folder is not set"),
        ({"vllm://q": {"tokenizer": "/x"}}, '"vllm://q".url is not set, but exact mode needs it'),
        (
            {"vllm://q": {"url": "http://h", "model_folder": "/x"}},
            '"vllm://q".tokenizer is not set, but exact mode needs it',
        ),
        ({"openai://m": {"url": "ftp://h"}}, '"openai://m".url must be an http or https URL'),
        ({"vllm://q": {"url": ["http://h", "h"], "tokenizer": "/x"}}, '"vllm://q".url must be an http or https URL'),
    ],
)
def test_invalid_entry_is_rejected_on_load(entry: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, {"endpoints": entry})
    assert word in raised.value.message and "sk-1" not in raised.value.message
    # flags and settings of `turngate serve`, which an endpoint does not have
    assert "--" not in raised.value.message and "engine_url" not in raised.value.message


@pytest.mark.parametrize("host", ["https://a.com", "a.com/x", "*.a.com", ""])
def test_allowed_hosts_must_be_exact(host: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        load_config(None, {"allowed_hosts": [host]})


def test_gateway_names_are_unique_per_url(catalog: Catalog) -> None:
    """The name selects a gateway whose endpoint gets a key."""
    custom = [
        catalog.choose("openai://gpt", "observe", endpoint_url=f"https://api.example.com/{path}") for path in "abc"
    ]
    names = {choice.gateway_name for choice in (*custom, catalog.choose("openai://gpt"))}
    assert len(names) == 4 and all(len(name.rpartition("-")[2]) == 32 for name in names)
    assert [choice.gateway_name.startswith("own-") for choice in custom] == [True] * 3


async def test_gateway_is_not_shared_between_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if their names were the same."""
    monkeypatch.setattr(EndpointChoice, "gateway_name", "one")

    async def ignore(name: str, client: GatewayClient) -> None:
        pass

    config = load_config(None, {"data": str(tmp_path), "endpoints": {"scripted://a": {}, "scripted://b": {}}})
    catalog = Catalog(config.endpoints)
    gateways = Gateways(config, {}, ignore)
    try:
        async with gateways.connect(catalog.choose("scripted://a")):
            with pytest.raises(BadRequest):
                async with gateways.connect(catalog.choose("scripted://b")):
                    pass
            async with gateways.connect(catalog.choose("scripted://a")) as again:
                assert again.model == "a"
    finally:
        await gateways.close()


async def test_unused_custom_gateway_folders_are_deleted(tmp_path: Path) -> None:
    async def ignore(name: str, client: GatewayClient) -> None:
        pass

    for name in ("own-a", "own-b", "vllm-c"):
        (tmp_path / "gateways" / name).mkdir(parents=True)
    gateways = Gateways(load_config(None, {"data": str(tmp_path)}), {}, ignore)
    await gateways.delete_unused({"own-b"})
    assert {path.name for path in (tmp_path / "gateways").iterdir()} == {"own-b", "vllm-c"}


def test_custom_endpoint_keeps_allowed_modes(catalog: Catalog) -> None:
    url = "https://api.example.com/v1"
    assert catalog.choose("hf-router://m", endpoint_url=url).mode == "observe"
    with pytest.raises(BadRequest, match="the server does not allow it"):
        catalog.choose("hf-router://m", "direct", endpoint_url=url)


def test_key_can_be_read_from_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog({"openai://m": Endpoint(key_env="FILED_KEY")})
    monkeypatch.setenv("FILED_KEY_FILE", str(tmp_path / "key"))
    assert not catalog.show()[0].key_is_set  # the file does not exist
    (tmp_path / "key").write_text(SECRET)
    choice = catalog.choose("openai://m")
    settings = choice.endpoint.gateway_config(choice.mode, "/data")
    assert catalog.show()[0].key_is_set and settings is not None and read_engine_key(settings) == SECRET
