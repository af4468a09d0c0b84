"""Helpers that every layer uses."""
