"""Test roles and causes on whole rollouts, in the notation of `conversations.py`."""

from __future__ import annotations

import pytest

from tests.trace.conversations import decide, read_rollout
from turngate.trace.roles import ROLES
from turngate.trace.sample import TrainingPolicy

# ── agents without tools ────────────────────────────────────────────────────────────────────────────────────────────

WITHOUT_TOOLS = {
    "one question": """
        main | You code. / Fix add.py. | Here is the fix. … | main""",
    "a conversation": """
        main | You code. / Fix add.py. | Here is the fix. … | main
        main | + Thanks. And sub.py? | The same there. … | main""",
    "three questions with one system prompt": """
        a | You answer. / What is a list? | A list is a sequence. … | main
        b | You answer. / What is a set? | A set has no order. … | main | new
        c | You answer. / What is a map? | A map has keys. … | main | new""",
    "three questions with one system prompt and short answers": """
        a | You answer. / Is 7 prime? | Yes. | main
        b | You answer. / Is 8 prime? | No. | main | new
        c | You answer. / Is 9 prime? | No. | main | new""",
    "a long conversation, then an independent question": """
        a | You answer. / What is a list? | A list is a sequence. … | main
        a | + And a tuple? | A tuple is fixed. … | main
        a | + And an array? | An array is packed. … | main
        b | You answer. / What is a set? | A set has no order. … | main | new""",
    "questions without a system prompt": """
        a | user: What is a list? | A list is a sequence. … | main
        b | user: What is a set? | A set has no order. … | unknown | new""",
    "two agents that share nothing": """
        a | You translate. / Translate this page. | Voici la page. … | main
        b | You draw. / Draw a house. | Roof over walls. … | unknown | new""",
    "three experts on one question": """
        a | You know law. / May I sell this? | Under the law. … | main
        b | You know taxes. / May I sell this? | With taxes. … | unknown | new
        c | You know trade. / May I sell this? | In trade. … | unknown | new""",
    "three experts and the one who decides": """
        a | You know law. / May I sell this? | Under the law. … | subagent
        b | You know taxes. / May I sell this? | With taxes. … | subagent | new
        c | You decide. / They say: {a} and {b}. So? | You may sell it. … | main | new""",
}

# ── tasks with tools in one session ──────────────────────────────────────────────────────────────────────────────────

TASKS = {
    "three tasks with one system prompt": """
        a* | You code. / Fix add.py. | {bash} cat add.py | main
        a* | + tool: a - b | It is a plus now. … | main
        b* | You code. / Write a test of sub.py. | {bash} cat sub.py | main | new
        b* | + tool: a - b | The test is there. … | main
        c* | You code. / Delete mul.py. | {bash} rm mul.py | main | new
        c* | + tool: ok | It is gone. … | main""",
    "tasks of one turn with one system prompt": """
        a* | You code. / Is add.py right? | Yes. | main
        b* | You code. / Is sub.py right? | No. | main | new
        c* | You code. / Is mul.py right, or is it as wrong as the others? | No. | main | new""",
    "two tasks with the same fixed message": """
        a* | You code. / Today is Monday. / Fix add.py. | {bash} cat add.py | main
        a* | + tool: a - b | It is a plus now. … | main
        b* | You code. / Today is Monday. / Fix sub.py. | {bash} cat sub.py | main | new
        b* | + tool: a - b | It is a minus now. … | main""",
    "tasks without system prompts": """
        a* | user: Fix add.py. | {bash} cat add.py | main
        a* | + tool: a - b | It is a plus now. … | main
        b* | user: Write a test of sub.py. | {bash} cat sub.py | main | new
        b* | + tool: a - b | The test is there. … | main
        c  | user: Is mul.py right? | Yes, it multiplies. … | unknown | side""",
    "a sub-agent without a system prompt": """
        main* | user: Fix all. | {task} Find the sums in all the folders. | main
        sub*  | user: Find the sums in all the folders. | {grep} one | subagent | subagent
        sub*  | + tool: 1 | It is in src/one.py. | subagent
        main* | + tool: It is in src/one.py. | All is fixed. | main""",
    "two tasks of a sub-agent with one system prompt": """
        main* | You code. / Fix all. | {task} Find the sums in all the folders. | main
        s1*   | You search. / Find the sums in all the folders. | {grep} one | subagent | subagent
        s1*   | + tool: 1 | It is in src/one.py. | subagent
        main* | + tool: It is in src/one.py. | {ask} More? | main
        s2*   | You search. / Find the tests. | {grep} test | subagent | new
        main* | + tool: no | All is fixed. | main""",
    "a task that uses the answer of the one before": """
        a* | You code. / Plan the change. | First open add.py, then change the sign. … | main
        b* | You code. / Do this: {a} | {bash} sed -i s/-/+/ add.py | main | compaction""",
}

