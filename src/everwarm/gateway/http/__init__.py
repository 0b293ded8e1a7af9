"""HTTP below the routes: connections and bodies with limits in bytes and time, the cost of JSON estimated before it is
parsed, server-sent events, and the lag of the event loop.
"""
