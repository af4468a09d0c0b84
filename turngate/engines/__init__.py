"""Engines, which sample tokens: `base` defines the interface, other modules implement it, and `pool` spreads sessions over several."""
