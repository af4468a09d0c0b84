"""TRL's asynchronous GRPO on rollouts of real agents. Needs `trl` (extra `trl`), which nothing outside of this folder imports.

    worker     `TurngateWorker`, a rollout worker for `AsyncGRPOTrainer`: a feed's deliveries become TRL's rows
    rows       one delivery → `RolloutSample`s, and what the trainer's queue holds
    weights    `fenced`: TRL's weight sync inside the gateway's fence
    trainer    `CheckpointedTrainer`: which deliveries are trained is in its checkpoints, so that none is trained twice
    pace       how far the worker's plan may run ahead of the trainer
    sessions   the other way in: OpenEnv sessions for TRL's own `HarnessRolloutWorker`
    retry      wait for a gateway that restarts

docs/trl.md says which one to take; examples/trl/ runs them.
"""
