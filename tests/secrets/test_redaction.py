"""What is redacted from log lines and from the output of agents, and what is kept."""

from __future__ import annotations

import pytest

from turngate.common.sharding import new_secret
from turngate.telemetry.logs import REDACTED, redact, redact_known


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("at http://me:pass+/word@host:1/v1", f"at http://{REDACTED}@host:1/v1"),
        ("at https://token@host/v1 now", f"at https://{REDACTED}@host/v1 now"),
        ("postgres://u:p@db/x, mail a@b", f"postgres://{REDACTED}@db/x, mail a@b"),
        ("http://127.0.0.1:8000/v1 is up", "http://127.0.0.1:8000/v1 is up"),
        ("https://unpkg.com/pkg@1.2", "https://unpkg.com/pkg@1.2"),
        ('{"url":"http://h:1","mail":"a@b"}', '{"url":"http://h:1","mail":"a@b"}'),
    ],
)
def test_url_credentials_are_redacted(line: str, expected: str) -> None:
    assert redact(line) == expected


def test_only_issued_secrets_are_redacted_in_agent_output() -> None:
    secret = new_secret("5f0c")
    assert redact_known(f'key = "{secret}"') == f'key = "{REDACTED}"'
    work = 'send "Authorization: Bearer authentication" to http://me:pw@host, x-api-key: example-value'
    assert redact_known(work) == work and redact(work) != work
