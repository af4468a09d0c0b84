"""Helpers shared by all layers."""
