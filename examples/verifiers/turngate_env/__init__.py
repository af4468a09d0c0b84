"""An environment for verifiers (`vf-eval turngate-env …`) and prime-rl: Turngate's tasks, agents, sandboxes and grades.

verifiers finds an environment by the name of an installed module, and expects one taskset, one harness and one env in its `__all__`.
Subclass them here to build your own environment, for example with preset tasks and a preset agent.
"""

from turngate.trainers.verifiers import TurngateEnv, TurngateHarness, TurngateTaskset

__all__ = ["TurngateEnv", "TurngateHarness", "TurngateTaskset"]
