"""Read models for people and APIs: sessions, traces, rollouts, groups and trends, read from the store.

The servers, the service, the Python API, some trainers, and the commands `show` and `verify` use these views. Feeds and `turngate export`
read the store themselves.
"""
