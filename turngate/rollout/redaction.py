"""Remove an agent's secrets from its output, because an agent may print any secret it can read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from turngate.telemetry.logs import REDACTED, redact

_MIN_SECRET = 6  # characters
_SECRET_NAMES = re.compile("(?i)key|token|secret|passw|credential")  # matches names of environment variables


class Redactor:
    """Removes the secrets of one agent: those in its environment, and its session key."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._secrets = [value for name, value in env.items() if _SECRET_NAMES.search(name)]

    def add(self, secret: str) -> None:
        """Add a secret to remove."""
        self._secrets.insert(0, secret)

    def redact_text(self, text: str) -> str:
        """Redact text that is shown to others. This also removes anything that looks like one of Turngate's own keys."""
        for secret in self._list_secrets():
            text = text.replace(secret, REDACTED)
        return redact(text)

    def redact_bytes(self, data: bytes) -> bytes:
        """Redact stored output. This removes only the known secrets."""
        for secret in self._list_secrets():
            data = data.replace(secret.encode("utf-8", "surrogatepass"), REDACTED.encode())
        return data

    def _list_secrets(self) -> list[str]:
        return [secret for secret in self._secrets if len(secret) >= _MIN_SECRET]
