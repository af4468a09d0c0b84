"""The reference trainer (extra `local`): GRPO over a feed, with the weights that the in-process engine samples from.

    loss        rows → one number to descend: importance ratios, clipping, who weighs how much
    grpo        one update: rows compared with what was recorded, gradients, a step behind the fence
    checkpoint  what a killed trainer goes on from: weights, optimizer, the number of the last delivery
    training    the whole loop: gateway, engine, agents and trainer in one process
    report      the reward curve, as a picture and in a terminal

Imports torch; nothing outside of this folder does so unless it was asked for the local trainer.
"""

import turngate.engines.local  # noqa: F401  # before torch: it says how torch's threads wait
