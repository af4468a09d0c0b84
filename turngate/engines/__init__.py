"""Where tokens come from: `base` is the seam, the other files fill it, `pool` spreads sessions over several engines."""
