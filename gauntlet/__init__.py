"""The Gauntlet: a neutral benchmark for rollout gateways. Start it with `python -m gauntlet`.

Whatever stands between an agent and an inference engine and records training data can be put through it. Nothing here imports
Turngate: a gateway is a program that is started in front of a mock engine, spoken to over HTTP, and asked for what it recorded.

    scenario ──► agent (a voice per dialect) ──HTTP──► gateway under test ──HTTP──► mock engine
                                                           │                            │
                                                        record ──────► score ◄────── its log: the truth
"""
