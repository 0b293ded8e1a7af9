"""The process around libllama: threads, memory and files.

``spin_wait`` makes libllama's threads spin long on a quiet machine and briefly on a busy one. ``pinned_memory`` registers
memory with the CUDA runtime. ``model_files`` identifies model files, and tells whether one was overwritten while it was in
use. ``process`` ties an engine to its parent.
"""
