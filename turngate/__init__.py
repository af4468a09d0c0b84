"""Turngate: the gateway that lets people train the coding agents they really use."""

__version__ = "0.1.0"
