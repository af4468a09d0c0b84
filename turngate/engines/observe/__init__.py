"""Relays to hosted endpoints, for sessions that are only observed."""
