"""Engines sample tokens. `base` defines the interface, the other modules implement it, and `pool` spreads sessions over several engines."""
