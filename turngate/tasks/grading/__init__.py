"""What the host decides about an agent's work. `grade` is the one way to a reward, whoever started the rollout."""
