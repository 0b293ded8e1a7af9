"""What the engine reports about itself: questions from the gateway in, values to show out.

``cache_commands`` answers the cache API, and carries out its orders to pin and drop; everything else here only reads.
``report`` has the numbers, also what a prompt would cost now and what memory is left; ``cache_view`` the tree, page by
page, with the states that are only on disk. ``read_reason`` says, purely, why a request read what it read, as one of a few
codes.
"""