# ── titles, commit messages and probes ──────────────────────────────────────────────────────────────────────────────

SIDE_CALLS = {
    "a title before a single main call": """
        title | You write titles. / Fix add.py. | Fixing a sum | side
        main  | You code. / Fix add.py. | Here is the fix. … | main | new""",
    "a title of other words before a single main call": """
        title | You write titles. / A title for: Fix add.py. | Fixing a sum | side
        main  | You code. / Fix add.py. | Here is the fix. … | main | new""",
    "a title that a rule marks, before a single main call": """
        title(side) | You write titles. / Fix add.py. | Fixing a sum | side
        main        | You code. / Fix add.py. | Here is the fix. … | main""",
    "a long side call that a rule marks, before a single main call": """
        title(side) | You think of titles. / Fix add.py. | Let me think. … | side
        main        | You code. / Fix add.py. | Fixed. | main""",
    "a title before a single main call with a short answer": """
        title | You write titles. / How do I sort? | Sorting lists | unknown
        main  | You code. / How do I sort? | Use sorted(x). | unknown | new""",
    "a title of other words before a single main call with a shorter answer": """
        title | You write titles. / A title for: What is 17 * 23? | Multiplication question | unknown
        main  | You solve. / What is 17 * 23? | 391 | unknown | new""",
    "a single main call with a short answer, then a title": """
        main  | You solve. / What is 17 * 23? | 391 | unknown
        title | You write titles. / What is 17 * 23? | Multiplication question | unknown | new""",
    "a route before a single main call with a short answer": """
        route | You choose. / How do I sort? | python | unknown
        main  | You know python. / How do I sort? | Use sorted(x). | unknown | new""",
    "a long check before a single main call with a short answer": """
        check | You check questions. / What is 17 * 23? | This is safe. … | main
        main  | You solve. / What is 17 * 23? | 391 | unknown | new""",
    "a title before questions with one system prompt and short answers": """
        title | You write titles. / Is 7 prime? | A question of primes | unknown
        a     | You answer. / Is 7 prime? | Yes. | unknown | new
        b     | You answer. / Is 8 prime? | No. | unknown | new""",
    "an edited conversation of an unknown purpose beside the work": """
        main | You code. / Fix add.py. | Here is the fix. … | main
        main | + And sub.py? | The same there. … | main
        main | + And mul.py? | Also there. … | main
        a    | You take notes. / Take notes. | Notes of today. … | unknown | new
        b    | You take notes. / Take notes. / assistant: No. / user: Why? | A note. … | unknown | edited""",
    "short answers without a system prompt": """
        a | user: Is 7 prime? | Yes. | unknown
        b | user: Is 8 prime? | No. | unknown | new""",
    "two titles before the work": """
        title | You write titles. / Fix add.py. | Fixing a sum | side
        name  | You name folders. / Fix add.py. | fix-add | side | new
        main  | You code. / Fix add.py. | Here is the fix. … | main | new
        main  | + And sub.py? | The same there. … | main""",
    "a title after the work": """
        main  | You code. / Fix add.py. | Here is the fix. … | main
        main  | + And sub.py? | The same there. … | main
        title | You write titles. / Fix add.py. | Fixing two sums | side | new""",
    "a title of the answer, and the work goes on": """
        main  | You code. / Fix add.py. | Here is the fix. … | main
        title | You write titles. / Q: Fix add.py. A: {main} | Fixing a sum | side | new
        main  | + And sub.py? | The same there. … | main""",
    "a commit message after each change": """
        main | You code. / Fix add.py. | Here is the fix. … | main
        c1   | You write commit messages. / diff of add.py | fix: add numbers | side | new
        main | + And sub.py? | The same there. … | main
        c2   | You write commit messages. / diff of sub.py | fix: subtract numbers | side | new
        main | + And mul.py? | Also there. … | main
        c3   | You write commit messages. / diff of mul.py | fix: multiply numbers | side | new""",
    "a commit message after a single change": """
        main | You code. / Fix add.py. | Here is the fix. … | main
        c1   | You write commit messages. / diff of add.py | fix: add numbers | side | new""",
    "a commit message beside work with tools": """
        main* | You code. / Fix add.py. | {bash} sed -i s/-/+/ add.py | main
        c1    | You write commit messages. / diff of add.py | fix: add numbers | side | side
        main* | + tool: ok | It is fixed. | main""",
    "a model that edits in two forms, and commits": """
        plan | You are the architect. / Fix add.py. | Change the minus sign in add.py. … | subagent
        edit | You are the editor. / Apply this: {plan} | SEARCH minus REPLACE plus … | main | new
        c1   | You write commit messages. / diff of add.py | fix: add numbers | side | new""",
    "a probe before work with tools": """
        probe | user: quota | ok | side
        main* | You code. / Fix add.py. | {bash} cat add.py | main | None
        main* | + tool: a - b | It is fixed. | main""",
    "a topic check beside work with tools": """
        main* | You code. / Fix add.py. | {bash} cat add.py | main
        topic | Answer with yes or no. / Is this a new topic? | No. | side | side
        main* | + tool: a - b | It is fixed. | main""",
    "a long text that nothing uses, beside work with tools": """
        main* | You code. / Fix add.py. | {bash} cat add.py | main
        notes | You take notes. / Fix add.py. | Notes of today. … | unknown | side
        main* | + tool: a - b | It is fixed. | main""",
    "a title with the whole history, without tools": """
        main* | You code. / Fix add.py. | {bash} cat add.py | main
        main* | + tool: a - b | It is fixed. | main
        title | You write titles. / Fix add.py. / assistant: It is fixed. / A title? | Fixing a sum | side | handoff
        main* | + And sub.py? | That one too. | main""",
    "the model alias of a rule": """
        main         | You code. / Fix add.py. | Here is the fix. … | main
        weak(side)   | You code. / Fix add.py. / Is that right? | I think so. … | side | side""",
}

