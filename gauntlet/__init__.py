"""The Gauntlet: a neutral benchmark for rollout gateways. Start it with `python -m gauntlet`.

It tests any program that stands between an agent and an inference engine and records training data. It does not import Turngate: it starts
each gateway in front of a mock engine, talks to it over HTTP, and fetches what it recorded.

    scenario ──► agent (a client per dialect) ──HTTP──► gateway under test ──HTTP──► mock engine
                                                            │                            │
                                                         record ──────► score ◄────── its log, the ground truth
"""
