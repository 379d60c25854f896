"""How the bytes of a version get here: `stream` through gRPC into the store, `directory` through a shared one, `objects` through
an object store.

Which one a version came by is written in its manifest: a uri, or none.
"""
