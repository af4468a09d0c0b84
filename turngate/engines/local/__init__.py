"""The in-process engine (extra `local`): a dense Llama, Qwen2 or Qwen3 on this machine's CPU or on one GPU.

    shape     what a model folder's config.json says
    model     the network itself; a trainer's forward and the sampling forward over the same parameters
    weights   parameters from and to a Hugging Face folder
    cache     keys and values of the calls under way and of those before: slots, shared prefixes
    sampler   scores → ids, and the log-probabilities of what was really drawn
    decode    one step for all slots, on a CPU; graphs and kernels, the same on a GPU
    worker    the thread that samples
    engine    the engine seam: calls in, chunks out

Imports torch; nothing outside of this folder does so unless it was asked for the local engine.
"""

import os

# Before torch is loaded: its threads wait for each other hundreds of times in a step, by spinning. Where others want the cores too, such as
# agents in their sandboxes, a step took five times as long on two threads as on one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from turngate.engines.local.engine import LocalEngine
from turngate.engines.local.model import Model
from turngate.engines.local.weights import list_weights, load, save

__all__ = ["LocalEngine", "Model", "list_weights", "load", "save"]
