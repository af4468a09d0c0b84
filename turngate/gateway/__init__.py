"""What a gateway does with model calls, sessions, feeds and weight updates. Read `turn.py` first."""
