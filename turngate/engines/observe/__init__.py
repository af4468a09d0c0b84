"""Observe mode: relays to endpoints that render prompts and parse replies themselves."""
