"""Teacher scores: another model scores the ids of recorded rows, for on-policy distillation and KL terms.

config       the teacher's settings
vocabulary   check that the teacher's ids mean the same tokens as the recorded ids
scoring      score the turns of rows, several calls at a time, and cache the scores
feed         score the deliveries of a feed
"""

from turngate.trainers.teacher.config import TeacherConfig
from turngate.trainers.teacher.feed import FeedTeacher
from turngate.trainers.teacher.scoring import TEACHER_LOGPROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS

__all__ = ["TEACHER_LOGPROBS", "TEACHER_TOP_IDS", "TEACHER_TOP_LOGPROBS", "FeedTeacher", "TeacherConfig"]
