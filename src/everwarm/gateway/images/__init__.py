"""Images in requests: downloaded from allowed hosts, and decoded to pixels in child processes that may crash without
harm.

``image_loader`` is what requests use, ``decoder_worker`` the process that decodes, ``image_download`` fetches from
other servers.
"""
