"""Observe mode: relays to endpoints that render and parse by themselves."""
