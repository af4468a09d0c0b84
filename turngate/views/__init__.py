"""Read models for people and APIs: sessions, traces, rollouts, groups and trends, read from the store.

These views are the only read side: the servers, the command line and the trainers all use them.
"""
