"""The reference trainer (extra `local`), which trains the in-process engine's model with GRPO on the groups of a feed.

    loss           importance ratios, clipping, weights
    distillation   per-token advantages from a teacher's scores
    packing        rows in one sequence, with each shared prefix only once
    attention      attention over the packed rows
    sampling       the distribution that each token was sampled from: temperatures and sampling masks
    grpo           one update: check the recorded log-probabilities, compute gradients, update the weights while calls wait at the fence
    checkpoint     weights, optimizer state, and the number of the last trained delivery
    training       the whole loop: gateway, engine, agents and trainer in one process
    cluster        the same loop with agents on a Ray cluster
    engine_server  the in-process engine as an HTTP server, for the cells of a cluster
    run            a whole run: evaluate, train, evaluate again, write the result
    report         the reward curve, as an image and for a terminal
    display        progress and result on a terminal

Importing this package imports torch.
"""

import turngate.engines.local  # noqa: F401  # before torch: it configures how torch's threads wait
