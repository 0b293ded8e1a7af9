"""The C ABI of libmtmd of the same build: struct layouts and function signatures, as data.

Declares; loads and calls nothing. ``lib`` checks the defaults that the loaded library returns against
``EXPECTED_DEFAULTS`` before anything else is called.
"""

from __future__ import annotations

import ctypes as c

from everwarm.llama.abi import LOG_CALLBACK, Signature, f32p, handle, i32p

CHUNK_TEXT, CHUNK_AUDIO = 0, 2
MARKER = b"<__media__>"  # what stands for an image or a sound in a text that is tokenized


class MediaParams(c.Structure):
    """Pointers are plain addresses here: with another layout a text behind one of them could not be read safely."""

    _fields_ = [
        ("use_gpu", c.c_bool),
        ("device", handle),
        ("print_timings", c.c_bool),
        ("n_threads", c.c_int),
        ("image_marker", handle),
        ("media_marker", handle),
        ("flash_attn_type", c.c_int),
        ("warmup", c.c_bool),
        ("image_min_tokens", c.c_int),
        ("image_max_tokens", c.c_int),
        ("cb_eval", handle),
        ("cb_eval_user_data", handle),
        ("batch_max_tokens", c.c_int32),
        ("progress_callback", handle),
        ("progress_callback_user_data", handle),
    ]


class InputText(c.Structure):
    _fields_ = [("text", c.c_char_p), ("text_len", c.c_size_t), ("add_special", c.c_bool), ("parse_special", c.c_bool)]


class DecoderPos(c.Structure):
    _fields_ = [("t", c.c_uint32), ("x", c.c_uint32), ("y", c.c_uint32), ("z", c.c_uint32)]


# What this build returns by default; ``media_marker`` is checked against the address of ``mtmd_default_marker``.
EXPECTED_DEFAULTS = {
    "use_gpu": True,
    "device": None,
    "print_timings": True,
    "n_threads": 4,
    "image_marker": None,
    "flash_attn_type": -1,
    "warmup": True,
    "image_min_tokens": -1,
    "image_max_tokens": -1,
    "cb_eval": None,
    "batch_max_tokens": 1024,
    "progress_callback": None,
}

FUNCTIONS: dict[str, Signature] = {
    "mtmd_default_marker": (handle, ()),
    "mtmd_context_params_default": (MediaParams, ()),
    "mtmd_helper_log_set": (None, (LOG_CALLBACK, handle)),
    # the projector
    "mtmd_init_from_file": (handle, (c.c_char_p, handle, MediaParams)),
    "mtmd_free": (None, (handle,)),
    "mtmd_support_vision": (c.c_bool, (handle,)),
    "mtmd_support_audio": (c.c_bool, (handle,)),
    "mtmd_get_audio_sample_rate": (c.c_int, (handle,)),
    "mtmd_decode_use_mrope": (c.c_bool, (handle,)),
    "mtmd_decode_use_non_causal": (c.c_bool, (handle, handle)),
    # pixels and samples to chunks
    "mtmd_bitmap_init": (handle, (c.c_uint32, c.c_uint32, handle)),
    "mtmd_bitmap_init_from_audio": (handle, (c.c_size_t, handle)),
    "mtmd_bitmap_free": (None, (handle,)),
    "mtmd_input_chunks_init": (handle, ()),
    "mtmd_input_chunks_size": (c.c_size_t, (handle,)),
    "mtmd_input_chunks_get": (handle, (handle, c.c_size_t)),
    "mtmd_input_chunks_free": (None, (handle,)),
    "mtmd_tokenize": (c.c_int32, (handle, handle, c.POINTER(InputText), c.POINTER(handle), c.c_size_t)),
    "mtmd_input_chunk_get_type": (c.c_int, (handle,)),
    "mtmd_input_chunk_get_tokens_text": (i32p, (handle, c.POINTER(c.c_size_t))),
    "mtmd_input_chunk_get_tokens_image": (handle, (handle,)),
    "mtmd_input_chunk_get_n_tokens": (c.c_size_t, (handle,)),
    "mtmd_input_chunk_get_n_pos": (c.c_int32, (handle,)),
    "mtmd_image_tokens_get_nx": (c.c_size_t, (handle,)),
    "mtmd_image_tokens_get_ny": (c.c_size_t, (handle,)),
    "mtmd_image_tokens_get_decoder_pos": (DecoderPos, (handle, c.c_int32, c.c_size_t)),
    # chunks to embeddings
    "mtmd_encode_chunk": (c.c_int32, (handle, handle)),
    "mtmd_get_output_embd": (f32p, (handle,)),
    # number formats, for looking at files
    "ggml_blck_size": (c.c_int64, (c.c_int,)),
    "ggml_type_size": (c.c_size_t, (c.c_int,)),
}
