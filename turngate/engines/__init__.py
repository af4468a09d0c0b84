"""Engines, which sample tokens: `base` has the interface, the other modules implement it, `pool` spreads sessions over several."""
