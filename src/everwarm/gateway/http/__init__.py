"""The socket's side: connections and bodies bounded in bytes and time, JSON weighed before it is parsed, server-sent
events written, and how late the event loop is.
"""