# ── hand-offs and sub-agents ────────────────────────────────────────────────────────────────────────────────────────

HANDOFFS = {
    "planner and executor": """
        plan | You plan. / Fix add.py. | 1. Open add.py. 2. Change the sign. … | subagent
        do   | You execute. / Do this: {plan} | The sign is changed. … | main | new""",
    "planner and executor with a short answer": """
        plan | You plan. / Fix add.py. | 1. Open add.py. 2. Change the sign. … | main
        do   | You execute. / Do this: {plan} | Done. | unknown | new""",
    "planner and executor, both short": """
        plan | You plan. / Fix add.py. | Change the sign in add.py. | subagent
        do   | You execute. / Do this: {plan} | Done. | main | new""",
    "planner and executor with several turns": """
        plan | You plan. / Fix add.py. | 1. Open add.py. 2. Change the sign. … | subagent
        do   | You execute. / Do this: {plan} | The sign is changed. … | main | new
        do   | + Test it. | All tests pass. … | main""",
    "planner, two executors with one system prompt": """
        plan | You plan. / Fix both. | First fix add.py. Then fix sub.py. … | subagent
        one  | You execute. / Of {plan} do part 1. | The first is done. … | main | new
        two  | You execute. / Of {plan} do part 2. | The second is done. … | main | new""",
    "planner without tools, executor with tools": """
        plan | You plan. / Fix add.py. | 1. Open add.py. 2. Change the sign. … | subagent
        do*  | You execute. / Do this: {plan} | {bash} sed -i s/-/+/ add.py | main | None
        do*  | + tool: ok | Done. | main""",
    "executor with tools, reviewer without, and a revision": """
        do*    | You code. / Fix add.py. | It is a plus now, and tests pass. | main
        review | You review. / Review: {do} | Rename the variable as well, please. | subagent | side
        do*    | + {review} | Renamed. | main""",
    "writer, reviewer, writer": """
        write  | You write. / A poem. | Roses are red. … | main
        review | You review. / Review: {write} | The second line is weak. … | subagent | new
        write  | + {review} | Roses are blue. … | main""",
    "writer and a last reviewer": """
        write  | You write. / A poem. | Roses are red. … | subagent
        review | You review. / Review: {write} | The second line is weak. … | main | new""",
    "a reviewer whose verdict is short, at the end": """
        write  | You write. / A poem. | Roses are red. … | main
        write  | + A second verse. | Violets are blue. … | main
        review | You review. / Review: {write} | Good. | unknown | new""",
    "two reviewers of one answer": """
        do*    | You code. / Fix add.py. | It is a plus now, and tests pass. | main
        r1     | You review style. / Review: {do} | The names are too short here. | subagent | side
        r2     | You review tests. / Review: {do} | A test of zero is missing here. | subagent | side
        do*    | + {r1} {r2} | Both are done. | main""",
    "an answer of a helper in a tool's result": """
        main*  | You code. / Fix add.py. | {ask} Which sign is right in a sum? | main
        helper | You know mathematics. / Which sign is right in a sum? | A sum has a plus sign between its terms. | subagent | side
        main*  | + tool: {helper} | It is fixed. | main""",
    "a hand-off with the history, without tools": """
        triage  | You sort requests. / I want my money back. | I pass you on to billing. | main
        billing | You handle refunds. / I want my money back. / assistant: {triage} / user: Go on. | It is refunded. … | main | system""",
    "a hand-off with the history to an agent with tools": """
        triage   | You sort requests. / I want my money back. | I pass you on to billing. | main
        billing* | You handle refunds. / I want my money back. / assistant: {triage} / user: Go on. | {refund} 12 | main | handoff
        billing* | + tool: ok | It is refunded. | main""",
    "a hand-off from an agent with tools to one without": """
        triage* | You sort requests. / I want my money back. | I pass you on to billing. | main
        billing | You handle refunds. / I want my money back. / assistant: {triage} / user: Go on. | It is refunded. … | main | handoff
        billing | + Thanks. | You are welcome. … | main""",
    "a specialist with the history, and the first agent goes on": """
        main* | You code. / Fix add.py. | I ask a specialist about it. | main
        spec  | You know signs. / Fix add.py. / assistant: {main} / user: Which? | Use a plus. … | subagent | handoff
        main* | + Plus. | It is fixed. | main""",
    "two agents that talk, each with the other's words as the user": """
        a | You are Ann. / Discuss tea. | Tea is better than coffee. | main
        b | You are Bob. / Discuss tea. / {a} | Coffee is better than tea. | subagent | new
        a | + {b} | Let us drink both of them then. | main
        b | + {a} | That is a fine idea, my friend. | subagent""",
    "a helper with tools and a system prompt of its own": """
        main* | You code. / Fix add.py. | {task} Find the sum in src. | main
        sub*  | You search. / Find the sum in src. | {grep} sum | subagent | subagent
        sub*  | + tool: src/add.py | It is in src/add.py. | subagent
        main* | + tool: It is in src/add.py. | It is fixed. | main""",
    "a helper with the same system prompt and tools": """
        main* | You code. / Fix add.py. | {bash} ls | main
        main* | + tool: src | {task} Find the sum in the folder src. | main
        sub*  | You code. / Find the sum in the folder src. | {grep} sum | subagent | subagent
        sub*  | + tool: src/add.py | It is in src/add.py. | subagent
        main* | + tool: It is in src/add.py. | It is fixed. | main""",
    "two helpers at once": """
        main* | You code. / Fix add.py. | {task} Find the sum in src. | main
        s1*   | You search. / Find the sum in src. | {grep} sum | subagent | subagent
        s2*   | You search well. / Find the sum in lib. | {grep} sum | subagent | subagent
        s1*   | + tool: src/add.py | It is in src/add.py. | subagent
        s2*   | + tool: none | It is not in lib. | subagent
        main* | + tool: src/add.py | It is fixed. | main""",
}

