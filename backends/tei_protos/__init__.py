"""Messages of TEI's and TEI Manager's gRPC services: two `.proto` files, and the code generated from them.

`make protos` generates it again. The field numbers are those of text-embeddings-inference 1.9.3 and of TEI
Manager 0.12.0, so that their clients need no other file.
"""
