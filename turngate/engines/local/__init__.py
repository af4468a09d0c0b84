"""The in-process engine (extra `local`), which runs a dense Llama, Qwen2 or Qwen3 model on the CPU or on one GPU.

    shape     the network's dimensions, from config.json
    model     the network; training and sampling use the same parameters
    weights   load and save models as Hugging Face folders
    cache     keys and values of current and earlier calls: slots, shared prefixes
    sampler   scores → ids, with the log-probabilities of the sampled distribution
    decode    one step for all slots on a CPU; `graphs` and `kernels` do the same on a GPU
    worker    the sampling thread; `outbox` hands over its results
    engine    the engine interface: calls in, chunks out
    scoring   log-probabilities of given ids, for a teacher or a reference model

Importing this package imports torch.
"""

import os

# Set this before torch is loaded. Otherwise its threads spin while they wait for each other, hundreds of times per step. With agents on
# the same cores, a step on two threads took five times as long as on one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from turngate.engines.local.engine import LocalEngine
from turngate.engines.local.model import Model
from turngate.engines.local.weights import list_weights, load, save

__all__ = ["LocalEngine", "Model", "list_weights", "load", "save"]
