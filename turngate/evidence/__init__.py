"""One rollout looked at closely: its tree with the causes of its forks, its conversation, and every token with what is known of it.

    shown = read(store, session)            # `shown.py`
    close = Close(shown, tokenizer)
    close.tree()  ·  close.messages(…)  ·  close.tokens(…)

All of it is made from what the store has, and a page at a time: a rollout of a hundred thousand tokens is never written
down whole. `server/page.py` calls it, in a thread of its own.
"""

from turngate.evidence.close import Close
from turngate.evidence.pieces import Pieces, pieces

__all__ = ["Close", "Pieces", "pieces"]
