"""Recognize network addresses of this machine."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str | None) -> bool:
    """Return whether a host is `localhost` or a loopback address. Other hosts may also be this machine."""
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
