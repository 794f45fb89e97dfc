"""The gateway over gRPC: TEI's services, health and reflection."""