# ── summaries and shortened conversations ───────────────────────────────────────────────────────────────────────────

_LONG_WORK = """
        main* | You code. / Fix all. | {bash} cat a.py | main
        main* | + tool: a - b | {bash} cat b.py | main
        main* | + tool: b - c | {bash} cat c.py | main"""
_LONG_COMMANDS = """
        main* | You code. / Fix all. | {bash} cat src/parts/first_part.py | main
        main* | + tool: a - b | {bash} cat src/parts/second_part.py | main
        main* | + tool: b - c | {bash} cat src/parts/third_part.py | main"""
_LONG_TALK = """
        main | You code. / Fix all. | The first is fixed. … | main
        main | + Next. | The second is fixed. … | main
        main | + Next. | The third is fixed. … | main"""

SUMMARIES = {
    "a summary in the conversation, with tools": f"""{_LONG_WORK}
        main*  | + tool: c - d / Summarize the conversation. | So far a.py and b.py were read. … | summary
        after* | You code. / Summary: {{main}} | {{bash}} cat d.py | main | compaction
        after* | + tool: d - e | All is fixed. | main""",
    "a summary in the conversation, with tools, by a rule": f"""{_LONG_WORK}
        main*(summary) | + tool: c - d / Summarize the conversation. | So far. … | summary | side
        after*         | You code. / Summary: {{main}} | {{bash}} cat d.py | main | compaction""",
    "a summary by a prompt of its own": f"""{_LONG_WORK}
        sum    | You summarize. / Fix all. a - b b - c | So far a.py and b.py were read. … | summary | side
        after* | You code. / Summary: {{sum}} | {{bash}} cat d.py | main | compaction""",
    "a summary in the conversation, with tools, without system prompts": """
        main*  | user: Fix all. | {bash} cat a.py | main
        main*  | + tool: a - b | {bash} cat b.py | main
        main*  | + tool: b - c / Summarize the conversation. | So far a.py and b.py were read. … | summary
        after* | user: Summary: {main} | {bash} cat d.py | main | compaction
        after* | + tool: d - e | All is fixed. | main""",
    "a summary by a prompt of its own, without system prompts": """
        main*  | user: Fix all. | {bash} cat a.py | main
        main*  | + tool: a - b | {bash} cat b.py | main
        sum    | user: Summarize: Fix all. a - b b - c | So far a.py and b.py were read. … | summary | side
        after* | user: Summary: {sum} | {bash} cat d.py | main | compaction""",
    "a summary by a prompt of its own, of a transcript": f"""{_LONG_TALK}
        sum   | You summarize. / Transcript: {{main}} | So far two files were fixed. … | summary | new
        after | You code. / Summary: {{sum}} | The fourth is fixed. … | main | compaction
        after | + Next. | The fifth is fixed. … | main""",
    "a summary by a prompt of its own, by a rule": f"""{_LONG_TALK}
        sum(summary) | You summarize. / All of it. | So far two files were fixed. … | summary | side
        after        | You code. / Summary: {{sum}} | The fourth is fixed. … | main | compaction""",
    "a summary in the conversation, without tools": f"""{_LONG_TALK}
        main  | + Summarize the conversation. | So far three files were fixed. … | summary
        after | You code. / Summary: {{main}} | The fourth is fixed. … | main | compaction""",
    "two summaries, one after the other": f"""{_LONG_TALK}
        main  | + Summarize the conversation. | So far three files were fixed. … | summary
        after | You code. / Summary: {{main}} | The fourth is fixed. … | main | compaction
        after | + Next. | The fifth is fixed. … | main
        after | + Summarize the conversation. | Up to now five files were fixed. … | summary
        last  | You code. / Summary: {{after}} | The sixth is fixed. … | main | compaction""",
    "two summaries, the second after one turn": f"""{_LONG_TALK}
        main  | + Summarize the conversation. | So far three files were fixed. … | summary
        after | You code. / Summary: {{main}} | The fourth is fixed. … | main | compaction
        after | + Summarize the conversation. | Up to now four files were fixed. … | summary
        last  | You code. / Summary: {{after}} | The fifth is fixed. … | main | compaction""",
    "a summary as the assistant's first message": f"""{_LONG_WORK}
        sum    | You summarize. / Fix all. a - b b - c | So far a.py and b.py were read. … | summary | side
        after* | You code. / What did we do so far? / assistant: {{sum}} / Go on. | {{bash}} cat d.py | main | compaction""",
    "a summary as the assistant's first message, by a rule": f"""{_LONG_WORK}
        sum(summary) | You summarize. / Fix all. | So far a.py and b.py were read. … | summary | side
        after*       | You code. / So far? / assistant: {{sum}} / Go on. | {{bash}} cat d.py | main | compaction""",
    "the fixed context inserted again after a summary": f"""{_LONG_WORK}
        main*(summary) | + tool: c - d / Summarize. | So far. … | summary | side
        after*         | You code. / Summary: {{main}} | {{bash}} cat the last file | main | compaction
        fixed*         | You code. / It is Monday. / {{main}} / again: after / tool: Command: {{after}} | Done. | main | compaction""",
    "a summary in markup that the agent removes": f"""{_LONG_WORK}
        main*  | + tool: c - d / Summarize. | <sum><state>So far the files a.py and b.py were read, c.py is next.</state></sum> | summary
        after* | You code. / <state>So far the files a.py and b.py were read, c.py is next.</state> | {{bash}} ls | main | compaction""",
    "a summary and the arguments of the last call": """
        main*  | You code. / Fix all. | {bash} cat the file with the first sum | main
        main*  | + tool: a - b | {bash} cat the file with the second sum | main
        main*  | + tool: b - c / Summarize. | So far a.py and b.py were read. … | summary
        after* | You code. / Last: cat the file with the second sum / {main} | {bash} ls | main | compaction""",
    "shortened without a summary by the model": f"""{_LONG_COMMANDS}
        after* | You code. / So far: you ran cat src/parts/second_part.py. | {{bash}} cat d.py | main | compaction""",
    "shortened without a summary by the model, with the task": f"""{_LONG_WORK}
        after* | You code. / Fix all.¶¶Two files were read. | {{bash}} cat d.py | main | compaction""",
    "shortened without content in common": f"""{_LONG_WORK}
        after* | You code. / Two files were read. | {{bash}} cat d.py | main | new""",
    "the question kept, the rest summarized": f"""{_LONG_TALK}
        after | You code. / Fix all. / So far: three files. | The fourth is fixed. … | main | compaction""",
    "the end of the history kept, without tools": f"""{_LONG_TALK}
        after | You code. / Go on here. / assistant: {{main}} / user: Next. | The fourth is fixed. … | main | compaction""",
    "the answer of one call in the next, with one system prompt": """
        a | You write. / A poem. | Roses are red. … | main
        b | You write. / Improve this: {a} | Roses are blue. … | main | new""",
    "draft, critic and revision with one system prompt": """
        draft  | You write. / An essay. | Trees are green. … | main
        critic | You write. / Criticize: {draft} | The last part is weak. … | main | new
        revise | You write. / Revise: {draft} by {critic} | Trees are tall. … | main | new""",
    "a question, a plan, and a conversation that executes it": """
        plan | You code. / What is wrong? | The sign is wrong. … | main
        plan | + Plan the change. | First open add.py. … | main
        do   | You code. / Do this: {plan} | It is changed. … | main | new""",
    "a plan after one call, and a conversation with tools that executes it": """
        plan* | You code. / Plan the change. | {bash} cat add.py | main
        plan* | + tool: a - b | First open add.py, then change the sign. | main
        do*   | You code. / Do this: {plan} | {bash} sed -i s/-/+/ add.py | main | compaction""",
    "one call with tools, a plan without, and a conversation that executes it": """
        ask*  | You code. / Fix add.py. / Fix sub.py. | What should I do first? | main
        plan  | You plan. / Fix both. | First fix add.py, then fix sub.py. … | subagent | side
        do*   | You code. / Do this: {plan} | {bash} sed -i s/-/+/ add.py | main""",
    "the same thread with another start": """
        main*(thread=a)  | You code. / Fix all. | {bash} cat a.py | main
        after*(thread=a) | You continue. / So far: a.py. | {bash} cat b.py | main | compaction""",
    "a sub-agent's shortened conversation": """
        main* | You code. / Fix all. | {task} Find the sums in all the folders. | main
        sub*  | You search. / Find the sums in all the folders. | {grep} one | subagent | subagent
        sub*  | + tool: 1 | {grep} two | subagent
        sub*  | + tool: 2 | {grep} three | subagent
        sub2* | You search. / Find the sums in all the folders.¶So far: one. | {grep} four | subagent | compaction
        main* | + tool: found | All is fixed. | main""",
}

