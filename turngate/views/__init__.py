"""Read models for people and APIs: sessions, traces, rollouts, groups and trends, read from the store.

The servers, the command line and the trainers all read through these views.
"""
