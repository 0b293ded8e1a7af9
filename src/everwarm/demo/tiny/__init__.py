"""Tiny models with real architectures: a ``TinySpec`` in, a GGUF file out that libllama loads and decodes.

``plans`` has the hyperparameters and tensor shapes of each architecture, as data, and the vocabulary, one token per byte
and the control tokens of a chat; ``write`` draws the weights from a seed and writes the file, and a projector beside it,
all or nothing. The same spec always gives the same bytes. Knows no libllama and no server; the weights are random, so
what the models say means nothing.
"""

from everwarm.demo.tiny.plans import ARCHITECTURES, Plan, Tensor, TinySpec, plan_tiny
from everwarm.demo.tiny.write import projector_path, write_tiny, write_tiny_projector

__all__ = [
    "ARCHITECTURES",
    "Plan",
    "Tensor",
    "TinySpec",
    "plan_tiny",
    "projector_path",
    "write_tiny",
    "write_tiny_projector",
]
