"""Integration with TRL's asynchronous GRPO. Requires TRL (extra `trl`), which only this package imports.

    worker     `TurngateWorker`, a rollout worker for `AsyncGRPOTrainer`: converts a feed's deliveries to TRL's rows
    rows       conversion of a delivery to `RolloutSample`s, and the queue that the trainer reads
    weights    `fence_weight_sync`: makes the gateway's new calls wait during TRL's weight sync
    trainer    `CheckpointedTrainer`: records trained deliveries in its checkpoints, so that no delivery is trained twice
    throttle   a limit on how far the worker's plan runs ahead of the trainer
    sessions   an alternative: OpenEnv sessions for TRL's own `HarnessRolloutWorker`

docs/trl.md compares the two approaches, and examples/trl/ contains runnable examples.
"""
