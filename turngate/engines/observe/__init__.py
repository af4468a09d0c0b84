"""Observe mode: relays to endpoints that do their own rendering and parsing."""
