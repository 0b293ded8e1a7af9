"""Images through libmtmd: its C ABI, an open projector, and the checks a projector file must pass first."""
