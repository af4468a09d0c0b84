"""Engines sample tokens. `base` defines the interface and lists its implementations, and `pool` spreads sessions over several engines."""
