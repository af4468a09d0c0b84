"""Rollouts from Python: `import turngate as tg; result = await tg.run(task, agent="pi", model=…)`. See docs/python.md."""
