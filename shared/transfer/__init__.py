"""Weights between the memories of trainer and replicas: one flat layout, shared memory, GPU memory of one host, collectives.

What is a version and who may have it is said elsewhere (`shared.wire.weights`); every byte that comes this way is verified
against the manifest like any other.
"""
