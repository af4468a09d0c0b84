"""An environment for verifiers (`vf-eval turngate-env …`) and prime-rl: Turngate's tasks, agents, sandboxes and grades.

verifiers finds an environment by the name of an installed module and looks through its `__all__`: one taskset, one harness, one env.
Change a class here to make an environment of your own, say with the tasks and the agent filled in.
"""

from turngate.trainers.verifiers import TurngateEnv, TurngateHarness, TurngateTaskset

__all__ = ["TurngateEnv", "TurngateHarness", "TurngateTaskset"]
