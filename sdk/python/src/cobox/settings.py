"""Finds the broker's URL and the API key: from arguments, the environment, or the state file of a running `cobox up`."""

from __future__ import annotations

import json
import os
import pathlib
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from .errors import SettingsMissing
from .secret import Secret

# A key file has one line; a longer file is not a key file.
MAX_KEY_BYTES = 64 * 1024


@dataclass(frozen=True)
class Settings:
    url: str
    key: Secret = field(repr=False)


def discover(url: str | None = None, key: str | Secret | None = None, data_dir: str | os.PathLike[str] | None = None) -> Settings:
    """Uses the arguments, otherwise COBOX_URL and COBOX_API_KEY (or COBOX_API_KEY_FILE), otherwise the `broker.json` in the data
    directory of `cobox up`, which names an agent's key before the user's."""
    if data_dir is None and url is None and key is None:
        url = os.environ.get("COBOX_URL") or None
        key = _key_from_environment()
    if url is None and key is None:
        return _from_state_file(pathlib.Path(data_dir).expanduser() if data_dir is not None else default_data_dir())
    url = url or os.environ.get("COBOX_URL") or None
    key = key or _key_from_environment()
    if not url or not key:
        raise SettingsMissing("the broker's URL is not set" if not url else "the API key is not set")
    return Settings(_validated_url(url), _validated_key(key))


def default_data_dir() -> pathlib.Path:
    named = pathlib.Path(os.environ.get("XDG_DATA_HOME") or "")
    return (named if named.is_absolute() else pathlib.Path("~/.local/share").expanduser()) / "cobox"


def _key_from_environment() -> Secret | None:
    if text := os.environ.get("COBOX_API_KEY"):
        return Secret(text.strip())
    if name := os.environ.get("COBOX_API_KEY_FILE"):
        return _read_key_file(pathlib.Path(name).expanduser())
    return None


def _from_state_file(folder: pathlib.Path) -> Settings:
    state_file = folder / "broker.json"
    try:
        state = json.loads(state_file.read_text())
        url, key_file = state["url"], state.get("agent_key_file") or state["api_key_file"]
    except (FileNotFoundError, NotADirectoryError):
        raise SettingsMissing(f"no broker is running in {folder}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise SettingsMissing(f"{state_file} can't be read") from None
    return Settings(_validated_url(str(url)), _read_key_file(pathlib.Path(str(key_file))))


def _read_key_file(file: pathlib.Path) -> Secret:
    try:
        with file.open() as opened:
            text = opened.read(MAX_KEY_BYTES).strip()
    except (OSError, ValueError) as error:
        raise SettingsMissing(f"the API key can't be read from {file}: {type(error).__name__}") from None
    return _validated_key(text)


def _validated_key(key: str | Secret) -> Secret:
    text = key.expose() if isinstance(key, Secret) else key
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise SettingsMissing("the API key is empty or contains invalid characters")
    return Secret(text)


def _validated_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:
        is_right = False
    # A user name and password in the URL would end up in messages and logs.
    if not is_right or parts.username is not None or parts.query or parts.fragment:
        raise SettingsMissing("the broker's URL is invalid; expected a URL such as http://127.0.0.1:8421")
    return url.rstrip("/")
