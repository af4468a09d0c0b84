"""Remove secrets from an agent's output and command. An agent may print any secret that it can read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from turngate.agents import placeholders
from turngate.telemetry.logs import REDACTED, redact

_MIN_SECRET = 6  # characters
_SECRET_NAMES = re.compile("(?i)key|token|secret|passw|credential")  # matches names of environment variables and flags
_PLAIN_VALUE = re.compile(r"(?i)[0-9.]{0,7}|true|false|\$.*")  # such as MAX_TOKENS=4096
_NAME = rf"[\w-]*(?:{_SECRET_NAMES.pattern[4:]})[\w-]*"
_FLAG = re.compile(rf"(?i)--?{_NAME}")
# NAME=value, "name": "value" and --flag value, within one word of a command
_ASSIGNMENT = re.compile(
    rf"""(?i)({_NAME}["']?\s*[=:]\s*|--?{_NAME}\s+)(?:(["'])(.*?)\2|([^\s"'()\[\],;&|]+)(?=[\s"'),;&|\]]|$))"""
)


class Redactor:
    """Removes an agent's secrets from text: its session key, secrets in its environment, and values that its task takes from the host.

    Secrets of fewer than 6 characters are not removed.
    """

    def __init__(self, env: Mapping[str, str], host_values: Sequence[str] = ()) -> None:
        """Collect the secrets: the values in `env` whose names suggest secrets, and all `host_values`."""
        self._secrets = [value for name, value in env.items() if _SECRET_NAMES.search(name)]
        self._secrets += sorted(host_values, key=len, reverse=True)  # longest first: one may contain another

    def add(self, secret: str) -> None:
        """Add a secret to remove."""
        self._secrets.insert(0, secret)

    def redact_text(self, text: str) -> str:
        """Remove the secrets, and anything that looks like a secret, from text that people will see."""
        for secret in self._list_secrets():
            text = text.replace(secret, REDACTED)
        return redact(text)

    def redact_bytes(self, data: bytes) -> bytes:
        """Remove the secrets from data that will be stored."""
        for secret in self._list_secrets():
            data = data.replace(secret.encode("utf-8", "surrogatepass"), REDACTED.encode())
        return data

    def _list_secrets(self) -> list[str]:
        return [secret for secret in self._secrets if len(secret) >= _MIN_SECRET]


def is_secret(name: str, value: str) -> bool:
    """Return whether the name suggests a secret, and the value contains no placeholder and is not a short number, `true` or similar."""
    plain = _PLAIN_VALUE.fullmatch(value.rstrip("}")) is not None
    return bool(_SECRET_NAMES.search(name)) and not plain and not placeholders.find_names(value)


def redact_command(command: Sequence[str]) -> list[str]:
    """Replace the secrets in a command: values of variables and flags whose names suggest secrets, and text that looks like a secret."""
    words: list[str] = []
    for n, word in enumerate(command):
        flag = command[n - 1] if n and _FLAG.fullmatch(command[n - 1]) else ""
        if flag and not word.startswith("-"):
            words.append(REDACTED if is_secret(flag, word) else word)
        else:
            words.append(redact(_ASSIGNMENT.sub(_redact_value, word)))
    return words


def _redact_value(found: re.Match[str]) -> str:
    name, quote, value = found[1], found[2] or "", found[3] or found[4] or ""
    return f"{name}{quote}{REDACTED}{quote}" if is_secret(name, value) else found[0]
