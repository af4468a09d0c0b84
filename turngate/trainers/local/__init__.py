"""The reference trainer (extra `local`): GRPO over a feed, training the model that the in-process engine samples from.

    loss        importance ratios, clipping, weights
    grpo        one update: check the recorded log-probabilities, compute gradients, update the weights behind the fence
    checkpoint  weights, optimizer state, and the number of the last trained delivery
    training    the whole loop: gateway, engine, agents and trainer in one process
    run         a whole run: evaluate, train, evaluate again, write the result
    report      the reward curve, as an image and for a terminal
    display     progress and result on a terminal

Imports torch.
"""

import turngate.engines.local  # noqa: F401  # before torch: it configures how torch's threads wait
