"""What is taken out of lines and of what agents left, and what is let be."""

from __future__ import annotations

import pytest

from turngate.common.sharding import new_secret
from turngate.telemetry.logs import REDACTED, redact, redact_known


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("at http://me:pass+/word@host:1/v1", f"at http://{REDACTED}@host:1/v1"),
        ("at https://token@host/v1 now", f"at https://{REDACTED}@host/v1 now"),
        ("postgres://u:p@db/x, mail a@b", f"postgres://{REDACTED}@db/x, mail a@b"),
        ("http://127.0.0.1:8000/v1 is up", "http://127.0.0.1:8000/v1 is up"),
        ("https://unpkg.com/pkg@1.2", "https://unpkg.com/pkg@1.2"),
        ('{"url":"http://h:1","mail":"a@b"}', '{"url":"http://h:1","mail":"a@b"}'),
    ],
)
def test_users_and_passwords_of_urls(line: str, left: str) -> None:
    assert redact(line) == left


def test_what_an_agent_left_loses_secrets_and_nothing_else() -> None:
    secret = new_secret("5f0c")
    assert redact_known(f'key = "{secret}"') == f'key = "{REDACTED}"'
    work = 'send "Authorization: Bearer authentication" to http://me:pw@host, x-api-key: example-value'
    assert redact_known(work) == work and redact(work) != work
