"""TRL's asynchronous GRPO on rollouts of real agents. Needs `trl` (extra `trl`), which nothing outside of this folder imports.

    worker     `TurngateWorker`, a rollout worker for `AsyncGRPOTrainer`: turns a feed's deliveries into TRL's rows
    rows       one delivery → `RolloutSample`s, and the trainer's queue
    weights    `fence_weight_sync`: TRL's weight sync inside the gateway's fence
    trainer    `CheckpointedTrainer`: records trained deliveries in its checkpoints, so that none is trained twice
    throttle   how far the worker's plan may run ahead of the trainer
    sessions   the alternative: OpenEnv sessions for TRL's own `HarnessRolloutWorker`

docs/trl.md compares them; examples/trl/ runs them.
"""
