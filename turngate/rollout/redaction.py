"""Remove an agent's secrets from what it printed: an agent may print everything it has."""

from __future__ import annotations

import re
from collections.abc import Mapping

from turngate.telemetry.logs import REDACTED, redact

_MIN_SECRET = 6  # characters
_SECRET_NAMES = re.compile("(?i)key|token|secret|passw|credential")  # in the names of environment variables


class Redactor:
    """Knows the secrets that one agent had: those in its environment, and the key of its session."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._secrets = [value for name, value in env.items() if _SECRET_NAMES.search(name)]

    def add(self, secret: str) -> None:
        self._secrets.insert(0, secret)

    def redact_text(self, text: str) -> str:
        """For text that others see: also removes what looks like one of our own keys."""
        for secret in self._list_secrets():
            text = text.replace(secret, REDACTED)
        return redact(text)

    def redact_bytes(self, data: bytes) -> bytes:
        """For stored output: removes the known secrets and nothing else."""
        for secret in self._list_secrets():
            data = data.replace(secret.encode("utf-8", "surrogatepass"), REDACTED.encode())
        return data

    def _list_secrets(self) -> list[str]:
        return [secret for secret in self._secrets if len(secret) >= _MIN_SECRET]
