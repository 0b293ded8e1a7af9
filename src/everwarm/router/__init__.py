"""Engines as processes: started, watched, restarted. Several models behind one address come here."""
