"""Settings of the served routes: the broker, the identity used there, and whether the dataplane is relayed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ...errors import CoboxError
from ...secret import Secret

# Identity of callers at the broker.
SHARED = "shared"
CALLER = "caller"


class SettingsError(CoboxError):
    """A setting is missing or invalid; the message says which one and what is expected."""

    code = "SETTINGS_ERROR"


@dataclass(frozen=True)
class Settings:
    """The broker's address and how its routes are served."""

    # The broker's address without a trailing slash.
    broker_url: str
    # With `shared`: the deployment's key, of kind human, never an operator's.
    api_key: Secret | None = field(default=None, repr=False)
    # `shared`: the broker sees every user as the deployment's principal, and this deployment separates them by thread and tag.
    # `caller`: a user's credential for this deployment is also sent to the broker, which trusts its issuer.
    identity: str = SHARED
    # Whether the broker asks this deployment about threads (`[thread_authority]`), which needs the caller's credential.
    is_thread_authority: bool = False
    # The deployment's address as its clients see it. If set, sandboxes are reached through the deployment.
    relay_url: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "broker_url", _address("the broker's URL (COBOX_URL)", self.broker_url))
        if self.relay_url is not None:
            object.__setattr__(self, "relay_url", _address("COBOX_LANGGRAPH_RELAY", self.relay_url))
        if self.identity not in (SHARED, CALLER):
            raise SettingsError(f"COBOX_LANGGRAPH_IDENTITY: must be `{SHARED}` or `{CALLER}`")
        if self.identity == SHARED and not self.api_key:
            raise SettingsError("the deployment has no key for the broker: set COBOX_API_KEY or COBOX_API_KEY_FILE")

    @classmethod
    def from_environment(cls, env: Mapping[str, str] | None = None) -> Settings:
        env = os.environ if env is None else env
        identity = env.get("COBOX_LANGGRAPH_IDENTITY") or SHARED
        url = env.get("COBOX_URL")
        if not url:
            raise SettingsError("no broker: set COBOX_URL to its address, such as http://127.0.0.1:8421")
        return cls(
            broker_url=url,
            # The key file is not read if it is not needed.
            api_key=_key(env) if identity == SHARED else None,
            identity=identity,
            is_thread_authority=_is_on(env, "COBOX_LANGGRAPH_IS_THREAD_AUTHORITY"),
            relay_url=env.get("COBOX_LANGGRAPH_RELAY") or None,
        )


def _key(env: Mapping[str, str]) -> Secret | None:
    key, file = env.get("COBOX_API_KEY"), env.get("COBOX_API_KEY_FILE")
    if not key and file:
        try:
            key = Path(file).expanduser().read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"COBOX_API_KEY_FILE can't be read: {type(error).__name__}") from None
    key = (key or "").strip()
    return Secret(key) if key else None


def _is_on(env: Mapping[str, str], name: str) -> bool:
    word = (env.get(name) or "").lower()
    if word not in ("", "0", "1", "false", "true", "no", "yes"):
        raise SettingsError(f"{name}: must be 1 or 0")
    return word in ("1", "true", "yes")


def _address(name: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        is_plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        is_plain = False
    if not is_plain or not url.isprintable() or " " in url or "?" in url or "#" in url:
        raise SettingsError(f"{name} must be an http or https URL without user, query or fragment")
    return url.rstrip("/")
