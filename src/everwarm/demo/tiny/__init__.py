"""Tiny models with real architectures: a seeded writer of GGUF files that libllama loads and decodes.

Knows hyperparameters, tensor shapes and how to draw weights. Does not know libllama, servers or what the files are for;
the models have random weights, so what they say means nothing.
"""

from everwarm.demo.tiny.plans import ARCHITECTURES, Plan, Tensor, TinySpec, plan_tiny
from everwarm.demo.tiny.vision import projector_path, write_tiny_vision
from everwarm.demo.tiny.write import write_tiny

__all__ = [
    "ARCHITECTURES",
    "Plan",
    "Tensor",
    "TinySpec",
    "plan_tiny",
    "projector_path",
    "write_tiny",
    "write_tiny_vision",
]
