"""gRPC: one servicer per service, what holds for every call, and answers as messages."""
