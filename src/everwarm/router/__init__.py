"""Engines as processes, and several models behind one address.

``supervise`` runs one engine process and restarts it; ``plan`` decides which models are in memory and ``pool``
carries it out; ``catalog`` finds models; ``replica_score`` chooses between replicas.
"""
