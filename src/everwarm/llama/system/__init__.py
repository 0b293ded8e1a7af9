"""The process around libllama: threads that wait, memory that fits, pinned memory, and model files that may change."""
