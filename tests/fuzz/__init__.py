"""Fuzzing: random and damaged input for the HTTP API, decoders, relays, parsers, the tree, the store's readers, the verifier, and files.

`make fuzz` runs every target for some time. The tiers run a small sample with a fixed seed.
"""