# ── signals ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SIGNALS = {
    "a role decides before structure": """
        main*     | You code. / Fix add.py. | {bash} ls | main
        a*(main)  | You search. / Find it. | {grep} sum | main | subagent""",
    "a thread with a parent, without tools": """
        main*(thread=a)        | You code. / Fix add.py. | {bash} ls | main
        sub(thread=b parent=a) | You think. / Which sign? | A plus. | subagent | subagent
        main*(thread=a)        | + tool: src | It is fixed. | main""",
    "another thread with tools": """
        main*(thread=a) | You code. / Fix add.py. | {bash} ls | main
        sub*(thread=b)  | You code. / Find it. | {grep} sum | subagent | subagent""",
    "another thread without tools, with a short answer": """
        main*(thread=a) | You code. / Fix add.py. | {bash} ls | main
        title(thread=b) | You write titles. / Fix add.py. | Fixing a sum | side | side""",
    "another thread without tools, whose answer is used": """
        main*(thread=a)  | You code. / Fix add.py. | {bash} ls | main
        helper(thread=b) | You think. / Which sign? | A sum has a plus sign. | subagent | side
        main*(thread=a)  | + tool: A sum has a plus sign. | It is fixed. | main""",
    "a sub-agent first, by its role": """
        sub(subagent) | You think. / Which sign? | A sum has a plus sign. … | subagent
        main          | You code. / Fix add.py. | It is fixed. | main | new""",
    "only side calls": """
        a(side) | You write titles. / Fix add.py. | Fixing a sum | side
        b(side) | You write titles. / Fix sub.py. | Fixing a difference | side | side""",
}

