"""gRPC: one servicer per service, the rules of every call, and answers as messages."""
