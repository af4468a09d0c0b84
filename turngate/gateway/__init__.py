"""The gateway's core: model calls, sessions, feeds and weight updates. Read `turn.py` first."""