# ── revised conversations ───────────────────────────────────────────────────────────────────────────────────────────

REVISIONS = {
    "another system prompt with the answers": """
        a | You code. It is 9:00. / Fix add.py. | Here is the fix. … | main
        b | You code. It is 9:05. / Fix add.py. / assistant: {a} / user: Thanks. | Gladly. … | main | system""",
    "another system prompt without the answers": """
        a | You code. It is 9:00. / Fix add.py. | Here is the fix. … | main
        b | You code. It is 9:05. / Fix add.py. | Here is another fix. … | unknown | new""",
    "another system prompt with tools": """
        a* | You code. It is 9:00. / Fix add.py. | {bash} ls | main
        b* | You code. It is 9:05. / Fix add.py. | {bash} ls | main | system""",
    "an edited history": """
        a | You code. / Fix add.py. | Here is the fix. … | main
        b | You code. / Fix add.py. / assistant: No. / user: Why not? | Because it is right. … | main | edited""",
    "files and commits between the turns": """
        a | You code. / Repository map. / Fix add.py. | Here is the fix. … | main
        b | You code. / Repository map. / Fix add.py. / assistant: {a} / user: Ok? / assistant: Ok. / user: B? | Yes. … | main | edited""",
    "the same question without a system prompt": """
        a | user: Fix add.py. | Here is the fix. … | main
        a | + And sub.py? | The same there. … | main
        b | user: Fix add.py. / So far: add.py. | Here is sub.py. … | main | compaction""",
}

