"""The process around libllama: devices, threads, memory and files.

``devices`` lists what libllama can compute on. ``spin_wait`` makes its threads spin long on a quiet machine and briefly on
a busy one. ``memory_fit`` measures what a context takes and refuses one that cannot fit. ``pinned_memory`` registers memory
with the CUDA runtime. ``file_digest`` identifies model files, and ``file_watch`` tells whether one was overwritten while it
was in use. ``process`` ties an engine to its parent.
"""
