"""One engine process: started, listened to, killed when it hangs, restarted with its waiting requests replayed."""
