"""Fuzzing: random and damaged input for the HTTP API, decoders, parsers, the tree, the store's readers, and files that users write.

`make fuzz` runs every target for some time. The tiers run a small sample with a fixed seed.
"""
