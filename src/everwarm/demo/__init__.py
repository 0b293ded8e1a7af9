"""The embedded default model, tiny models of real architectures, and the guided tour.

``EMBEDDED_MODEL`` is everwarm-tiny, a small trained hybrid model that lies in this folder. ``tour`` is ``everwarm demo``:
scripted conversations on an engine, with measured numbers. ``tiny`` writes random models of any size, for the tour's
images, tests and benchmarks.
"""

from pathlib import Path

EMBEDDED_MODEL = Path(__file__).parent / "everwarm-tiny.gguf"