CASES = {**WITHOUT_TOOLS, **TASKS, **SIDE_CALLS, **HANDOFFS, **SUMMARIES, **SIGNALS, **REVISIONS}


@pytest.mark.parametrize("name", CASES)
def test_roles_and_causes(name: str) -> None:
    steps = read_rollout(CASES[name])
    turns, decisions = decide(steps)
    found = [(decision.role, decision.evidence, decision.why) for decision in decisions]
    assert [role for role, _, _ in found] == [step.role for step in steps], found
    stated = [(step.cause, str(turn.info.cause)) for step, turn in zip(steps, turns, strict=True) if step.cause]
    assert [cause for _, cause in stated] == [cause for cause, _ in stated]


def test_there_are_at_least_sixty_conversations() -> None:
    assert len(CASES) >= 60


def test_every_structural_role_has_a_case() -> None:
    roles = {step.role for text in CASES.values() for step in read_rollout(text)}
    assert roles == set(ROLES) - {"superseded", "aborted"}


def test_unknown_is_trained_by_default_and_side_calls_are_not() -> None:
    assert set(TrainingPolicy().roles) == {"main", "subagent", "unknown"}


@pytest.mark.parametrize("name", CASES)
def test_evidence_is_recorded_in_words(name: str) -> None:
    for step, decision in zip(*((steps := read_rollout(CASES[name])), decide(steps)[1]), strict=True):
        assert decision.why
        assert (decision.evidence == "none") == (decision.role == "unknown")
        if step.call.signals.role:
            assert decision.evidence == "signal" and decision.role == step.call.signals.role


# ── traces of older gateways, which recorded no excerpts ────────────────────────────────────────────────────────────

OLD = {
    "a side call before a single main call": """
        title(side) | You write titles. / Fix add.py. | Fixing a sum | side
        main        | You code. / Fix add.py. | Here is the fix. … | main""",
    "a title before work with tools": """
        title | You write titles. / Fix add.py. | Fixing a sum | side
        main* | You code. / Fix add.py. | {bash} ls | main
        main* | + tool: src | It is fixed. | main""",
    "a call without tools beside work with tools": """
        main* | You code. / Fix add.py. | {bash} ls | main
        notes | You take notes. / Fix add.py. | Notes of today. … | side
        main* | + tool: src | It is fixed. | main""",
}


@pytest.mark.parametrize("name", OLD)
def test_roles_of_older_traces(name: str) -> None:
    steps = read_rollout(OLD[name], texts=False)
    assert [decision.role for decision in decide(steps)[1]] == [step.role for step in steps]
