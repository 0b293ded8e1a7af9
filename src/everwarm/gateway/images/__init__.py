"""Images in requests: found, downloaded from allowed hosts, and decoded to pixels in processes that may die without
harm.

``image_loader`` is what requests use, ``decoder_worker`` the process that decodes, ``image_download`` fetches from
other servers.
"""
