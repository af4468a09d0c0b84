"""All rollouts at a glance: lists with filters and sorting, groups, rewards and throughput over time, failures. For the web page.

Kept in memory by whoever looks, and brought up to date from the stream of events before every answer: the first look reads what there is (a
second for ten thousand rollouts), each further one only what happened since. No trace is read for a list, and no turn pays for one. Each
worker makes its own from the store that they share. Everything runs in the thread of one `Apart`, so nothing here is locked.

    known.py      what is known of every rollout, and how it is kept up to date
    order.py      which of them are wanted, in which order
    groups.py     what the rollouts of a group come to
    trends.py     over time: rewards, staleness, throughput; and what went wrong how often
    questions.py  `Overview`: what `server/page.py` asks
"""

from turngate.overview.known import DONE, STATUSES, UNDER_WAY, Row
from turngate.overview.order import Wanted
from turngate.overview.questions import Overview

__all__ = ["DONE", "STATUSES", "UNDER_WAY", "Overview", "Row", "Wanted"]
